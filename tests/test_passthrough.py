"""The routes that nothing is rewritten on: bytes both ways, cancelled with the client, errors in OpenAI's shape."""

import asyncio
import io
import json

import pytest

from proxy.config import Key
from proxy.downstream.auth import hash_token
from proxy.downstream.passthrough import PATHS
from proxy.rewriting import OUTPUT_FIELD
from tests.conftest import RawConnect, StartProxy
from tests.fake_replies import Hang, Raw, json_error
from tests.fake_vllm import FakeVllm

ODD = b'{ "input" : "\\u00e9\xc3\xa9", "big":123456789012345678901234567890, "x":1.0e2, "input":"twice" }\n'
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("path", [path for path in PATHS if path not in OUTPUT_FIELD])
async def test_bodies_cross_byte_for_byte_both_ways(start_proxy: StartProxy, fake_vllm: FakeVllm, path: str) -> None:
    """They are looked at, never written anew, so nothing can be lost."""
    fake_vllm.answers[path] = Raw([ODD], headers=JSON, framing="length")
    proxy = await start_proxy()
    async with proxy.post(ODD, path) as answer:
        assert (answer.status, await answer.read(), answer.content_length) == (200, ODD, len(ODD))
    (seen,) = fake_vllm.of(path)
    assert seen.raw == ODD


@pytest.mark.parametrize(("path", "field"), OUTPUT_FIELD.items())
async def test_limits_and_salt_hold_where_an_answer_is_generated(
    start_proxy: StartProxy, fake_vllm: FakeVllm, path: str, field: str
) -> None:
    """The prompt is not touched, but nobody gets more than the cap, another's salt or a place in the queue."""
    fake_vllm.answers[path] = Raw([b"{}"], headers=JSON, framing="length")
    keys = (Key("a", hash_token("sk-a")), Key("b", hash_token("sk-b")))
    proxy = await start_proxy(keys=keys, lengths__max_output_tokens=100)
    body = {"input": "é", field: 500, "cache_salt": "of-a", "priority": -9, "kv_transfer_params": {"host": "x"}, "x": 1}
    for key in ("sk-a", "sk-b", "sk-b"):
        async with proxy.post(body, path, Authorization=f"Bearer {key}") as answer:
            assert answer.status == 200
    first, second, again = (json.loads(seen.raw) for seen in fake_vllm.of(path))
    assert first["cache_salt"] not in ("of-a", second["cache_salt"])
    assert second == again == {"input": "é", field: 100, "cache_salt": second["cache_salt"], "x": 1}


