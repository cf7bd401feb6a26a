"""Bodies: their limit holds whatever the coding and framing, and nobody may take for ever."""

import asyncio
import gzip
import io
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.downstream.body import _Inflating
from tests.conftest import RawClient, RawConnect, RunningProxy, StartProxy
from tests.fake_vllm import FakeVllm

MIB = 1024 * 1024
PATH = "/v1/embeddings"
BODY = orjson.dumps({"model": "fake", "input": "words"})


async def refused(proxy: RunningProxy, body: Any, **headers: str) -> tuple[int, dict[str, Any], str]:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    async with proxy.session.post(proxy.url + PATH, data=body, headers=fields) as answer:
        return answer.status, (await answer.json()).get("error", {}), answer.content_type


@pytest.mark.parametrize("size", [MIB, MIB + 1072, 10_000_000])
async def test_bodies_beyond_the_servers_own_default_limit_are_forwarded(
    proxy: RunningProxy, fake_vllm: FakeVllm, size: int
) -> None:
    """aiohttp's 1 MiB is not our limit: a chat with a picture is larger."""
    body = orjson.dumps({"input": "x"})
    body = body[:-1] + b" " * (size - len(body)) + b"}"
    async with proxy.session.post(proxy.url + PATH, data=io.BytesIO(body)) as answer:
        assert answer.status == 200
    assert fake_vllm.seen[-1].raw == body


async def chunks(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // 65536 + 1):
        yield b"x" * 65536


@pytest.mark.parametrize("chunked", [False, True])
async def test_one_byte_too_many_is_413_in_openais_shape(
    start_proxy: StartProxy, fake_vllm: FakeVllm, chunked: bool
) -> None:
    """With a length it is refused unread, without one while it is read."""
    proxy = await start_proxy(limits__body_bytes=MIB)
    status, error, content_type = await refused(proxy, chunks(MIB) if chunked else io.BytesIO(b"x" * (MIB + 1)))
    assert (status, content_type) == (413, "application/json")
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
    assert not [seen for seen in fake_vllm.seen if seen.path == PATH]


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip", "deflate", "raw deflate", "identity", " gzip "])
async def test_a_small_compressed_body_arrives_inflated(proxy: RunningProxy, fake_vllm: FakeVllm, coding: str) -> None:
    """vLLM does not decode bodies, so they go to it as they mean."""
    raw = zlib.compressobj(wbits=-15)
    packed = {
        "deflate": zlib.compress(BODY),
        "raw deflate": raw.compress(BODY) + raw.flush(),
        "identity": BODY,
    }.get(coding, gzip.compress(BODY))
    headers = {"Content-Encoding": coding.removeprefix("raw ")}
    async with proxy.session.post(proxy.url + PATH, data=packed, headers=headers) as answer:
        assert answer.status == 200
    assert fake_vllm.seen[-1].raw == BODY
    assert "content-encoding" not in {name.lower() for name in fake_vllm.seen[-1].headers}


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "gzip, identity", "compress", "deflate,gzip"])
async def test_other_codings_and_double_ones_are_415(proxy: RunningProxy, coding: str) -> None:
    """Each would need a library and a bound of its own."""
    status, error, _ = await refused(proxy, BODY, Content_Encoding=coding)
    assert (status, error["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize(
    "body",
    [b"not gzip", gzip.compress(BODY)[:-9], gzip.compress(BODY) + b"tail", b""],
    ids=["no", "cut", "tail", "empty"],
)
async def test_a_broken_coding_is_400(proxy: RunningProxy, body: bytes) -> None:
    """What cannot be inflated was never understood."""
    status, error, _ = await refused(proxy, body, Content_Encoding="gzip")
    assert (status, error["code"]) == (400, "invalid_body")


async def test_a_body_of_thousands_of_empty_gzip_members_is_400(proxy: RunningProxy) -> None:
    """They pass no limit on what comes out, and each costs time."""
    status, error, _ = await refused(proxy, gzip.compress(b"") * 2000, Content_Encoding="gzip")
    assert (status, error["code"]) == (400, "invalid_body")


async def test_a_body_of_two_gzip_members_is_both(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """RFC 1952 allows it, and log shippers do it."""
    packed = gzip.compress(BODY[:10]) + gzip.compress(BODY[10:])
    async with proxy.session.post(proxy.url + PATH, data=packed, headers={"Content-Encoding": "gzip"}) as answer:
        assert answer.status == 200
    assert fake_vllm.seen[-1].raw == BODY


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "deflate"])
async def test_a_bomb_is_413_and_hardly_costs_memory(proxy: RunningProxy, coding: str) -> None:
    """65 KB that inflate to 64 MiB never take more than the limit of 32 MiB and a step."""
    packer = zlib.compressobj(9, wbits=15 if coding == "deflate" else 31)
    packed = b"".join(packer.compress(bytes(MIB)) for _ in range(64)) + packer.flush()
    tracemalloc.start()
    try:
        status, error, _ = await refused(proxy, packed, Content_Encoding=coding)
        grown_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(packed) < 70_000
    assert (status, error["code"]) == (413, "request_too_large")
    assert grown_bytes < (32 + 8) * MIB


