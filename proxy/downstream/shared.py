"""The run of a flight: one exchange with vLLM for several clients, which come and go meanwhile."""

import asyncio
import logging
from dataclasses import dataclass, field

import aiohttp
from multidict import CIMultiDictProxy

from proxy.core.reject import Reject
from proxy.core.request import Received
from proxy.core.sse import DONE, EventGate, UsageFilter
from proxy.downstream.answers import plain_answer
from proxy.downstream.auth import Caller
from proxy.downstream.errors import place_of
from proxy.downstream.failures import EVENTS, MAX_ANSWER_BYTES, POKE, error_event, left_over
from proxy.flight import Flight, Head, until
from proxy.rewriting import prepare
from proxy.state import State
from proxy.upstream.client import UpstreamFailure, failure_of, read_whole
from proxy.upstream.headers import upstream_headers

log = logging.getLogger("proxy.shared")


@dataclass(eq=False, slots=True)
class Run:
    """What the run takes from the request that began it; it holds on to no connection of a client."""

    state: State
    caller: Caller
    headers: CIMultiDictProxy[str]
    received: Received
    request_id: str
    received_at: float
    waited_seconds: float = field(default=0.0, init=False)

    async def fly(self, flight: Flight) -> None:
        """Wait, rewrite, forward and relay for the sharers of `flight`.  Cancelled when the last of them leaves."""
        with self.state.holding.answering(flight.ask.who) as answering:
            try:
                await self._fly(flight)
            except UpstreamFailure as failure:
                self._failed(flight, failure.kind)
                flight.failure = failure
            except Reject as reject:
                flight.outcome, flight.failure = "rejected", reject
            except Exception as error:
                # As for any fault of our own, neither client nor log gets the text, which may quote the request.
                log.error("unexpected_error", extra={"error": type(error).__name__, "where": place_of(error)})
                message = "The proxy failed while it handled this request. Its log has the place."
                flight.failure = Reject(500, message, "internal_error", code="internal_error")
            finally:
                # Before anybody hears of the end: tasks that wait for it look at what was recorded.
                self._record(flight)
                answering.called_tools = flight.meter.finish_reason == "tool_calls"
                flight.end()

    async def _fly(self, flight: Flight) -> None:
        state, who, loop = self.state, flight.ask.who, asyncio.get_running_loop()
        begun = loop.time()
        await until(flight)
        await state.holding.hold(who)
        self.waited_seconds = loop.time() - begun
        flight.prepared = await prepare(state, self.caller, self.headers, self.received, flight.ask.route, who=who)
        state.metrics.observe_overhead(loop.time() - self.received_at - self.waited_seconds)
        async with state.admission.place(who.tenant, task=who.task is not None):
            await self._exchange(flight)

    async def _exchange(self, flight: Flight) -> None:
        prepared = flight.prepared
        assert prepared is not None
        answer = await self._forward(flight, prepared.body)
        try:
            if answer.status == 400 and (fallback := prepared.fallback()) is not None:
                answer.close()
                answer = await self._forward(flight, fallback)
                if answer.status < 400:
                    prepared.fell_back()
            if answer.status == 200 and answer.content_type == EVENTS:
                flight.gate = UsageFilter() if prepared.strip_usage else EventGate()
                await flight.begin(Head(answer.headers))
                await self._relay(answer, flight)
            else:
                await self._read(answer, flight)
        finally:
            # Hangs up unless the answer was read to its end: that is what stops vLLM.
            answer.close()

    async def _forward(self, flight: Flight, body: bytes) -> aiohttp.ClientResponse:
        flight.sent = body
        key = self.state.config.upstream.api_key
        headers = upstream_headers(self.headers, request_id=self.request_id, api_key=key)
        return await self.state.upstream.send("POST", flight.ask.route, headers=headers, body=body)

    async def _read(self, answer: aiohttp.ClientResponse, flight: Flight) -> None:
        body = await read_whole(answer, MAX_ANSWER_BYTES)
        if answer.status == 200:
            flight.meter.feed_json(body, asyncio.get_running_loop().time())
        plain = plain_answer(answer.status, answer.content_type, body)
        self._completed(flight, plain.failure)
        await flight.begin(Head(answer.headers, plain))

    async def _relay(self, answer: aiohttp.ClientResponse, flight: Flight) -> None:
        gate, failure = flight.gate, await self._pump(answer, flight)
        if failure is None or flight.meter.done:
            # Where all was said, only the framing of the answer is broken.
            rest, failure = gate.close(), None
        else:
            # What is held back is half an event, and stays here.
            rest = (b"\n\n" if gate.half_sent else b"") + error_event(failure) + DONE
        if rest:
            await flight.tell(rest, asyncio.get_running_loop().time())
        self._completed(flight, failure.kind if failure is not None else None)

    async def _pump(self, answer: aiohttp.ClientResponse, flight: Flight) -> UpstreamFailure | None:
        """Relay until vLLM's end or failure; return the latter."""
        content, meter, gate, failure = answer.content, flight.meter, flight.gate, None
        clock = asyncio.get_running_loop().time
        while failure is None:
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, TimeoutError) as error:
                failure = failure_of(error)
                chunk = left_over(content)
            if not chunk:
                break
            ready, now = gate.feed(chunk), clock()
            if ready:
                await flight.tell(ready, now)
            meter.feed(chunk, now)
        return failure

    def _completed(self, flight: Flight, failure: str | None) -> None:
        failure = failure or ("in_band" if flight.meter.error else None)
        if failure is None:
            flight.outcome = "completed"
        else:
            self._failed(flight, failure)

    def _failed(self, flight: Flight, kind: str) -> None:
        flight.outcome = "upstream_error"
        self.state.metrics.upstream_error(kind)
        if kind in POKE:
            self.state.models.poke()

    def _record(self, flight: Flight) -> None:
        """Remember the exchange, once for all its sharers.  Nothing here may cost them the answer."""
        if flight.prepared is None:
            return
        answered = flight.meter if flight.head is not None or flight.outcome == "completed" else None
        try:
            flight.prepared.record(answered, flight.outcome)
        except Exception as error:
            log.error("record_failed", extra={"error": type(error).__name__})
            self.state.metrics.step_failed("record")
