"""What a hostile caller tries: other tenants' cache, other routes, bombs, addresses, logs, labels."""

import gzip
import io
import json
import logging
import os
import random
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy import logs
from proxy.config.groups import Log
from proxy.config.root import Key
from proxy.downstream.auth import hash_token
from tests.bodies import chat, eventually
from tests.conftest import RawConnect, RunningProxy, StartProxy
from tests.fake_engine import Rules
from tests.fake_replies import Raw, Reply, content_event, json_error
from tests.fake_vllm import FakeVllm

KEYS = (Key("a", hash_token("key-a")), Key("b", hash_token("key-b")))
AS_A, AS_B = "Bearer key-a", "Bearer key-b"


async def salt_of(proxy: RunningProxy, fake: FakeVllm, raw: bytes, key: str) -> Any:
    """Send `raw` under `key`; return the salt that vLLM got, and check that it is there once."""
    async with proxy.post(raw, Authorization=key) as response:
        assert response.status == 200, await response.text()
    pairs: list[tuple[str, Any]] = json.loads(fake.generations[-1].raw, object_pairs_hook=list)
    (salt,) = [value for name, value in pairs if name == "cache_salt"]
    return salt


async def test_a_caller_cannot_use_anothers_salt(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """
    However B names A's salt, vLLM gets B's, once; it is no secret of A's that B could guess (SC-01).
    """
    proxy = await start_proxy(keys=KEYS)
    plain = json.dumps(chat("x")).encode()
    of_a, of_b = [await salt_of(proxy, fake_vllm, plain, key) for key in (AS_A, AS_B)]
    assert of_a != of_b
    assert all(len(salt) >= 32 and set(salt) <= set("0123456789abcdef") for salt in (of_a, of_b))
    rest = f'"cache_salt":"{of_a}","messages":[{{"role":"user","content":"x"}}]}}'
    bodies = [
        json.dumps(chat("x", cache_salt=of_a)),
        json.dumps(chat("x", Cache_Salt=of_a)),
        '{"cache_salt":"y",' + rest,
        "{" + rest.replace("cache_salt", "cache_s\\u0061lt"),
    ]
    for body in bodies:
        assert await salt_of(proxy, fake_vllm, body.encode(), AS_B) == of_b, body


async def test_nested_extra_body_does_not_set_the_salt(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """vLLM ignores `extra_body`; the salt beside it is B's (SC-01)."""
    proxy = await start_proxy(keys=KEYS)
    raw = json.dumps(chat("x", extra_body={"cache_salt": "stolen"})).encode()
    async with proxy.post(raw, Authorization=AS_B) as response:
        assert response.status == 200
    assert fake_vllm.generations[0].body["cache_salt"] != "stolen"


async def test_callers_do_not_share_cached_prefixes(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """
    A's prompt is cached for A (the positive control) and not for B, so no time and no count tells B of it (SC-01).
    """
    proxy = await start_proxy(keys=KEYS)
    counts = []
    for key in (AS_A, AS_A, AS_B):
        async with proxy.post(chat("one two three four " * 20), Authorization=key) as response:
            counts.append((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert counts[0] == counts[2] == 0
    assert counts[1] > 0


PATHS = [
    "/invocations",
    "/reset_prefix_cache",
    "/sleep",
    "/collective_rpc",
    "//invocations",
    "/v1/../invocations",
    "/v1/%2e%2e/invocations",
    "/v1/..%2finvocations",
    "/V1/chat/completions/../../metrics",
    "/v1;x/../metrics",
    "/tokenize/../invocations",
    "/v1/chat/completions/batch",
    "/v1/responses/resp_1",
    "/pause",
    "/docs",
    "/openapi.json",
    "/server_info",
    "http://127.0.0.1:1/invocations",
]


@pytest.mark.parametrize("path", PATHS)
async def test_routes_that_are_not_on_the_list_do_not_exist(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, path: str
) -> None:
    """GET and POST, without and with a key: a 404, 405 or 401 in JSON and not one call to vLLM (SC-02)."""
    proxy = await start_proxy(keys=KEYS)
    await eventually(lambda: fake_vllm.of("/v1/models"))
    for method in ("GET", "POST"):
        for head in ("", f"Authorization: {AS_A}\r\n"):
            client = await raw_connect(proxy.port)
            lines = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{head}Connection: close\r\nContent-Length: 2\r\n\r\n{{}}"
            await client.send(lines.encode())
            head_bytes, _, body = (await client.rest()).partition(b"\r\n\r\n")
            assert int(head_bytes.split(b" ")[1]) in (400, 401, 404, 405)
            assert json.loads(body)["error"]["message"]
    assert {seen.path for seen in fake_vllm.seen} <= {"/v1/models", "/health", "/version", "/metrics"}
    assert [seen for seen in fake_vllm.seen if seen.method == "POST"] == []


async def test_tokenize_needs_a_key_though_vllm_asks_for_none(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """vLLM guards only what lies below /v1 (SC-02)."""
    proxy = await start_proxy(keys=KEYS)
    async with proxy.post({"prompt": "x"}, "/tokenize") as response:
        assert response.status == 401
    assert fake_vllm.of("/tokenize") == []
    async with proxy.post({"prompt": "x"}, "/tokenize", Authorization=AS_A) as response:
        assert response.status == 200


async def test_metrics_are_not_for_clients_keys(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Neither vLLM's metrics nor ours answer to an ordinary key (SC-02)."""
    proxy = await start_proxy(keys=KEYS)
    for headers in ({}, {"Authorization": AS_A}):
        async with proxy.session.get(proxy.url + "/metrics", headers=headers) as response:
            assert response.status in (401, 403)
            assert "error" in await response.json()


async def test_a_decompression_bomb_is_refused_without_being_inflated(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """65 KB of gzip that would be 64 MiB: 413, and at most the limit and 8 MiB more memory (SC-05)."""
    limit = 8 << 20
    proxy = await start_proxy(limits__body_bytes=limit)
    bomb = _bomb(64 << 20)
    await _post_coded(proxy, _bomb(1 << 20), "gzip")  # so that code and buffers that all requests share are there
    tracemalloc.start()
    try:
        for coding in ("gzip", "GZIP"):
            status, error = await _post_coded(proxy, bomb, coding)
            assert (status, error["type"]) == (413, "invalid_request_error")
        grown = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 1 << 20 < grown < limit + (8 << 20)  # the lower bound: that inflating is seen by this measure at all
    assert fake_vllm.generations == []


def _bomb(size: int) -> bytes:
    """Return gzip of `size` bytes of spaces, made in parts so that this test itself holds little."""
    packer = zlib.compressobj(9, wbits=31)
    parts = [packer.compress(b" " * (1 << 20)) for _ in range(size >> 20)]
    return b"".join(parts) + packer.flush()


async def _post_coded(proxy: RunningProxy, raw: bytes, coding: str) -> tuple[int, Any]:
    async with proxy.post(raw, Content_Encoding=coding) as response:
        body = json.loads(await response.read())
        return response.status, body.get("error")


async def test_small_compressed_bodies_are_served_or_refused_by_their_coding(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """gzip and deflate are inflated; what is not supported is a 415 before any byte of it is looked at (SC-05)."""
    raw = json.dumps(chat(max_tokens=5)).encode()
    for coding, body in (("gzip", gzip.compress(raw)), ("GZIP", gzip.compress(raw)), ("deflate", zlib.compress(raw))):
        assert (await _post_coded(proxy, body, coding))[0] == 200
        assert fake_vllm.generations[-1].raw == raw
        assert "Content-Encoding" not in fake_vllm.generations[-1].headers
    for coding in ("br", "zstd", "gzip, gzip", "x"):
        status, error = await _post_coded(proxy, gzip.compress(gzip.compress(raw)), coding)
        assert (status, error["code"]) == (415, "unsupported_encoding"), coding


async def test_a_body_above_the_limit_is_refused(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """413 in OpenAI's shape, whether the length is told or not."""
    proxy = await start_proxy(limits__body_bytes=1024)
    async with proxy.post(chat("x" * 2000)) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (413, "request_too_large")
    assert fake_vllm.generations == []


FOREIGN = [
    "http://169.254.169.254/latest",
    "http://127.0.0.1:8000/x",
    "http://[::ffff:10.0.0.1]/",
    "http://2130706433/",
    "file:///etc/passwd",
    "https://ok.example/x.png",
    "HTTP://ok.example/x.png",
    " https://ok.example/x.png",
]


def with_image(url: Any) -> dict[str, Any]:
    """Return a chat request with one image."""
    return {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": url}]},
        ]
    }


@pytest.mark.parametrize("url", FOREIGN)
@pytest.mark.parametrize("bare", [False, True], ids=["object", "string"])
async def test_only_data_urls_pass_as_images(proxy: RunningProxy, fake_vllm: FakeVllm, url: str, bare: bool) -> None:
    """vLLM would fetch them from inside the network; the refusal names the field (SC-10)."""
    async with proxy.post(with_image(url if bare else {"url": url})) as response:
        error = (await response.json())["error"]
        assert response.status == 400
    assert error["param"].startswith("messages[1].content[1].image_url")
    assert fake_vllm.generations == []


async def test_a_data_url_passes(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """The bytes are in the request: there is nothing to fetch (SC-10)."""
    fake_vllm.rules = Rules(multimodal=True)
    proxy = await start_proxy()
    async with proxy.post(with_image({"url": "data:image/png;base64,AA=="})) as response:
        assert response.status == 200


async def test_an_allowed_host_passes_by_its_whole_name(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Neither a host that begins or ends like it nor one in the user part gets through (SC-10)."""
    fake_vllm.rules = Rules(multimodal=True)
    proxy = await start_proxy(images__allow_hosts=("ok.example",))
    good = ["https://ok.example/x.png", "https://OK.example:443/x.png"]
    bad = [
        "https://ok.example.evil/x",
        "https://evilok.example/x",
        "https://ok.example@evil/x",
        "https://evil\\@ok.example/",
    ]
    for url in good + bad:
        async with proxy.post(with_image({"url": url})) as response:
            assert response.status == (200 if url in good else 400), url


async def test_nothing_in_a_body_moves_the_upstream(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """A model that looks like an address, base_url, api_base: all go to vLLM and nowhere else (SC-10)."""
    async with proxy.post(chat(base_url="http://127.0.0.1:1", api_base="http://127.0.0.1:1")) as response:
        assert response.status == 200
    async with proxy.post({**chat(), "model": "http://169.254.169.254/"}) as response:
        assert response.status == 404
    assert len(fake_vllm.generations) >= 1


CANARIES = ("CANARY-PROMPT-7f", "CANARY-KEY-7f", "canary-7f@example.invalid", "Q0FOQVJZLTdm", "CANARY-CHAT-7f")


def canary_body(**fields: Any) -> dict[str, Any]:
    """Return a request in which every place that a caller fills holds a canary."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,Q0FOQVJZLTdm"}}
    content = [{"type": "text", "text": "CANARY-PROMPT-7f"}, image]
    return {
        "model": "CANARY-PROMPT-7f" if fields.pop("odd_model", False) else "fake",
        "messages": [{"role": "system", "content": "CANARY-PROMPT-7f 10:00:01"}, {"role": "user", "content": content}],
        "user": "canary-7f@example.invalid",
        **fields,
    }


def contents(folder: Path) -> dict[str, str]:
    """Return what every file of `folder` holds."""
    return {file.name: file.read_bytes().decode("latin-1") for file in folder.iterdir()}


async def _walk_all_paths(proxy: RunningProxy, fake: FakeVllm, raw_connect: RawConnect) -> list[bytes]:
    """Take every path that may log something; return the errors that clients got."""
    headers = {
        "Authorization": "Bearer CANARY-KEY-7f",
        "X_OpenWebUI_User_Email": "canary-7f@example.invalid",
        "X_OpenWebUI_User_Id": "canary-7f@example.invalid",
        "X_OpenWebUI_Chat_Id": "CANARY-CHAT-7f",
    }
    echo = {"error": {"message": "CANARY-PROMPT-7f"}}
    answers: list[Any] = [
        Reply(text="CANARY-PROMPT-7f"),
        json_error(500, echo),
        Raw(body=[content_event("CANARY-PROMPT-7f")], end="rst"),
        Raw(body=[b"CANARY-PROMPT-7f"], headers={"Content-Type": "text/html"}),
        Raw(body=[b'data: {"error":{"message":"CANARY-PROMPT-7f","code":500}}\n\n']),
    ]
    for streamed in (True, False):
        for answer in answers:
            fake.replies.append(answer)
            async with proxy.post(canary_body(stream=streamed), **headers) as response:
                await response.read()
    own = []
    bodies = [b'{"CANARY-PROMPT-7f', json.dumps(canary_body(padding="x" * 50_000)).encode(), b'["CANARY-PROMPT-7f"]']
    bodies.append(json.dumps(canary_body(max_tokens="CANARY-PROMPT-7f")).encode())
    for body in bodies:
        async with proxy.post(body, **headers) as response:
            assert response.status in (400, 413)
            own.append(await response.read())
    async with proxy.post(canary_body(odd_model=True), "/v1/CANARY-PROMPT-7f", **headers) as response:
        own.append(await response.read())
    fake.replies.append(Raw(body=[content_event("CANARY-PROMPT-7f")], end="hang"))
    client = await raw_connect(proxy.port)
    await client.post(json.dumps(canary_body(stream=True)).encode(), head="Authorization: Bearer CANARY-KEY-7f\r\n")
    await client.until(b"\n\n")
    await client.reset()
    broken = await raw_connect(proxy.port)
    await broken.send(b"POST /CANARY-PROMPT-7f HTTP/9.9\r\nAuthorization: Bearer CANARY-KEY-7f\r\nbad header\r\n\r\n")
    own.append(await broken.rest())
    await eventually(lambda: not proxy.sample("proxy_requests_in_flight"))
    return own


@pytest.fixture
def log_output() -> Iterator[io.StringIO]:
    """What the proxy writes as its logs, at debug level; the process has its own logging back afterwards."""
    root, own = logging.getLogger(), logging.getLogger("proxy")
    handlers, levels = root.handlers[:], (root.level, own.level)
    stream = io.StringIO()
    logs.configure(Log("json", "debug"), stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


@pytest.mark.parametrize("keeps_text", [False, True], ids=["digests", "texts"])
async def test_no_text_key_or_name_gets_into_logs_metrics_errors_or_the_database(
    start_proxy: StartProxy,
    fake_vllm: FakeVllm,
    raw_connect: RawConnect,
    log_output: io.StringIO,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keeps_text: bool,
) -> None:
    """On success, refusals, failures, departures, a fault of our own, and with debug logs on (SC-12).

    Only the database may hold text, and only where the setting says so.
    """
    fake_vllm.rules = Rules(multimodal=True)
    settings = {"database": str(tmp_path / "sessions.sqlite3"), "store__text": keeps_text}
    proxy = await start_proxy(limits__body_bytes=20_000, **settings)
    own = await _walk_all_paths(proxy, fake_vllm, raw_connect)

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CANARY-PROMPT-7f CANARY-KEY-7f")

    monkeypatch.setattr("proxy.downstream.chat.prepare", fails)  # a fault injected into the handler
    async with proxy.post(canary_body(), Authorization="Bearer CANARY-KEY-7f") as response:
        assert response.status == 500
        own.append(await response.read())
    metrics = proxy.state.metrics.render()
    await proxy.runner.cleanup()  # writes what is still to be written
    captured = capfd.readouterr()
    assert "unexpected_error" in log_output.getvalue()  # the positive control: something was logged
    places = {"log": log_output.getvalue() + captured.out + captured.err, "metrics": metrics.decode()}
    places |= {f"error {position}": error.decode("latin-1") for position, error in enumerate(own)}
    places |= {} if keeps_text else contents(tmp_path)
    found = {(place, canary) for place, text in places.items() for canary in CANARIES if canary in text}
    assert found == set()


async def test_random_requests_add_no_series(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Random models, paths, users, chats, methods and error texts: labels are from closed sets (SC-13)."""
    dice = random.Random(7)
    async with proxy.post(chat()) as response:
        assert response.status == 200
    before = len(proxy.samples())

    def word() -> str:
        return "".join(dice.choices("abcdefghij", k=8))

    def refuse(body: dict[str, Any]) -> Any:
        return json_error(dice.choice([400, 404, 422, 500, 503]), {"error": {"message": word(), "code": word()}})

    fake_vllm.reply_to = refuse
    for _ in range(int(os.environ.get("PREFIX_PROXY_TEST_REQUESTS", "300"))):
        identity = {"X_OpenWebUI_User_Id": word(), "X_OpenWebUI_Chat_Id": word(), "X_Request_Id": word()}
        async with proxy.post({**chat(word()), "model": word(), word(): word()}, **identity) as response:
            await response.read()
        async with proxy.session.request(dice.choice(["GET", "PUT", "BREW"]), f"{proxy.url}/{word()}") as response:
            assert response.status in (400, 404, 405)
    names = proxy.samples()
    assert len(names) - before < 50
    assert any("('route', 'unmatched')" in name for name in names)
    assert not any(model in name for name in names for model in ("abc", "hij") if "model" in name and model in name)
