"""HAProxy with the project's own configuration, and pairs of proxy and fake vLLM that can be killed."""

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from proxy.app import build_app
from proxy.config import Config
from proxy.downstream.listener import Runner
from tests.fake_engine import Rules
from tests.fake_vllm import FakeVllm

CONFIG = Path(__file__).parent.parent / "deploy" / "scale" / "haproxy.cfg"
START_SECONDS = 20
SERVER = 'server pair{0} "${{PAIR{0}}}" id {0}'


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def configuration(order: Sequence[int]) -> str:
    """Return the project's configuration with these pairs, in this order; [1, 2] is the file as it is."""
    text = CONFIG.read_text()
    lines = "\n".join(f"    {SERVER.format(number)}" for number in (1, 2))
    assert lines in text
    return text.replace(lines, "\n".join(f"    {SERVER.format(number)}" for number in order))


@asynccontextmanager
async def haproxy(
    program: str, folder: Path, pairs: Mapping[int, int], order: Sequence[int] = (1, 2)
) -> AsyncIterator[str]:  # fmt: skip
    """Run HAProxy before `pairs` (number: port); yield its URL once it answers."""
    port = free_port()
    file = folder / f"haproxy-{port}.cfg"
    file.write_text(configuration(order))
    named = {f"PAIR{number}": f"127.0.0.1:{at}" for number, at in pairs.items()}
    process = await asyncio.create_subprocess_exec(
        program, "-db", "-f", str(file),
        env={**os.environ, "LISTEN": f"127.0.0.1:{port}", **named},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await _answers(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _answers(url: str, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as session:
        while True:
            assert process.returncode is None, "HAProxy ended"
            try:
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


class Pair:
    """A proxy and its fake vLLM."""

    def __init__(self) -> None:
        self.fake = FakeVllm(rules=Rules(max_model_len=131_072))
        self.port = 0
        self._runner: Runner | None = None

    async def start(self) -> None:
        """Listen: on a free port, or after a `kill` on the same one, with nothing remembered."""
        if not self.port:
            await self.fake.start()
        app = build_app(Config().with_values({"upstream.url": self.fake.url, "listen.port": 0}))
        self._runner = Runner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """End as by SIGKILL: every connection breaks at once, in mid-answer too."""
        runner, self._runner = self._runner, None
        assert runner is not None and runner.server is not None
        for site in tuple(runner.sites):
            await site.stop()
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def stop(self) -> None:
        """Stop both."""
        if self._runner is not None:
            await self.kill()
        await self.fake.stop()


@asynccontextmanager
async def pairs(count: int) -> AsyncIterator[list[Pair]]:
    """Run so many pairs."""
    running = [Pair() for _ in range(count)]
    try:
        for pair in running:
            await pair.start()
        yield running
    finally:
        for pair in running:
            await pair.stop()


@asynccontextmanager
async def echoes(count: int) -> AsyncIterator[dict[int, int]]:
    """Run stand-ins for pairs that are always ready and answer with their number; yield number and port."""
    runners: list[web.AppRunner] = []
    ports: dict[int, int] = {}
    try:
        for number in range(1, count + 1):
            app = web.Application()
            app[NUMBER] = str(number)
            app.router.add_route("*", "/{path:.*}", _echo)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            ports[number] = runner.addresses[0][1]
        yield ports
    finally:
        for runner in runners:
            await runner.cleanup()


NUMBER = web.AppKey("number", str)


async def _echo(request: web.Request) -> web.Response:
    return web.Response(text=request.app[NUMBER])
