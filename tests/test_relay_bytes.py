"""What is not rewritten crosses byte for byte, and the headers of one hop end there."""

import json
from typing import Any

import pytest

from tests.bodies import chat
from tests.conftest import RawConnect, RunningProxy, StartProxy
from tests.fake_replies import JSON_TYPE, Raw
from tests.fake_vllm import FakeVllm

# With max_tokens set and not streamed there is nothing that any step would change.
UNTOUCHED = [
    b'{"model":"fake","top_p":0.10,"max_tokens":5,"messages":[{"content":"\xc3\xa9 \\u00e9","role":"user"}]}',
    b'{"seed":9223372036854775808,"temperature":1E-1,"max_tokens":5,"messages":[{"role":"user","content":"x"}]}',
    b'{ "max_tokens" : 5,\n\t"messages": [ {"role":"user","content":"a\\/b \\ud83e\\udde0"} ] , "x": 1.0e0 }\n',
    b'{"max_tokens":5,"messages":[{"role":"user","content":"lone \\ud83e half"}]}',
    b'{"chat_template_kwargs":{"b":1,"a":2},"max_tokens":5,"foo":[null,true,{"z":0,"y":-0.0}],'
    b'"metadata":{"k":"v"},"messages":[{"role":"user","content":"x","name":"n","extra":{"b":[],"a":{}}}]}',
]
IDS = ["escapes", "numbers", "spacing", "lone-surrogate", "unknown-fields"]


async def forwarded(proxy: RunningProxy, fake: FakeVllm, raw: bytes, path: str = "/v1/chat/completions") -> bytes:
    """Send `raw`; return the bytes that vLLM got."""
    async with proxy.post(raw, path) as response:
        assert response.status == 200, await response.text()
    return fake.of(path)[-1].raw


@pytest.mark.parametrize("raw", UNTOUCHED, ids=IDS)
async def test_a_body_with_nothing_to_rewrite_is_forwarded_as_received(
    proxy: RunningProxy, fake_vllm: FakeVllm, raw: bytes
) -> None:
    """Number spelling, big integers, escapes, spacing and unknown fields survive with all steps on (PC-07)."""
    assert await forwarded(proxy, fake_vllm, raw) == raw


@pytest.mark.parametrize("raw", UNTOUCHED, ids=IDS)
async def test_profile_off_forwards_streams_as_received_too(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw: bytes
) -> None:
    """In profile off not even stream_options is added."""
    proxy = await start_proxy(profile="off")
    streamed = raw.rstrip()[:-1] + b',"stream":true}'
    assert await forwarded(proxy, fake_vllm, streamed) == streamed


@pytest.mark.parametrize("raw", UNTOUCHED, ids=IDS)
async def test_what_we_add_leaves_every_other_byte_alone(proxy: RunningProxy, fake_vllm: FakeVllm, raw: bytes) -> None:
    """On a stream stream_options is added; without it the body is the one received."""
    streamed = raw.rstrip()[:-1] + b',"stream":true}'
    got = await forwarded(proxy, fake_vllm, streamed)
    added = b'"stream_options":{"include_usage":true}'
    assert got.count(added) == 1
    before, _, after = got.partition(added)
    assert streamed in (before + after.removeprefix(b","), before.removesuffix(b",") + after)


