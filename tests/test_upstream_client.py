"""The pool, the one retry and the failures of the connections to vLLM, on real sockets."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from proxy.config.groups import Upstream as Settings
from proxy.upstream.client import Upstream, UpstreamFailure, failure_of, read_whole

Answer = Callable[["Server", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """A server that answers request by request with what a script says, and counts."""

    def __init__(self, *script: Answer | bytes) -> None:
        self.script = list(script)
        self.requests: list[bytes] = []
        self.connections = 0
        self.asked = asyncio.Event()
        self.hung_up = asyncio.Event()
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0][15:])) if length else b""
                self.requests.append(head + body)
                self.asked.set()
                answer = self.script.pop(0) if self.script else OK
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    await answer(self, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hung_up.set()
        finally:
            writer.close()


async def hang_up(_server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def reset(_server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def half_a_head(_server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Ty")
    await writer.drain()
    writer.close()


async def silence(_server: Server, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(1)


StartServer = Callable[..., Awaitable[Server]]
Connect = Callable[..., Upstream]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    async with AsyncExitStack() as stack:

        async def start(*script: Answer | bytes, path: Path | None = None) -> Server:
            server = Server(*script)
            if path is not None:
                listening = await asyncio.start_unix_server(server.handle, path)
                server.url = f"unix:{path}"
            else:
                listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
                server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            stack.callback(listening.close)
            return server

        yield start


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        def make(url: str, **settings: float) -> Upstream:
            upstream = Upstream(Settings(url=url, **settings))  # type: ignore[arg-type]  # seconds, all of them
            stack.push_async_callback(upstream.close)
            return upstream

        yield make


async def ask(upstream: Upstream, body: bytes = b"{}") -> bytes:
    answer = await upstream.send("POST", "/v1/chat/completions", headers={"X-A": "1"}, body=body)
    return await read_whole(answer, 1 << 20)


async def failed(upstream: Upstream) -> UpstreamFailure:
    with pytest.raises(UpstreamFailure) as caught:
        await ask(upstream)
    return caught.value


async def test_a_connection_is_used_again(start_server: StartServer, connect: Connect) -> None:
    """Two exchanges in a row need one connection."""
    server = await start_server()
    upstream = connect(server.url)
    assert [await ask(upstream), await ask(upstream)] == [b"{}", b"{}"]
    assert (server.connections, len(server.requests)) == (1, 2)


async def test_what_is_sent_is_what_was_given(start_server: StartServer, connect: Connect) -> None:
    """No header of the library's own beside Host and Content-Length."""
    server = await start_server()
    await ask(connect(server.url), b'{"a":1}')
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert body == b'{"a":1}'
    names = sorted(line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:])
    assert names == [b"accept-encoding", b"content-length", b"host", b"x-a"]


async def test_a_unix_socket_serves_as_well(start_server: StartServer, connect: Connect, tmp_path: Path) -> None:
    """vLLM listens there with --uds."""
    server = await start_server(path=tmp_path / "vllm.sock")
    assert await ask(connect(server.url)) == b"{}"


async def test_an_idle_connection_is_given_up_before_vllm_does(start_server: StartServer, connect: Connect) -> None:
    """The default is below vLLM's five seconds."""
    assert Settings().pool_idle_seconds < 5
    server = await start_server()
    upstream = connect(server.url, pool_idle_seconds=0.05)
    await ask(upstream)
    await asyncio.sleep(0.1)
    await ask(upstream)
    assert server.connections == 2


@pytest.mark.parametrize("ending", [hang_up, reset])
async def test_a_stale_connection_costs_one_retry_on_a_fresh_one(
    start_server: StartServer, connect: Connect, ending: Answer
) -> None:
    """The client notices nothing."""
    server = await start_server(OK, ending, OK)
    upstream = connect(server.url)
    assert [await ask(upstream), await ask(upstream)] == [b"{}", b"{}"]
    assert (server.connections, len(server.requests)) == (2, 3)


async def test_the_retry_takes_no_other_idle_connection(start_server: StartServer, connect: Connect) -> None:
    """All idle ones are stale alike after a restart of vLLM."""
    server = await start_server(OK, OK, OK, hang_up, OK)
    upstream = connect(server.url)
    await asyncio.gather(*(ask(upstream) for _ in range(3)))
    assert await ask(upstream) == b"{}"
    assert server.connections == 4


@pytest.mark.parametrize("ending", [hang_up, reset])
async def test_a_fresh_connection_that_breaks_is_no_reason_to_ask_again(
    start_server: StartServer, connect: Connect, ending: Answer
) -> None:
    """vLLM may be at work on it."""
    server = await start_server(ending)
    failure = await failed(connect(server.url))
    assert (failure.kind, failure.status, len(server.requests)) == ("cut", 502, 1)


async def test_the_retry_is_not_tried_again(start_server: StartServer, connect: Connect) -> None:
    """Two attempts at most."""
    server = await start_server(OK, hang_up, hang_up, OK)
    upstream = connect(server.url)
    await ask(upstream)
    assert (await failed(upstream)).kind == "cut"
    assert len(server.requests) == 3


