"""`prefix-proxy serve` as a process of its own: it starts, serves, drains and says what is wrong."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import pytest

from tests.fake_replies import Reply, json_error
from tests.fake_vllm import FakeVllm

STREAM = {"model": "fake", "stream": True, "messages": [{"role": "user", "content": "Tell me a story."}]}
START_SECONDS = 30.0  # the machine may be busy


@dataclass
class Served:
    """A running proxy process and a client."""

    process: asyncio.subprocess.Process
    url: str
    session: aiohttp.ClientSession

    def post(self, body: object) -> "aiohttp.client._RequestContextManager":
        """Send a chat request."""
        return self.session.post(f"{self.url}/v1/chat/completions", json=body)

    def tell(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def refuses(self) -> None:
        """Wait until no new connection is taken."""
        host, port = self.url.removeprefix("http://").split(":")
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:
                return
            writer.close()
            await asyncio.sleep(0.02)

    async def ended(self) -> tuple[int, str]:
        """Wait for the end; return exit code and logs."""
        _, err = await asyncio.wait_for(self.process.communicate(), START_SECONDS)
        return self.process.returncode or 0, err.decode()


Serve = Callable[..., Awaitable[Served]]


async def _start(*flags: str, **environ: str) -> asyncio.subprocess.Process:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFIX_PROXY_")}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "serve", *flags, stdout=pipe, stderr=pipe, env={**inherited, **environ}
    )  # fmt: skip


@pytest.fixture
async def serve(fake_vllm: FakeVllm) -> AsyncIterator[Serve]:
    """Start the command before `fake_vllm`: `await serve("--drain-seconds", "1")`."""
    started: list[Served] = []

    async def start(*flags: str, **environ: str) -> Served:
        process = await _start("--port", "0", "--upstream", fake_vllm.url, *flags, **environ)
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), START_SECONDS)).decode()
        assert line.startswith("prefix-proxy listens on http://127.0.0.1:"), line
        started.append(Served(process, line.split()[3].rstrip(","), aiohttp.ClientSession()))
        return started[-1]

    yield start
    for served in started:
        await served.session.close()
        if served.process.returncode is None:
            served.process.kill()
            await served.process.wait()


async def test_it_serves_and_ends_with_0_on_each_signal(serve: Serve) -> None:
    """An idle kept-alive connection does not hold it up."""
    for number in (signal.SIGTERM, signal.SIGINT):
        served = await serve()
        async with served.session.get(f"{served.url}/health") as response:
            assert response.status == 200
        served.tell(number)
        code, err = await asyncio.wait_for(served.ended(), 10)
        assert (code, "Traceback" in err) == (0, False), err


async def test_a_stream_that_runs_at_sigterm_is_finished_and_new_work_is_refused(
    serve: Serve, fake_vllm: FakeVllm
) -> None:
    gate = asyncio.Event()
    fake_vllm.replies.append(Reply("Once upon a time.", gates={1: gate}))
    served = await serve()
    async with served.post(STREAM) as response:
        begun = await response.content.readuntil(b"\n\n")
        served.tell()
        await served.refuses()
        gate.set()
        rest = await response.content.read()
    assert (await served.ended())[0] == 0
    assert "time." in _text(begun + rest) and rest.endswith(b"data: [DONE]\n\n") and b'"error"' not in rest


async def test_a_stream_that_outlasts_the_drain_is_ended_with_an_error(serve: Serve, fake_vllm: FakeVllm) -> None:
    fake_vllm.replies.append(Reply("Once upon a time.", gates={1: asyncio.Event()}))
    served = await serve("--drain-seconds", "0.2")
    async with served.post(STREAM) as response:
        await response.content.readuntil(b"\n\n")
        served.tell()
        rest = await response.content.read()
    assert b'data: {"error":' in rest and rest.endswith(b"data: [DONE]\n\n")
    assert (await served.ended())[0] == 0


async def test_a_second_signal_ends_it_at_once(serve: Serve, fake_vllm: FakeVllm) -> None:
    fake_vllm.replies.append(Reply("Once upon a time.", gates={1: asyncio.Event()}))
    served = await serve("--drain-seconds", "600")
    async with served.post(STREAM) as response:
        await response.content.readuntil(b"\n\n")
        served.tell()
        await served.refuses()
        served.tell()
        assert (await served.ended())[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("setting", ["port", "metrics-port"])
async def test_a_port_that_is_taken_is_one_plain_sentence(setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        process = await _start(*(["--port", "0"] if setting != "port" else []), f"--{setting}", number)
        out, err = await asyncio.wait_for(process.communicate(), START_SECONDS)
    said = f"prefix-proxy: --{setting} = {number} on 127.0.0.1 cannot be used: another program listens there"
    assert process.returncode == 2 and out == b"" and err.decode().startswith(said) and err.count(b"\n") == 1


async def test_no_text_of_a_request_is_in_the_logs_of_the_process(serve: Serve, fake_vllm: FakeVllm) -> None:
    """At debug level: an answer, bodies that cannot be read, an upstream that fails, a client that leaves."""
    canary, gate = "CANARY-7f", asyncio.Event()
    failed = json_error(500, {"error": {"message": canary}})
    fake_vllm.replies.extend([Reply(canary), failed, Reply(canary, gates={1: gate})])
    served = await serve(PREFIX_PROXY_LOG_LEVEL="debug", PREFIX_PROXY_LOG_FORMAT="json")
    served.session.headers.update(
        {"Authorization": f"Bearer {canary}", "X-OpenWebUI-User-Email": f"{canary}@a.example"}
    )
    body = {**STREAM, "messages": [{"role": "user", "content": canary}], "user": canary, "model": "fake"}
    for _ in range(2):
        async with served.post(body) as response:
            await response.read()
    async with served.session.post(f"{served.url}/v1/chat/completions", data=f'{{"messages": "{canary}') as response:
        assert response.status == 400
    async with served.session.get(f"{served.url}/{canary}?{canary}") as response:
        assert response.status == 404
    async with served.post(body) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await fake_vllm.seen[-1].closed.wait()
    served.tell()
    code, err = await served.ended()
    assert code == 0 and canary not in err
    events = [json.loads(line) for line in err.splitlines()]
    exchanges = [event["outcome"] for event in events if event["event"] == "exchange"]
    assert {"completed", "upstream_error", "client_disconnect"} <= set(exchanges), err


def _text(stream: bytes) -> str:
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