async def test_other_stream_options_are_kept(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """include_usage joins what the client set."""
    body = chat(stream=True, stream_options={"continuous_usage_stats": False})
    got = json.loads(await forwarded(proxy, fake_vllm, json.dumps(body).encode()))
    assert got["stream_options"] == {"continuous_usage_stats": False, "include_usage": True}


async def test_schemas_keep_the_order_of_their_keys(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """A grammar generates properties in their order, so sorting would change the answer (PC-07)."""
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("zebra", "apple", "mango")},
        "required": ["zebra", "apple", "mango"],
    }
    shape = {"type": "json_schema", "json_schema": {"name": "o", "schema": schema}}
    await forwarded(proxy, fake_vllm, json.dumps(chat(stream=True, response_format=shape)).encode())
    got = fake_vllm.generations[0].body["response_format"]["json_schema"]["schema"]
    assert list(got["properties"]) == ["zebra", "apple", "mango"]
    assert got["required"] == ["zebra", "apple", "mango"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize"])
async def test_routes_that_are_passed_through_keep_their_bytes(
    proxy: RunningProxy, fake_vllm: FakeVllm, path: str
) -> None:
    """Nothing is read into these bodies."""
    raw = b'{ "model":"fake", "input":"\\u00e9", "prompt":"x", "tokens":[0], "x":1.10 }'
    assert await forwarded(proxy, fake_vllm, raw, path) == raw


async def test_a_plain_answer_is_relayed_as_it_came(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Number spelling, spacing and unknown fields of the answer survive."""
    body = b'{ "choices":[{"index":0,"message":{"role":"assistant","content":"\\u00e9"}}], "x":1.10 }\n'
    fake_vllm.replies.append(Raw(body=[body[:20], body[20:]], headers=JSON_TYPE))
    async with proxy.post(chat()) as response:
        assert await response.read() == body


HEAD = (
    "Host: evil.example\r\nConnection: close, X-Secret\r\nX-Secret: 1\r\nTE: trailers\r\nUpgrade: h2c\r\n"
    "Proxy-Authorization: Basic x\r\nX-Forwarded-For: 1.2.3.4\r\nCookie: s=1\r\nAccept-Encoding: gzip\r\n"
    "X-Request-Id: r1\r\nAuthorization: Bearer of-the-client\r\nX-data-parallel-rank: 3\r\nKeep-Alive: timeout=1\r\n"
)


async def test_headers_of_one_hop_end_here(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect
) -> None:
    """Connection and what it names, TE, Upgrade, cookies and keys stay; the id crosses; Host is vLLM's own (SC-04)."""
    proxy = await start_proxy(upstream__api_key="of-vllm")
    body = json.dumps(chat()).encode()
    client = await raw_connect(proxy.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{HEAD}Content-Type: application/json\r\n"
    await client.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert (await client.head()).startswith(b"HTTP/1.1 200")
    headers = fake_vllm.generations[0].headers
    for name in ("X-Secret", "TE", "Upgrade", "Proxy-Authorization", "Cookie", "X-data-parallel-rank", "Keep-Alive"):
        assert name not in headers, name
    assert headers["Host"] == f"127.0.0.1:{fake_vllm.port}"
    assert headers["Authorization"] == "Bearer of-vllm"
    assert headers["X-Request-Id"] == "r1"
    assert headers.get("X-Forwarded-For") in (None, "127.0.0.1")
    assert "X-Secret" not in headers.get("Connection", "")


async def test_without_a_key_of_its_own_the_upstream_gets_none(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The client's key never goes upstream (SC-04)."""
    async with proxy.post(chat(), Authorization="Bearer of-the-client", X_Api_Key="of-the-client") as response:
        assert response.status == 200
    assert "of-the-client" not in str(fake_vllm.generations[0].headers)


async def test_headers_of_vllms_hop_do_not_reach_the_client(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Keep-Alive, Connection and what it names, and Transfer-Encoding are between vLLM and us (SC-04)."""
    headers = {**JSON_TYPE, "Keep-Alive": "timeout=5", "Connection": "X-Inner", "X-Inner": "1", "Set-Cookie": "a=b"}
    fake_vllm.replies.append(Raw(body=[b"{}"], headers=headers))
    async with proxy.post(chat()) as response:
        got = response.headers
        assert await response.read() == b"{}"
    for name in ("Keep-Alive", "X-Inner", "Set-Cookie", "Transfer-Encoding"):
        assert name not in got, name
    assert "X-Inner" not in got.get("Connection", "")


async def test_the_request_id_comes_back_and_is_made_where_none_came(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """One id for client, logs and vLLM; one that is too long or odd is replaced."""
    ids: list[Any] = ["abc-1", None, "x" * 3000, "a b\tc"]
    for sent in ids:
        async with proxy.post(chat(), **({} if sent is None else {"X_Request_Id": sent})) as response:
            got = response.headers["X-Request-Id"]
        assert fake_vllm.generations[-1].headers["X-Request-Id"] == got
        assert (got == sent) == (sent == "abc-1")
        assert 0 < len(got) <= 128
