"""A client's end of a flight: it gets the whole answer from its start, at its own pace, and leaves when it wants."""

import asyncio

import aiohttp
import orjson
from aiohttp import hdrs, web
from multidict import CIMultiDict

from proxy.core.reject import Reject
from proxy.core.sse import DONE
from proxy.downstream.answers import Plain
from proxy.downstream.failures import DRAINED, error_event
from proxy.downstream.keepalive import KeepAlive
from proxy.downstream.presence import Watch
from proxy.downstream.relay import Exchange
from proxy.flight import Flight, Head
from proxy.rewriting import Prepared
from proxy.state import REQUEST_ID, State
from proxy.upstream.client import UpstreamFailure
from proxy.upstream.headers import downstream_headers

# Below this much unsent (asyncio resumes a paused transport there) a write of at most `_PUSH_BYTES` never waits.
_UNSENT_BYTES = 16 * 1024
_PUSH_BYTES = 32 * 1024
# A client that read too slowly may be too slow to read why it was cut.
_GOODBYE_SECONDS = 5.0
_SLOW = UpstreamFailure("cut", 503, "This answer was read too slowly and had to be cut. Try again.")
_NO_STREAM = UpstreamFailure("other", 502, "The model server did not answer with a stream.")


class Sharer(Exchange):
    """One of those who share a flight.  Who is up to date is written to by the run, who is not reads the replay."""

    flight: Flight

    def __init__(self, request: web.Request, state: State, watch: Watch, model: str, *, streams: bool) -> None:
        Exchange.__init__(self, request, state, Prepared(b""), watch, model, streams)
        self.at = 0  # bytes of the answer that were written
        self._news: asyncio.Future[None] | None = None
        self._pulse: KeepAlive | None = None
        self._first: float | None = None  # when the first of them was
        self._complete = True  # they end with an event's end
        self._slow = False
        self.counts = False

    @property
    def at_boundary(self) -> bool:
        """Whether what was written ends between two events."""
        return self._complete and self.flight.gate.at_boundary

    def wake(self) -> None:
        """Let the client's handler look at its flight again."""
        self.meter = self.flight.meter
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def cut(self) -> None:
        """End this client's part: the bytes that it needs next are not kept any more."""
        if not self._slow:
            self._slow = True
            self.state.flights.metrics.cut()
            self.watch.task.cancel()

    async def push(self, data: bytes, now: float) -> None:
        """Write `data`, for the run; where that could mean waiting, the client's own handler does it."""
        transport, response, pulse = self.request.transport, self.response, self._pulse
        free = transport is not None and transport.get_write_buffer_size() <= _UNSENT_BYTES
        if free and len(data) <= _PUSH_BYTES and response is not None and pulse is not None:
            try:
                await response.write(data)
            except ConnectionError:
                pass
            else:
                self._wrote(data, pulse, now)
                return
        self.flight.live.pop(self, None)
        self.wake()

    def _wrote(self, data: bytes, pulse: KeepAlive, now: float) -> None:
        self.at += len(data)
        self._complete = data.endswith(b"\n\n")
        self._first = self._first or now
        pulse.last = now

    async def open(self, head: Head) -> None:
        """Send the head of a stream, for the run: that the client's handler sleeps on spares a turn of the loop."""
        if self.response is None and head.plain is None and self._news is not None and not self._news.done():
            try:
                await self._begin(head)
            except ConnectionError:
                pass
            else:
                self.flight.live[self] = None
                return
        self.wake()

    async def _answer(self) -> web.StreamResponse:
        self.meter = self.flight.meter
        try:
            while self.response is None and (head := self.flight.head) is None:
                if self.flight.over:
                    raise _copy(self.flight.failure or DRAINED)
                await self._wait()
            if self.response is None and head is not None:
                if head.plain is not None:
                    return await self._whole(head, head.plain)
                await self._begin(head)
            tail = await self._follow()
            self.outcome = self.flight.outcome
        except asyncio.CancelledError:
            tail = self._cut_short()
        finally:
            if self._pulse is not None:
                self._pulse.stop()
        return await self._end(tail)

    def _cut_short(self) -> bytes:
        """Return what ends a stream that was cancelled by us.  Raises, within `except`, where there is none to end."""
        if self.watch.gone or not (self.watch.drained or self._slow) or (self.watch.drained and self.response is None):
            raise
        self.watch.task.uncancel()
        if self.response is None:
            raise _copy(_SLOW) from None
        self.outcome = "drained" if self.watch.drained else "client_disconnect"
        failure = DRAINED if self.watch.drained else _SLOW
        return (b"" if self._complete else b"\n\n") + error_event(failure) + DONE

    async def _wait(self) -> None:
        """Wait until the flight has news for this client."""
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        finally:
            self._news = None
            # From here on the client's own handler writes, and the run must not.
            self.flight.live.pop(self, None)

    def _headers(self, answer: Head | aiohttp.ClientResponse) -> CIMultiDict[str]:
        done = self.flight.prepared or Prepared(b"")
        self.prepared = Prepared(b"", trail=done.trail)
        headers = downstream_headers(answer.headers, request_id=self.request[REQUEST_ID])
        headers.update(done.response_headers)
        return headers

    async def _whole(self, head: Head, plain: Plain) -> web.StreamResponse:
        headers = self._headers(head)
        if plain.own or hdrs.CONTENT_TYPE not in headers:
            headers[hdrs.CONTENT_TYPE] = "application/json"
        response = web.Response(status=plain.status, body=plain.body, headers=headers)
        await response.prepare(self.request)
        await response.write_eof()
        self.outcome, self.status = self.flight.outcome, plain.status
        return response

    async def _begin(self, head: Head) -> None:
        headers = self._headers(head)
        headers[hdrs.CACHE_CONTROL] = "no-cache"
        headers["X-Accel-Buffering"] = "no"
        response = web.StreamResponse(headers=headers)
        await response.prepare(self.request)
        self.response, self.status = response, 200
        await self._comment(response)
        self._pulse = KeepAlive(response, self, self.state.tasks, self.state.config.relay.keepalive_seconds)
        self._pulse.start()

    async def _follow(self) -> bytes:
        """Write until the flight's end, which may be another one by then; return what to end with."""
        response, pulse, clock = self.response, self._pulse, asyncio.get_running_loop().time
        assert response is not None and pulse is not None
        while True:
            flight = self.flight
            part = flight.replay.read(self.at)
            if part:
                pulse.writing = True
                await response.write(part)
                pulse.writing = False
                self._wrote(part, pulse, clock())
                flight.progressed()
            elif flight.over and part is not None:
                return _ending(flight)
            else:
                # From now on the run writes.  Where bytes are gone, `cut` brings the end.
                if part is not None:
                    flight.live[self] = None
                await self._wait()

    async def _end(self, tail: bytes) -> web.StreamResponse:
        response = self.response
        assert response is not None
        if not self._slow:
            await response.write_eof(tail)
            return response
        try:
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await response.write_eof(tail)
        except TimeoutError:
            if self.request.transport is not None:
                self.request.transport.abort()
        return response

    def _failed(self, kind: str) -> None:
        """The run has counted its failure; here is only one of those who hear of it."""
        self.outcome = "upstream_error"

    def _record(self) -> None:
        flight = self.flight
        if self.outcome == "rejected":  # or a fault of our own, which is told in the same way
            self.outcome = flight.outcome
        # What the run cost is counted once: with the first to have its end, or the last to leave.
        self.counts = not flight.counted and (flight.over or len(flight.members) == 1)
        flight.counted = flight.counted or self.counts
        self.meter = flight.meter
        if self.counts:
            self.sent = flight.sent
        self.state.flights.leave(self, self.outcome)
        Exchange._record(self)

    def _first_at(self) -> float | None:
        """Return when this client had its first token: who joins late, when the first bytes reached it."""
        token = self.meter.first_token
        return max(token, self._first) if self._first is not None and token is not None else None


def _copy(failure: UpstreamFailure | Reject) -> UpstreamFailure | Reject:
    """Return an exception of one's own: a shared one would collect the traces of all who raise it."""
    if isinstance(failure, UpstreamFailure):
        return UpstreamFailure(failure.kind, failure.status, failure.message)
    return Reject(failure.status, failure.message, failure.kind, failure.param, failure.code, failure.headers)


def _ending(flight: Flight) -> bytes:
    """Return what ends a stream whose flight is over: nothing more, or why there is no stream.

    The latter only after another flight has taken the place of the one that the stream began with.
    """
    if flight.head is not None and flight.head.plain is None:
        return b""
    failure = flight.failure
    if isinstance(failure, Reject):
        return b"data: " + orjson.dumps(failure.body()) + b"\n\n" + DONE
    if failure is None and flight.head is not None and flight.head.plain is not None and flight.head.plain.failure:
        return b"data: " + flight.head.plain.body.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n\n" + DONE
    return error_event(failure or _NO_STREAM) + DONE