async def test_a_client_that_sends_its_body_too_slowly_is_cut(
    start_proxy: StartProxy, raw_connect: RawConnect, fake_vllm: FakeVllm
) -> None:
    """Steady drops do not keep it alive: the time is for the whole body."""
    proxy = await start_proxy(limits__body_seconds=0.2)
    client = await raw_connect(proxy.port)
    await client.send(f"POST {PATH} HTTP/1.1\r\nHost: proxy\r\nContent-Length: 1000\r\n\r\n".encode())

    async def drip() -> None:
        while True:
            await client.send(b"x")
            await asyncio.sleep(0.02)

    dripping = asyncio.get_running_loop().create_task(drip())
    head = await asyncio.wait_for(client.head(), 5)
    dripping.cancel()
    assert head.startswith(b"HTTP/1.1 408 ") and b"\r\nConnection: close" in head
    assert b'"request_timeout"' in await client.until(b"}}")
    assert not [seen for seen in fake_vllm.seen if seen.path == PATH]


async def test_expect_continue_is_answered_before_the_body_is_sent(
    start_proxy: StartProxy, raw_connect: RawConnect
) -> None:
    """curl asks with large bodies: a small one may come, a too large one need not."""
    proxy = await start_proxy(limits__body_bytes=MIB)
    client = await raw_connect(proxy.port)
    head = f"POST {PATH} HTTP/1.1\r\nHost: proxy\r\nExpect: 100-continue\r\nContent-Length: "
    await client.send(f"{head}{len(BODY)}\r\n\r\n".encode())
    assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
    await client.send(BODY)
    assert (await client.head()).startswith(b"HTTP/1.1 200 ")
    for path, expect, status in ((PATH, "100-continue", 413), (PATH, "magic", 417), ("/health", "magic", 417)):
        await is_refused(await raw_connect(proxy.port), path, expect, status)


async def is_refused(client: RawClient, path: str, expect: str, status: int) -> None:
    method = "GET" if path == "/health" else "POST"
    await client.send(f"{method} {path} HTTP/1.1\r\nHost: a\r\nExpect: {expect}\r\n".encode())
    await client.send(f"Content-Length: {MIB + 1}\r\n\r\n".encode())
    head = await client.head()
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"application/json" in head and b"x-request-id: " in head.lower()


@given(st.binary(max_size=400), st.data())
def test_the_cuts_between_chunks_never_matter(plain: bytes, data: st.DataObject) -> None:
    """The network cuts where it likes, also within a member's head."""
    packed = gzip.compress(plain) + gzip.compress(plain)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(packed)), max_size=8)))
    sink = _Inflating(1024, "gzip")
    for start, end in zip([0, *cuts], [*cuts, len(packed)], strict=True):
        sink.feed(packed[start:end])
    assert sink.close() == plain + plain


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip,chunked", "deflate\r\nTransfer-Encoding: chunked"])
async def test_chunked_is_the_only_transfer_coding(
    proxy: RunningProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, coding: str
) -> None:
    """Another one is refused and ends the connection, though aiohttp would read on past it (SC-03)."""
    client = await raw_connect(proxy.port)
    await client.send(f"POST {PATH} HTTP/1.1\r\nHost: proxy\r\nTransfer-Encoding: {coding}\r\n\r\n".encode())
    await client.send(b"2\r\n{}\r\n0\r\n\r\n")
    async with asyncio.timeout(5):
        assert b" 400 " in await client.rest()
    assert fake_vllm.generations == []
