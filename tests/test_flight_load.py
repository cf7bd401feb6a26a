"""Many clients on few flights, coming and going: nothing is left behind.

`FLIGHT_CLIENTS=2000 python -m pytest tests/test_flight_load.py` makes it many.
"""

import asyncio
import gc
import os
import random
from pathlib import Path

from proxy.downstream.shared import Run
from proxy.downstream.sharer import Sharer
from proxy.flight import Flight
from tests.bodies import eventually, stream
from tests.conftest import RawClient, RunningProxy, StartProxy
from tests.fake_replies import Raw, Reply, content_event
from tests.fake_vllm import FakeVllm
from tests.flights import ask, runs, sharing
from tests.virtual_time import soon

CLIENTS = int(os.environ.get("FLIGHT_CLIENTS", "500"))
FLIGHTS = 50
PIECES = 20
SECONDS = 60


def sockets() -> int:
    """Return how many file descriptors of this process are sockets."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(each).startswith("socket:")
        except OSError:  # the one that lists the folder
            continue
    return found


def alive() -> int:
    """Return how many flights, runs and sharers are in memory."""
    gc.collect()
    return sum(isinstance(each, Flight | Run | Sharer) for each in gc.get_objects())


async def client(proxy: RunningProxy, number: int, go: asyncio.Event) -> str:
    """Ask one of the questions: two of five leave, before the answer or in its middle; return what happened."""
    kind = random.Random(number).choice(["stays", "stays", "stays", "leaves early", "leaves late"])
    socket = RawClient(*await asyncio.open_connection("127.0.0.1", proxy.port))
    try:
        await ask(socket, stream(f"question {number % FLIGHTS}", temperature=0), user=f"u{number % FLIGHTS}")
        await go.wait()
        if kind == "leaves early":
            return kind
        await socket.until(b"<3>")
        if kind == "leaves late":
            return kind
        whole = b"<3>" + await socket.until(b"data: [DONE]\n\n")
        return "whole" if all(f"<{n}>".encode() in whole for n in range(3, PIECES)) else "broken"
    finally:
        socket.writer.close()


async def wave(proxy: RunningProxy, fake: FakeVllm) -> list[str]:
    """Let all clients ask; vLLM answers once they are there."""
    go, before = asyncio.Event(), len(runs(fake))
    fake.default = Reply(pieces=[f"<{n}>" for n in range(PIECES)], gates={0: go}, gap_seconds=0.005)
    asked = [soon(client(proxy, number, go)) for number in range(CLIENTS)]
    await eventually(lambda: sharing(proxy) == CLIENTS, within_seconds=SECONDS)
    assert len(proxy.state.flights.table) == FLIGHTS
    go.set()
    outcomes = list(await asyncio.wait_for(asyncio.gather(*asked), SECONDS))
    await eventually(lambda: not sharing(proxy) and not fake.live, within_seconds=10)
    assert len(runs(fake)) - before == FLIGHTS
    return outcomes


async def test_many_clients_on_few_flights_leave_nothing_behind(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Tasks, sockets and objects are back to where they were, and every client that stayed has the whole answer."""
    proxy = await start_proxy(coalesce__hold_seconds=0, steps__move_volatile=False)
    fake_vllm.count_tokens = False
    await asyncio.wait_for(wave(proxy, fake_vllm), SECONDS)  # connections and caches that may stay
    tasks, open_sockets, objects = len(asyncio.all_tasks()), sockets(), alive()
    outcomes = await asyncio.wait_for(wave(proxy, fake_vllm), SECONDS)
    assert "broken" not in outcomes and outcomes.count("whole") > CLIENTS // 3
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks and sockets() <= open_sockets, within_seconds=10)
    await eventually(lambda: alive() <= objects, within_seconds=10)
    assert (objects, len(proxy.state.flights.table), proxy.state.flights.kept_bytes) == (0, 0, 0)
    assert proxy.sample("proxy_requests_in_flight") == 0


async def test_flights_that_break_leave_nothing_behind_either(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """vLLM's connection breaks in the middle of every answer."""
    proxy = await start_proxy()
    go = asyncio.Event()
    fake_vllm.reply_to = lambda body: Raw([content_event("x"), go], end="cut") if body.get("stream") else None
    clients = [RawClient(*await asyncio.open_connection("127.0.0.1", proxy.port)) for _ in range(60)]
    for number, each in enumerate(clients):
        await ask(each, stream(f"q{number % 10}", temperature=0), user=f"u{number % 10}")
    await eventually(lambda: sharing(proxy) == 60)
    go.set()
    for each in clients:
        assert b'"error"' in await each.until(b"data: [DONE]\n\n")
        each.writer.close()
    await eventually(lambda: not proxy.sample("proxy_requests_in_flight"))
    assert len(runs(fake_vllm)) == 10
    assert len(proxy.state.flights.table) == 0 and proxy.state.flights.kept_bytes == 0
    assert proxy.sample("proxy_upstream_errors_total", kind="cut") == 10