async def test_headers_stop_at_the_proxy_unless_they_are_on_its_list(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """Keys, cookies, hop-by-hop fields and forged addresses are not vLLM's business."""
    keys = (Key("ui", hash_token("sk-client")),)
    answered = {**JSON, "Keep-Alive": "timeout=9", "X-Powered-By": "v", "Set-Cookie": "a=b", "Server": "uvicorn"}
    fake_vllm.answers["/v1/embeddings"] = Raw([b"{}"], headers=answered, framing="length")
    proxy = await start_proxy(keys=keys, upstream__api_key="sk-upstream")
    sent = {
        "Host": "evil.example",
        "Connection": "keep-alive, X-Secret",
        "X-Secret": "1",
        "TE": "trailers",
        "Upgrade": "h2c",
        "Proxy-Authorization": "Basic x",
        "X-Forwarded-For": "1.2.3.4",
        "Cookie": "s=1",
        "Accept-Encoding": "gzip",
        "X-Request-Id": "r1",
        "X-data-parallel-rank": "3",
        "Authorization": "Bearer sk-client",
    }
    async with proxy.session.post(proxy.url + "/v1/embeddings", data=b"{}", headers=sent) as answer:
        assert answer.status == 200
        assert answer.headers["X-Request-Id"] == "r1"
        assert not {"Keep-Alive", "X-Powered-By", "Set-Cookie", "Server", "Transfer-Encoding"} & set(answer.headers)
    got = fake_vllm.of("/v1/embeddings")[0].headers
    assert got["Authorization"] == "Bearer sk-upstream"
    assert got["Host"] == f"127.0.0.1:{fake_vllm.port}"
    assert got["X-Request-Id"] == "r1"
    gone = ("X-Secret", "TE", "Upgrade", "Proxy-Authorization", "Cookie", "X-Forwarded-For", "X-data-parallel-rank")
    assert not [name for name in gone if name in got]


async def test_a_stream_arrives_as_it_is_written(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """The first event is there before the second is written."""
    gate = asyncio.Event()
    fake_vllm.answers["/v1/responses"] = Raw([b"event: a\r\n", b"data: {}\r\n\r\n", gate, b"data: [DONE]\n\n"])
    proxy = await start_proxy()
    async with proxy.post(b"{}", "/v1/responses") as answer:
        assert answer.headers["X-Accel-Buffering"] == "no"
        first = await answer.content.readexactly(22)
        gate.set()
        assert first + await answer.read() == b"event: a\r\ndata: {}\r\n\r\ndata: [DONE]\n\n"


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("cancellation", [True, False])
async def test_when_the_client_goes_the_upstream_is_hung_up_on(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, streams: bool, cancellation: bool
) -> None:
    """vLLM stops computing within 0.2 seconds, and the exchange is counted as the client's."""
    fake_vllm.answers["/v1/responses"] = Raw([b"data: {}\n\n"], end="hang") if streams else Hang()
    proxy = await start_proxy()
    # aiohttp may cancel the handler by itself, or not: it makes no difference.
    assert proxy.runner.server is not None
    proxy.runner.server.handler_cancellation = cancellation
    client = await raw_connect(proxy.port)
    await client.post(b"{}", "/v1/responses")
    if streams:
        await client.until(b"data: {}")
    else:
        async with asyncio.timeout(5):
            while not fake_vllm.of("/v1/responses"):  # noqa: ASYNC110  # the fake tells of generations only
                await asyncio.sleep(0.005)
    left_at = asyncio.get_running_loop().time()
    await client.leave()
    seen = fake_vllm.of("/v1/responses")[0]
    await asyncio.wait_for(seen.closed.wait(), 2)
    assert seen.aborted_at is not None and seen.aborted_at - left_at < 0.2
    assert proxy.sample("proxy_aborts_total", phase="stream" if streams else "plain") == 1
    assert proxy.sample("proxy_requests_total", route="/v1/responses", outcome="client_disconnect", status="499") == 1
    assert proxy.sample("proxy_requests_in_flight") == 0


async def test_a_stream_that_is_cut_ends_with_an_error_event(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Never a bare cut; what came stays but for half an event, and whose fault it is is told (ST-06, MR-05)."""
    fake_vllm.answers["/v1/responses"] = Raw([b"data: {}\n\n", b'event: x\ndata: {"ha'], end="cut")
    proxy = await start_proxy()
    async with proxy.post(b"{}", "/v1/responses") as answer:
        text = await answer.read()
    came, _, rest = text.partition(b'data: {"error":')
    assert came == b"data: {}\n\n"
    assert b'"type":"server_error"' in rest and b'"code":502' in rest and rest.endswith(b"data: [DONE]\n\n")
    assert proxy.sample("proxy_upstream_errors_total", kind="cut") == 1


async def test_a_plain_answer_that_is_cut_does_not_look_complete(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Half a JSON document would be a lie under a 200, with a proper end or without."""
    fake_vllm.answers["/v1/embeddings"] = Raw([b'{"data":'], headers=JSON, end="cut")
    proxy = await start_proxy()
    async with proxy.post(b"{}", "/v1/embeddings") as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (502, "server_error")
    assert proxy.sample("proxy_upstream_errors_total", kind="cut") == 1


async def test_a_redirect_of_the_upstream_is_no_answer(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Its address may be wrong; the client could do nothing with a redirect that names no place."""
    fake_vllm.answers["/v1/embeddings"] = Raw([b""], status=307, headers={"Location": "/x"}, framing="length")
    proxy = await start_proxy()
    async with proxy.post(b"{}", "/v1/embeddings") as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (502, "server_error")


@pytest.mark.parametrize(
    ("raw", "status", "told"),
    [
        (json_error(400, {"error": {"message": "Bad input", "code": 400}}), 400, "Bad input"),
        (json_error(404, {"detail": "Not Found"}), 404, "Not Found"),
        (json_error(401, {"error": "Unauthorized"}), 401, "Unauthorized"),
        (Raw([b"<html>Bad Gateway</html>"], status=502, headers={"Content-Type": "text/html"}), 502, "502"),
    ],
)
async def test_errors_of_the_upstream_are_json_with_a_sentence(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw: Raw, status: int, told: str
) -> None:
    """Whatever shape vLLM or something before it gave them."""
    fake_vllm.answers["/v1/embeddings"] = raw
    proxy = await start_proxy()
    async with proxy.post(b"{}", "/v1/embeddings") as answer:
        assert (answer.status, answer.content_type) == (status, "application/json")
        assert told in (await answer.json())["error"]["message"]
    assert proxy.sample("proxy_upstream_errors_total", kind=f"status_{status // 100}xx") == 1


async def test_without_vllm_the_answer_says_when_to_try_again(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """503 with Retry-After, as SDKs understand it."""
    await fake_vllm.stop()
    proxy = await start_proxy()
    async with proxy.post(b"{}", "/v1/embeddings") as answer:
        assert (answer.status, answer.content_type) == (503, "application/json")
        assert int(answer.headers["Retry-After"]) > 0
    assert proxy.sample("proxy_requests_total", route="/v1/embeddings", outcome="upstream_error") == 1


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_tokenize_takes_one_mebibyte_at_most(start_proxy: StartProxy, fake_vllm: FakeVllm, path: str) -> None:
    """A large one would hold up vLLM's event loop for everyone."""
    proxy = await start_proxy()
    too_large = io.BytesIO(b"x" * (1024 * 1024 + 1))
    async with proxy.session.post(proxy.url + path, data=too_large) as answer:
        assert answer.status == 413
    assert not fake_vllm.of(path)


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/json; charset=utf-8"])
async def test_the_content_type_is_not_the_clients_problem(
    start_proxy: StartProxy, fake_vllm: FakeVllm, content_type: str
) -> None:
    """These routes know only JSON, and vLLM refuses it under another name."""
    proxy = await start_proxy()
    async with proxy.post(b'{"prompt":"a"}', "/tokenize", Content_Type=content_type) as answer:
        assert answer.status == 200
    assert fake_vllm.of("/tokenize")[0].headers["Content-Type"] == "application/json"


async def test_a_drain_that_is_over_ends_what_still_runs(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """The client is told why, and vLLM is hung up on."""
    fake_vllm.answers["/v1/responses"] = Raw([b"data: {}\n\n"], end="hang")
    proxy = await start_proxy()
    async with proxy.post(b"{}", "/v1/responses") as answer:
        await answer.content.readexactly(10)
        assert proxy.state.presence.end_all() == 1
        rest = await answer.read()
    assert b'data: {"error":' in rest and rest.endswith(b"data: [DONE]\n\n")
    assert proxy.sample("proxy_requests_total", outcome="drained") == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://10.0.0.1/"}}]}]}',
        b'{"data_1":{"content":[{"type":"video_url","video_url":{"url":"file:///x"}}]}}',
        b'{"input":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"input":"x","temperature":NaN}',
        b"[]",
    ],
    ids=["image", "video", "deep", "nan", "list"],
)
async def test_what_a_chat_may_not_hold_no_other_route_passes(
    start_proxy: StartProxy, fake_vllm: FakeVllm, path: str, body: bytes
) -> None:
    """vLLM fetches the images of what it counts, embeds or ranks as it does those of chats."""
    proxy = await start_proxy()
    async with proxy.post(body, path) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "invalid_request_error"
    assert fake_vllm.of(path) == []
