"""Fixtures: a fake vLLM, a running proxy before it, raw sockets.  tests/README.md shows how to use them."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from blockbuster import BlockBuster, blockbuster_ctx

from proxy.app import build_app
from proxy.config import Config
from proxy.downstream.listener import Runner
from proxy.state import STATE, State
from tests.fake_vllm import FakeVllm


@dataclass
class RunningProxy:
    """A proxy that listens on a loopback socket, with a client session of its own."""

    app: web.Application
    runner: web.AppRunner
    session: aiohttp.ClientSession
    port: int

    @property
    def url(self) -> str:
        """The base URL, without /v1."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def state(self) -> State:
        """The state of the app: its configuration, metrics, store."""
        return self.app[STATE]

    def post(
        self, body: Mapping[str, Any] | bytes, path: str = "/v1/chat/completions", **headers: str
    ) -> "aiohttp.client._RequestContextManager":
        """Send `body` (an object, or bytes as they are) to `path`; header names are given with underscores."""
        fields = {"Content-Type": "application/json", **{name.replace("_", "-"): headers[name] for name in headers}}
        if isinstance(body, bytes):
            return self.session.post(self.url + path, data=body, headers=fields)
        return self.session.post(self.url + path, json=body, headers=fields)

    def sample(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of metric `name` that have these labels."""
        families = self.state.metrics.registry.collect()
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def samples(self) -> dict[str, float]:
        """Return every sample of the metrics by its name and labels."""
        families = self.state.metrics.registry.collect()
        return {f"{s.name}{sorted(s.labels.items())}": s.value for family in families for s in family.samples}


StartProxy = Callable[..., Awaitable[RunningProxy]]


@pytest.fixture(autouse=True)
def no_blocking() -> Iterator[BlockBuster]:
    """Any blocking call of the proxy inside the event loop is an error.  SQLite's own threads have no loop."""
    with blockbuster_ctx(scanned_modules=["proxy"]) as detector:
        yield detector


StartVllm = Callable[..., Awaitable[FakeVllm]]


@pytest.fixture
async def start_vllm() -> AsyncIterator[StartVllm]:
    """Start a fake vLLM with these fields: `await start_vllm(block_size=32)`."""
    async with AsyncExitStack() as stack:

        async def start(**fields: Any) -> FakeVllm:
            fake = FakeVllm(**fields)
            stack.push_async_callback(fake.stop)
            await fake.start()
            return fake

        yield start


@pytest.fixture
async def fake_vllm(start_vllm: StartVllm) -> FakeVllm:
    """A fake vLLM with its defaults: model "fake", blocks of 16 tokens, 8192 tokens of context."""
    return await start_vllm()


@pytest.fixture
async def start_proxy(fake_vllm: FakeVllm) -> AsyncIterator[StartProxy]:
    """Start a proxy before `fake_vllm`, with settings by path: `await start_proxy(relay__keepalive_seconds=0.05)`."""
    async with AsyncExitStack() as stack:

        async def start(*, handler_cancellation: bool | None = None, **settings: Any) -> RunningProxy:
            values = {"upstream.url": fake_vllm.url, "listen.port": 0}
            values |= {name.replace("__", "."): value for name, value in settings.items()}
            app = build_app(Config().with_values(values))
            if handler_cancellation is not None:
                app._handler_args = {**(app._handler_args or {}), "handler_cancellation": handler_cancellation}
            runner = Runner(app, shutdown_timeout=1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return RunningProxy(app, runner, session, runner.addresses[0][1])

        yield start


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> RunningProxy:
    """A proxy with its defaults before `fake_vllm`."""
    return await start_proxy()


@dataclass
class RawClient:
    """A socket on which a test says exactly what it wants and leaves when it wants."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Write `data` as it is."""
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, body: bytes, path: str = "/v1/chat/completions", head: str = "") -> None:
        """Send one JSON request; `head` holds further header lines, each ended by CRLF."""
        lines = f"POST {path} HTTP/1.1\r\nHost: proxy\r\nContent-Type: application/json\r\n{head}"
        await self.send(f"{lines}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body)

    async def head(self) -> bytes:
        """Read the head of an answer: status line and header lines."""
        return await self.reader.readuntil(b"\r\n\r\n")

    async def until(self, text: bytes) -> bytes:
        """Read up to and with `text`."""
        return await self.reader.readuntil(text)

    async def rest(self) -> bytes:
        """Read until the other side closes."""
        return await self.reader.read()

    async def leave(self) -> None:
        """Close the connection with a FIN."""
        self.writer.close()

    async def reset(self) -> None:
        """Close the connection with a reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


RawConnect = Callable[[int], Awaitable[RawClient]]


@pytest.fixture
async def raw_connect() -> AsyncIterator[RawConnect]:
    """Open a raw socket to a port of this machine: `client = await raw_connect(proxy.port)`."""
    opened: list[RawClient] = []

    async def connect(port: int) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", port, limit=64 << 20))
        opened.append(client)
        return client

    yield connect
    for client in opened:
        client.writer.close()
