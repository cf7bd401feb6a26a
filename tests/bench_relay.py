"""What the proxy costs: straight to a fake vLLM, through one bare aiohttp hop, and through the proxy, in one run.

`make bench` prints a table.  Only ratios and differences count: all four processes share the machine.  The budgets are
those of proxy/README.md.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from rich.console import Console
from rich.table import Table

from tests.bench_chats import EVENTS, LARGE, PACED_EVENTS, SMALL, Size, answer, turns
from tests.fake_engine import Rules
from tests.fake_vllm import FakeVllm

CHAT = "/v1/chat/completions"
WAYS = ("direct", "hop", "proxy")
CLIENTS = 16
PACED = 512
STALL_SECONDS = 1.0


async def serve_fake() -> None:
    """Be the fake vLLM until the end; print the port."""
    fake = FakeVllm(rules=Rules(max_model_len=1 << 20), count_tokens=False, reply_to=answer, seen=_Forgetful())
    await fake.start()
    print(fake.port, flush=True)
    await asyncio.Event().wait()


class _Forgetful(list[Any]):
    """A load test's requests are not kept."""

    def append(self, _: object) -> None:
        """Keep nothing."""


async def serve_hop(upstream: str) -> None:
    """Be an aiohttp hop with nothing in it, the floor of what a proxy in Python costs; print the port."""
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)

    async def hop(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        headers = {"Content-Type": "application/json"}
        async with session.post(upstream + request.path, data=data, headers=headers) as upstream_response:
            response = web.StreamResponse(status=upstream_response.status)
            response.content_type = upstream_response.content_type
            await response.prepare(request)
            async for chunk in upstream_response.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post(CHAT, hop)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


@dataclass(frozen=True)
class Server:
    """A process that serves, at a URL."""

    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """Return the processor time that it has used so far (Linux)."""
        with open(f"/proc/{self.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[Server]:
    """Run this Python with `arguments`; give the server at the port with which its first line of output ends."""
    # Logs go to stderr, which nobody reads: they cost what they cost, and must not fill a pipe.
    command = [sys.executable, "-m", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"(?:^|127\.0\.0\.1:)(\d+)\b", process.stdout.readline())
        if found is None:
            raise RuntimeError(f"{arguments} ended before it listened")
        yield Server(f"http://127.0.0.1:{found[1]}", process.pid)
    finally:
        process.terminate()
        process.stdout.close()
        process.wait(10)


@dataclass
class Client:
    """The three ways to the same fake vLLM."""

    session: aiohttp.ClientSession
    servers: Mapping[str, Server]

    def post(self, way: str, body: bytes, chat: str) -> "aiohttp.client._RequestContextManager":
        """Send `body` on `way`."""
        headers = {"Content-Type": "application/json", "X-OpenWebUI-Chat-Id": chat, "X-OpenWebUI-User-Id": "u"}
        return self.session.post(self.servers[way].url + CHAT, data=body, headers=headers)

    async def first_event_ms(self, way: str, body: bytes, chat: str) -> float:
        """Return the time from sending to the first data byte, in milliseconds."""
        begun = time.perf_counter()
        async with self.post(way, body, chat) as response:
            await response.content.readuntil(b"\n\n")
            took = time.perf_counter() - begun
            await response.read()
        return took * 1000

    async def requests(self, way: str, seconds: float) -> int:
        """Ask small plain questions for so long; return how many were answered."""
        body = json.dumps({"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}).encode()
        begun, done = time.perf_counter(), 0

        async def ask(number: int) -> None:
            nonlocal done
            while time.perf_counter() - begun < seconds:
                async with self.post(way, body, f"small {number}") as response:
                    await response.read()
                done += 1

        await asyncio.gather(*(ask(number) for number in range(CLIENTS)))
        return done

    async def events(self, way: str, _: float) -> int:
        """Read a few streams whose events come one by one, as fast as they can; return how many came."""

        async def ask(number: int) -> None:
            async with self.post(way, _stream("events"), f"events {number}") as response:
                text = await response.read()
                assert text.count(b"\n\n") == EVENTS + 1

        await asyncio.gather(*(ask(number) for number in range(CLIENTS)))
        return EVENTS * CLIENTS

    async def longest_silence_ms(self, way: str) -> float:
        """Read many paced streams at once; return the longest time that any of them was silent, in milliseconds."""

        async def watch(number: int) -> float:
            async with self.post(way, _stream("paced"), f"paced {number}") as response:
                longest, last, size = 0.0, time.perf_counter(), 0
                async for chunk in response.content.iter_any():
                    now = time.perf_counter()
                    longest, last, size = max(longest, now - last), now, size + chunk.count(b"\n\n")
                assert size >= PACED_EVENTS
                return longest

        return max(await asyncio.gather(*(watch(number) for number in range(PACED)))) * 1000


def _stream(kind: str) -> bytes:
    messages = [{"role": "user", "content": "x"}]
    return json.dumps({"model": "fake", "user": kind, "stream": True, "max_tokens": 5, "messages": messages}).encode()


async def first_events(client: Client, size: Size, chats: int) -> dict[str, float]:
    """Return the median time to the first event on each way, measured in turns so that noise hits all alike."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for chat in range(chats):
        for turn, body in enumerate(turns(size)):
            if turn < size.known:  # the proxy gets to know the chat; the others have nothing to learn
                await client.first_event_ms("proxy", body, f"{size.name} {chat}")
                continue
            for way in WAYS:
                times[way].append(await client.first_event_ms(way, body, f"{size.name} {chat}"))
    return {way: statistics.median(values) for way, values in times.items()}


async def rates(
    client: Client, measured: Callable[[str, float], Awaitable[int]], seconds: float, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return per way, as medians of rounds taken in turns: how many a second, and the processor time of each in µs."""
    rate: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            server = client.servers[way]
            begun, used = time.perf_counter(), server.cpu_seconds()
            done = await measured(way, seconds)
            rate[way].append(done / (time.perf_counter() - begun))
            cpu[way].append((server.cpu_seconds() - used) / done * 1e6)
    medians = [{way: statistics.median(values) for way, values in each.items()} for each in (rate, cpu)]
    return medians[0], medians[1]


Row = tuple[str, dict[str, float], str, bool]


async def measure(client: Client, quick: bool) -> AsyncIterator[Row]:
    """Yield what was measured, its budget, and whether that is kept."""
    for size, chats, budget in ((SMALL, 2 if quick else 8, 1.0), (LARGE, 1 if quick else 4, 6.0)):
        found = await first_events(client, size, chats)
        over = found["proxy"] - found["hop"]
        yield f"first event, {size.name}, ms", found, f"hop + {over:.2f} (at most {budget:g})", over <= budget
    for name, measured in (("request", client.requests), ("event", client.events)):
        rate, cpu = await rates(client, measured, 0.5 if quick else 2.0, 3 if quick else 7)
        ratio = rate["proxy"] / rate["hop"]
        yield f"{name}s per second", rate, f"hop x {ratio:.2f} (at least 0.6)", ratio >= 0.6
        # Where all share few cores, a rate says less than what the process itself needs.
        yield f"processor time per {name}, µs", cpu, f"hop x {cpu['proxy'] / cpu['hop']:.2f}", True
    silence = {way: await client.longest_silence_ms(way) for way in WAYS}
    calm = silence["proxy"] < silence["hop"] + STALL_SECONDS * 1000
    yield f"{PACED} streams, longest silence, ms", silence, f"hop + {silence['proxy'] - silence['hop']:.0f}", calm


async def compare(servers: Mapping[str, Server], quick: bool) -> bool:
    """Measure and print the table; return whether every budget is kept."""
    table = Table("", *WAYS, "against the hop", title="What the proxy costs (one run, shared machine)")
    kept = True
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        async for name, found, verdict, good in measure(Client(session, servers), quick):
            kept &= good
            colour = "green" if good else "red"
            table.add_row(name, *(f"{found[way]:,.2f}" for way in WAYS), f"[{colour}]{verdict}[/]")
    Console(width=110).print(table)
    return kept


def main() -> int:
    """Start the three servers, compare, and return 1 if `--strict` is given and a budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a budget is not kept")
    parser.add_argument("--serve", choices=("fake", "hop"), help=argparse.SUPPRESS)
    parser.add_argument("--upstream", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run(serve_fake() if args.serve == "fake" else serve_hop(args.upstream))
        return 0
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(child("tests.bench_relay", "--serve", "fake"))
        hop = stack.enter_context(child("tests.bench_relay", "--serve", "hop", "--upstream", fake.url))
        proxy = stack.enter_context(child("proxy", "serve", "--upstream", fake.url, "--port", "0"))
        kept = run(compare({"direct": fake, "hop": hop, "proxy": proxy}, args.quick))
    return 0 if kept or not args.strict else 1


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` on the loop that the proxy has too, so that the loops are not what is compared."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


if __name__ == "__main__":
    sys.exit(main())