async def test_after_any_byte_of_the_answer_nothing_is_asked_again(start_server: StartServer, connect: Connect) -> None:
    """Half a head is a sign of work."""
    server = await start_server(OK, half_a_head)
    upstream = connect(server.url)
    await ask(upstream)
    assert (await failed(upstream)).kind == "cut"
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [b"429 Busy", b"500 Oops", b"503 Full"])
async def test_a_status_is_never_a_reason_to_ask_again(
    start_server: StartServer, connect: Connect, status: bytes
) -> None:
    """The client gets it and decides."""
    server = await start_server(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
    answer = await connect(server.url).send("POST", "/x", headers={}, body=b"{}")
    assert (answer.status, len(server.requests)) == (int(status[:3]), 1)
    answer.close()


async def test_a_redirect_is_not_followed(start_server: StartServer, connect: Connect) -> None:
    """It could lead anywhere, with our key."""
    server = await start_server(b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")
    answer = await connect(server.url).send("POST", "/x", headers={}, body=b"{}")
    assert answer.status == 307
    answer.close()


async def test_cookies_are_not_kept(start_server: StartServer, connect: Connect) -> None:
    """Nothing goes from one user's exchange to another's."""
    server = await start_server(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n")
    upstream = connect(server.url)
    await ask(upstream)
    await ask(upstream)
    assert b"cookie" not in server.requests[1].lower()


async def test_refused_is_503_with_retry_after(connect: Connect, tmp_path: Path) -> None:
    """Over TCP and over a socket file that is not there."""
    for url in ("http://127.0.0.1:1", f"unix:{tmp_path}/none"):
        failure = await failed(connect(url))
        reject = failure.reject()
        assert (failure.kind, reject.status, reject.kind) == ("connect", 503, "server_error")
        assert "Retry-After" in reject.headers


async def test_silence_before_the_head_is_504(start_server: StartServer, connect: Connect) -> None:
    """And the connection is closed, which stops vLLM."""
    server = await start_server(silence)
    failure = await failed(connect(server.url, idle_seconds=0.05))
    assert (failure.kind, failure.reject().status, failure.reject().kind) == ("timeout", 504, "server_error")
    await asyncio.wait_for(server.hung_up.wait(), 1)


async def test_bytes_before_the_idle_limit_renew_it(start_server: StartServer, connect: Connect) -> None:
    """There is no limit on the whole."""

    async def slowly(_server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in OK:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.005)

    server = await start_server(slowly)
    assert await ask(connect(server.url, idle_seconds=0.2)) == b"{}"


@pytest.mark.parametrize("garbage", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"])
async def test_what_is_no_http_is_502(start_server: StartServer, connect: Connect, garbage: bytes) -> None:
    """Another service on that port."""
    failure = await failed(connect((await start_server(garbage)).url))
    assert (failure.status, failure.reject().kind) == (502, "server_error")


async def test_a_plain_answer_cut_short_is_a_failure(start_server: StartServer, connect: Connect) -> None:
    """Never half a body."""

    async def half(_server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")
        await writer.drain()
        writer.close()

    failure = await failed(connect((await start_server(half)).url))
    assert (failure.kind, failure.status) == ("cut", 502)


@pytest.mark.parametrize("framing", [b"Content-Length: 3000000", b"Transfer-Encoding: chunked"])
async def test_an_answer_above_the_bound_is_given_up(
    start_server: StartServer, connect: Connect, framing: bytes
) -> None:
    """Whether it says so or not."""
    data = b"x" * 3_000_000
    body = data if b"Length" in framing else b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    server = await start_server(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n" + body)
    failure = await failed(connect(server.url))
    assert (failure.kind, failure.status) == ("other", 502)


async def test_a_body_of_many_megabytes_is_sent_whole(start_server: StartServer, connect: Connect) -> None:
    """Also a second time, after a stale connection."""
    server = await start_server(OK, hang_up, OK)
    upstream = connect(server.url)
    await ask(upstream)
    body = b"x" * 5_000_000
    assert await ask(upstream, body) == b"{}"
    assert server.requests[-1].endswith(b"\r\n\r\n" + body)


async def test_leaving_while_it_waits_hangs_up_at_once(start_server: StartServer, connect: Connect) -> None:
    """Cancelling the caller is all that it takes."""
    server = await start_server(silence)
    waiting = asyncio.get_running_loop().create_task(ask(connect(server.url)))
    await server.asked.wait()
    waiting.cancel()
    await asyncio.wait_for(server.hung_up.wait(), 0.2)


async def test_a_small_exchange_of_our_own(start_server: StartServer, connect: Connect) -> None:
    """Status, type and body; None for whatever goes wrong."""
    server = await start_server(OK, OK, silence)
    upstream = connect(server.url)
    assert await upstream.fetch("GET", "/v1/models", seconds=1, limit_bytes=9) == (200, "application/json", b"{}")
    assert await upstream.fetch("GET", "/v1/models", seconds=1, limit_bytes=1) is None
    assert await upstream.fetch("GET", "/v1/models", seconds=0.05, limit_bytes=9) is None
    assert await connect("http://127.0.0.1:1").fetch("GET", "/", seconds=1, limit_bytes=9) is None


def test_no_failure_tells_what_aiohttp_said() -> None:
    """Its texts name hosts and paths."""
    for error in (aiohttp.ClientPayloadError("SECRET"), aiohttp.ClientError("SECRET"), TimeoutError("SECRET")):
        assert "SECRET" not in failure_of(error).message
