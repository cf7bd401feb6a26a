"""Coalescing: who shares one run of vLLM, who takes whose place, and how far each sharer has got.

What is decided is decided by proxy.core.coalesce and proxy.core.waiting, without an `await`; the run itself is
proxy.downstream.shared, a client's end of it proxy.downstream.sharer.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

from multidict import MultiMapping

from proxy.aio import Tasks
from proxy.coalesce_metrics import CoalesceMetrics
from proxy.config.coalesce import Coalesce
from proxy.core.coalesce import Ask, Group, Table
from proxy.core.meter import Meter
from proxy.core.reject import Reject
from proxy.core.replay import PART_BYTES, Replay
from proxy.core.sse import EventGate
from proxy.core.waiting import MOST_TYPING, MOST_WINDOWS, Typing, is_typing
from proxy.downstream.answers import Plain, empty_answer
from proxy.memory import CHAT
from proxy.rewriting import Prepared
from proxy.upstream.client import UpstreamFailure

ALL_BYTES = 64 * 1024 * 1024
"""What is kept for late joiners in all flights together; above it each keeps only what its own sharers need."""


class Sharer(Protocol):
    """A client's end of a flight."""

    flight: "Flight"
    at: int  # how many bytes of the answer it has

    def wake(self) -> None:
        """Look at `flight` again."""

    async def open(self, head: "Head") -> None:
        """Begin to answer, without waiting."""

    def cut(self) -> None:
        """End with an error: what it needs next is not kept any more."""

    async def push(self, data: bytes, now: float) -> None:
        """Write `data` if that means no waiting, else `wake`, and write from the replay."""


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins: vLLM's headers, and all of it unless it is a stream."""

    headers: MultiMapping[str]
    plain: Plain | None = None


class Flight(Group[Sharer]):
    """One run: `head`, then bytes in `replay`, then `over`; or `failure` where no head came."""

    def __init__(self, ask: Ask, flights: "Flights", begins: float) -> None:
        """`begins`: when it goes up, in seconds of the loop's clock."""
        super().__init__(ask)
        self.begins, self.arrived = begins, begins
        self.prepared: Prepared | None = None
        self.meter, self.gate, self.replay = Meter(), EventGate(), Replay()
        self.head: Head | None = None
        self.failure: UpstreamFailure | Reject | None = None
        self.over = False
        self.counted = False  # what it cost is in the metrics
        self.outcome = "failed"  # until something better is known
        self.sent = b""  # what went up, for the recorder
        self.live: dict[Sharer, None] = {}  # those that have all there is: the run writes to them itself
        self.task: asyncio.Task[object] | None = None
        self._flights = flights
        self._progress: asyncio.Future[None] | None = None

    @property
    def whole(self) -> bool:
        """Whether a newcomer can still get all of it, and has time to read it."""
        return not self.over and self.replay.base == 0 and self.replay.size <= self._flights.buffer_bytes // 2

    async def begin(self, head: Head) -> None:
        """Let the sharers answer their clients: the headers are there, or all of a plain answer is."""
        self.head = head
        for sharer in tuple(self.members):
            await sharer.open(head)

    def fail(self, failure: UpstreamFailure | Reject) -> None:
        """End without an answer: every sharer raises a copy of `failure`."""
        self.failure = failure
        self.end()

    def end(self) -> None:
        """End: nobody joins any more, and what the sharers have not had yet is in the replay."""
        if not self.over:
            self.over = True
            self._flights.ended(self)
            self._wake_all()

    def dismiss(self, head: Head, stream: bytes) -> None:
        """Answer every sharer with this in place of a run, which must not have begun."""
        self.head = head
        self.replay.append(stream)
        self._flights.kept_bytes += len(stream)
        self.outcome = "completed"
        self.end()
        self.stop()

    def stop(self) -> None:
        """End the run, which closes its connection to vLLM."""
        if self.task is not None:
            self.task.cancel()

    async def tell(self, data: bytes, now: float) -> None:
        """Relay `data` to every sharer.  Waits only for the quickest of them, and only if even that one is behind."""
        self.spoken = True
        self.replay.append(data)
        self._flights.kept_bytes += len(data)
        for sharer in tuple(self.live):
            await sharer.push(data, now)
        if self.replay.size > self._flights.buffer_bytes or self._flights.kept_bytes > ALL_BYTES:
            self._shorten()
        while not self.live and self.members and self.replay.end - max(s.at for s in self.members) > PART_BYTES:
            self._progress = asyncio.get_running_loop().create_future()
            await self._progress

    def progressed(self) -> None:
        """Note that a sharer has read on, came or went."""
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _shorten(self) -> None:
        """Keep what the slowest sharer needs, within the limit, and what the quickest needs; cut who needs more."""
        reached = [sharer.at for sharer in self.members] or [self.replay.end]
        most = max(self._flights.buffer_bytes, self.replay.end - max(reached))
        self._flights.kept_bytes -= self.replay.drop(min(self.replay.end - min(reached), most))
        for sharer in [each for each in self.members if each.at < self.replay.base]:
            sharer.cut()

    def _wake_all(self) -> None:
        for sharer in self.members:
            sharer.wake()


