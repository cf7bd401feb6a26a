"""What the proxy costs: straight to a fake vLLM, through one bare aiohttp hop, and through the proxy, in one run.

`make bench` prints a table.  Only ratios and differences count: all four processes share the machine.  The budgets are
those of proxy/README.md.
"""

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from rich.console import Console
from rich.table import Table

from tests.fake_engine import Rules
from tests.fake_replies import DONE, Raw, Reply, content_event
from tests.fake_vllm import FakeVllm

CHAT = "/v1/chat/completions"
WAYS = ("direct", "hop", "proxy")
EVENTS = 2000
SYSTEM = "You are a helpful assistant. Now: 2026-01-02 10:{minute:02}:{second:02} UTC. Answer briefly.\n"


def body_of(size: int, turn: int) -> bytes:
    """Return a chat request of about `size` bytes: a clock in front, a history, a new question at the end."""
    words = "The quick brown fox jumps over the lazy dog and thinks about it. "
    history = []
    for position in range(size // 2000):
        history.append({"role": "user", "content": f"Question {position}? " + words * 5})
        history.append({"role": "assistant", "content": f"Answer {position}. " + words * 24})
    system = SYSTEM.format(minute=turn // 60 % 60, second=turn % 60)
    messages = [{"role": "system", "content": system}, *history, {"role": "user", "content": f"And {turn}?"}]
    return json.dumps({"model": "fake", "stream": True, "max_tokens": 64, "messages": messages}).encode()


def answer(body: Mapping[str, Any]) -> Raw | Reply:
    """Answer a request that asks for many events with these, any other with one word."""
    if body.get("user") == "events":
        return Raw(body=[content_event(f" word{position}") for position in range(EVENTS)] + [DONE])
    return Reply(pieces=["Yes."])


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


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[str]:
    """Run this Python with `arguments`; give the URL at the port with which its first line of output ends."""
    # Logs go to stderr, which nobody reads: they cost what they cost, and must not fill a pipe.
    command = [sys.executable, "-m", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"(?:^|127\.0\.0\.1:)(\d+)\b", process.stdout.readline())
        if found is None:
            raise RuntimeError(f"{arguments} ended before it listened")
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        process.terminate()
        process.stdout.close()
        process.wait(10)


@dataclass
class Client:
    """The three ways to the same fake vLLM."""

    session: aiohttp.ClientSession
    urls: Mapping[str, str]

    def post(self, way: str, body: bytes) -> "aiohttp.client._RequestContextManager":
        """Send `body` on `way`."""
        headers = {"Content-Type": "application/json", "X-OpenWebUI-Chat-Id": "bench", "X-OpenWebUI-User-Id": "u"}
        return self.session.post(self.urls[way] + CHAT, data=body, headers=headers)

    async def first_event_ms(self, way: str, body: bytes) -> float:
        """Return the time from sending to the first data byte, in milliseconds."""
        begun = time.perf_counter()
        async with self.post(way, body) as response:
            await response.content.readuntil(b"\n\n")
            took = time.perf_counter() - begun
            await response.read()
        return took * 1000

    async def requests_per_second(self, way: str, seconds: float, clients: int = 16) -> float:
        """Return how many small plain requests are answered per second."""
        body = json.dumps({"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}).encode()
        begun, done = time.perf_counter(), 0

        async def ask() -> None:
            nonlocal done
            while time.perf_counter() - begun < seconds:
                async with self.post(way, body) as response:
                    await response.read()
                done += 1

        await asyncio.gather(*(ask() for _ in range(clients)))
        return done / (time.perf_counter() - begun)

    async def events_per_second(self, way: str, clients: int = 4) -> float:
        """Return how many events are relayed per second over a few streams."""
        body = {
            "model": "fake",
            "user": "events",
            "stream": True,
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "x"}],
        }

        async def ask() -> None:
            async with self.post(way, json.dumps(body).encode()) as response:
                text = await response.read()
                assert text.count(b"\n\n") == EVENTS + 1

        begun = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(clients)))
        return EVENTS * clients / (time.perf_counter() - begun)


async def first_events(client: Client, size: int, rounds: int) -> dict[str, float]:
    """Return the median time to the first event on each way, measured in turns so that noise hits all alike."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 5):
        body = body_of(size, turn)
        for way in WAYS:
            took = await client.first_event_ms(way, body)
            if turn >= 5:  # the first ones open connections and sessions
                times[way].append(took)
    return {way: statistics.median(values) for way, values in times.items()}


async def best_of(measure: Callable[[str], Any], rounds: int) -> dict[str, float]:
    """Return the best of several measurements on each way, taken in turns."""
    best = dict.fromkeys(WAYS, 0.0)
    for _ in range(rounds):
        for way in WAYS:
            best[way] = max(best[way], await measure(way))
    return best


Row = tuple[str, dict[str, float], str, bool]


async def measure(client: Client, quick: bool) -> AsyncIterator[Row]:
    """Yield what was measured, its budget, and whether that is kept."""
    for size, budget in ((25_000, 1.0), (400_000, 6.0)):
        found = await first_events(client, size, 20 if quick else 100)
        over = found["proxy"] - found["hop"]
        yield f"first event, {size // 1000} KB, ms", found, f"hop + {over:.2f} (at most {budget:g})", over <= budget
    rates: Sequence[tuple[str, Callable[[str], Any]]] = (
        ("requests per second", lambda way: client.requests_per_second(way, 0.5 if quick else 2)),
        ("events per second", client.events_per_second),
    )
    for name, measured in rates:
        found = await best_of(measured, 2 if quick else 3)
        ratio = found["proxy"] / found["hop"]
        yield name, found, f"hop x {ratio:.2f} (at least 0.6)", ratio >= 0.6


async def compare(urls: Mapping[str, str], quick: bool) -> bool:
    """Measure and print the table; return whether every budget is kept."""
    table = Table("", *WAYS, "against the hop", title="What the proxy costs (one run, shared machine)")
    kept = True
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        async for name, found, verdict, good in measure(Client(session, urls), quick):
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
        hop = stack.enter_context(child("tests.bench_relay", "--serve", "hop", "--upstream", fake))
        proxy = stack.enter_context(child("proxy", "serve", "--upstream", fake, "--port", "0"))
        kept = run(compare({"direct": fake, "hop": hop, "proxy": proxy}, args.quick))
    return 0 if kept or not args.strict else 1


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` on the loop that the proxy has too, so that the loops are not what is compared."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


if __name__ == "__main__":
    sys.exit(main())
