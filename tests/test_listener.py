"""Bytes that are no request, under each of aiohttp's two parsers: refused in OpenAI's shape, never passed on."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import http_parser, web

from proxy.app import build_app
from proxy.config import Config
from proxy.downstream.listener import Runner
from tests.conftest import RawClient, RawConnect
from tests.fake_vllm import FakeVllm

BACKGROUND = {"/v1/models", "/metrics", "/health"}  # what the proxy itself asks vLLM


@pytest.fixture(params=["c", "python"])
async def listening(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fake_vllm: FakeVllm
) -> AsyncIterator[web.AppRunner]:
    """The app under its own runner, once with each of aiohttp's two parsers."""
    if request.param == "python":
        monkeypatch.setattr("aiohttp.web_protocol.HttpRequestParser", http_parser.HttpRequestParserPy)
    runner = Runner(build_app(Config().with_values({"upstream.url": fake_vllm.url})), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner
    await runner.cleanup()


SMUGGLED = b"0\r\n\r\nPOST /v1/embeddings HTTP/1.1\r\nHost: b\r\nContent-Length: 2\r\n\r\n{}"
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\n"
SMUGGLING = {
    "length and chunked": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + SMUGGLED,
    "an unknown transfer coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + SMUGGLED,
    "a blank before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + SMUGGLED,
    "a bare carriage return": HEAD + b"X: \rTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
    "a line feed in a chunk extension": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;\nxx\r\n{}\r\n" + SMUGGLED,
    "a signed length": HEAD + b"Content-Length: +5\r\n\r\n" + SMUGGLED,
    "a foreign digit in the version": "POST /v1/embeddings HTTP/1.\u0661\r\nHost: a\r\n\r\n".encode() + SMUGGLED,
    "no request at all": b"\x16\x03\x01 sk-secret\r\n\r\n",
}


@pytest.mark.parametrize("case", SMUGGLING)
async def test_a_request_that_can_be_read_in_two_ways_is_refused_and_the_connection_closed(
    listening: web.AppRunner, fake_vllm: FakeVllm, raw_connect: RawConnect, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """Nothing of it reaches vLLM, and the answer and the log quote none of it."""
    client: RawClient = await raw_connect(listening.addresses[0][1])
    await client.send(SMUGGLING[case])
    answer = await asyncio.wait_for(client.rest(), 5)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert answer.count(b"HTTP/1.") == 1 and b"Python" not in answer
    assert b'{"error":{"message":' in answer and b"application/json" in answer
    assert {seen.path for seen in fake_vllm.seen} <= BACKGROUND
    for quoted in (b"chunked", b"sk-secret", b"+5"):
        assert quoted not in answer and quoted.decode() not in caplog.text


async def test_a_header_that_is_no_text_is_no_error(listening: web.AppRunner, raw_connect: RawConnect) -> None:
    """Open WebUI's older versions send names as raw bytes."""
    client = await raw_connect(listening.addresses[0][1])
    await client.send(
        b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nX-OpenWebUI-User-Name: F\xe1bian\r\nContent-Length: 2\r\n\r\n{}"
    )
    assert (await client.head()).startswith(b"HTTP/1.1 200 ")