Run = Callable[[Flight], Coroutine[object, object, object]]


class Flights:
    """All flights of one proxy.  Nothing here waits."""

    def __init__(self, settings: Coalesce, tasks: Tasks, metrics: CoalesceMetrics) -> None:
        self.table: Table[Flight, Sharer] = Table()
        self.metrics = metrics
        self.buffer_bytes = settings.buffer_bytes
        self.kept_bytes = 0
        self._settings, self._tasks = settings, tasks
        self._typing: dict[str, Typing] = {}  # by tenant, in the order of use

    def concerns(self, ask: Ask) -> bool:
        """Say whether `ask` could share a run, now or with one that comes: else it goes its own way."""
        settings = self._settings
        if not ask.who.proven:
            return False
        if settings.single_flight or (settings.debounce_ms and is_typing(ask.who)):
            return True
        return ask.named_chat and (settings.supersede or settings.window_ms > 0)

    def board(self, ask: Ask, sharer: Sharer, run: Run) -> None:
        """Give `sharer` its flight: one that is under way, or a new one that `run` flies."""
        flight = self.table.find(ask) if self._settings.single_flight else None
        if flight is not None:
            self.metrics.spared("joined")
        else:
            flight = self._depart(ask, run)
        sharer.flight = flight
        self.table.board(flight, sharer)
        flight.progressed()

    def leave(self, sharer: Sharer, outcome: str) -> None:
        """Take a sharer out; if it was the last one the run ends now, with `outcome`."""
        flight = sharer.flight
        flight.live.pop(sharer, None)
        emptied = self.table.leave(sharer)
        if emptied is not None:
            emptied.outcome = outcome
            emptied.stop()
        flight.progressed()

    def ended(self, flight: Flight) -> None:
        """Forget a flight whose run has ended.  Its sharers may still read."""
        self.table.close(flight)
        self.kept_bytes -= flight.replay.size

    def _depart(self, ask: Ask, run: Run) -> Flight:
        now = asyncio.get_running_loop().time()
        flight = Flight(ask, self, now)
        settings = self._settings
        if is_typing(ask.who):
            flight.begins = self._typed(ask, now)
        elif ask.named_chat and settings.window_ms:
            flight.begins = now + settings.window_ms / 1000
        for old in self.table.overtaken(ask, self._may_be_overtaken):
            self._take_place(flight, old)
        self.table.add(flight)
        flight.task = self._tasks.spawn(run(flight), name="flight")
        return flight

    def _may_be_overtaken(self, old: Flight) -> bool:
        silent = old.meter.first_token is None and (old.head is None or old.head.plain is None)
        return silent and (self._settings.supersede or (old.waiting and self._settings.window_ms > 0))

    def _take_place(self, flight: Flight, old: Flight) -> None:
        self.metrics.spared("merged" if old.waiting else "superseded")
        flight.arrived = min(flight.arrived, old.arrived)
        longest = flight.arrived + MOST_WINDOWS * self._settings.window_ms / 1000
        flight.begins = max(min(flight.begins, longest), asyncio.get_running_loop().time())
        for sharer in self.table.move(old, flight):
            old.live.pop(sharer, None)
            sharer.flight = flight
            sharer.wake()
        old.outcome = "superseded"
        old.stop()

    def _typed(self, ask: Ask, now: float) -> float:
        """Answer the tenant's waiting autocompletion empty; return when the new one goes."""
        window = self._settings.debounce_ms / 1000
        typing = self._typing.pop(ask.who.tenant, None) or Typing()
        self._typing[ask.who.tenant] = typing
        while len(self._typing) > MOST_TYPING:
            del self._typing[next(iter(self._typing))]
        begins = typing.begins(now, window)
        waiting = [f for f in self.table if f.waiting and is_typing(f.ask.who) and f.ask.who.tenant == ask.who.tenant]
        for old in waiting if window else ():
            self.metrics.spared("debounced")
            chat, name, created = old.ask.route == CHAT, uuid.uuid4().hex, int(time.time())
            headers, plain, stream = empty_answer(
                old.ask.model, old.ask.request.rest, chat=chat, id=name, created=created
            )
            old.dismiss(Head(headers, plain), stream)
        return begins


async def until(flight: Flight) -> None:
    """Wait until `flight` begins.  A newer one may take its place, or answer it, meanwhile."""
    seconds = flight.begins - asyncio.get_running_loop().time()
    if seconds > 0:
        await asyncio.sleep(seconds)
    flight.waiting = False
