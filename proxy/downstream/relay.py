"""One exchange with vLLM from its forwarding to its record: bytes as they came, and an end for every failure."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import aiohttp
import orjson
from aiohttp import hdrs, web
from multidict import CIMultiDict

from proxy import logs
from proxy.core.meter import Meter
from proxy.core.reject import error_body
from proxy.core.sse import DONE, EventGate, UsageFilter
from proxy.downstream.answers import plain_answer
from proxy.downstream.keepalive import KeepAlive
from proxy.downstream.presence import Watch
from proxy.metrics import LEFT
from proxy.rewriting import Prepared
from proxy.state import CALLER, OUTCOME, RECEIVED_AT, REQUEST_ID, State
from proxy.upstream.client import UpstreamFailure, failure_of, read_whole
from proxy.upstream.headers import downstream_headers, upstream_headers

log = logging.getLogger("proxy.relay")

MAX_ANSWER_BYTES = 64 * 1024 * 1024
_EVENTS = "text/event-stream"
# Kinds of failure that may mean that vLLM has gone or come back.
_POKE = frozenset({"connect", "timeout", "cut", "status_5xx"})
_DRAINED = UpstreamFailure("drained", 503, "The proxy is stopping and had to end this answer. Try again in a moment.")


@dataclass(eq=False, slots=True)
class Exchange:
    """One generating request with its answer.  `run` is called once."""

    request: web.Request
    state: State
    prepared: Prepared
    watch: Watch
    model: str
    streams: bool  # what the client asked for
    meter: Meter = field(default_factory=Meter)
    outcome: str = "failed"  # until something better is known
    response: web.StreamResponse | None = None  # once its head is out
    status: int = LEFT

    async def run(self) -> web.StreamResponse:
        """Forward, relay, record; raise Reject where there is no answer to relay."""
        try:
            return await self._answer()
        except UpstreamFailure as failure:
            self._failed(failure.kind)
            self.status = failure.status
            raise failure.reject() from failure
        except asyncio.CancelledError:
            self._left(by_client=self.watch.gone)
            if self.watch.drained and self.response is None:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]  # this runs in a task
                raise _DRAINED.reject() from None
            raise
        except ConnectionError:
            self._left(by_client=True)
            # aiohttp logs a traceback of whatever is raised; this one fails to be written, quietly.
            return web.Response(status=LEFT)
        finally:
            self._record()

    async def _answer(self) -> web.StreamResponse:
        metrics, loop = self.state.metrics, asyncio.get_running_loop()
        metrics.observe_overhead(loop.time() - self.request[RECEIVED_AT])
        answer = await self._forward(self.prepared.body)
        try:
            if answer.status == 400 and (fallback := self.prepared.fallback()) is not None:
                answer.close()
                answer = await self._forward(fallback)
                if answer.status < 400:
                    self.prepared.fell_back()
            if answer.status == 200 and answer.content_type == _EVENTS:
                return await self._relay_stream(answer)
            return await self._relay_plain(answer)
        finally:
            # Hangs up unless the answer was read to its end: that is what stops vLLM.
            answer.close()

    async def _forward(self, body: bytes) -> aiohttp.ClientResponse:
        request = self.request
        headers = upstream_headers(
            request.headers, request_id=request[REQUEST_ID], api_key=self.state.config.upstream.api_key
        )  # fmt: skip
        return await self.state.upstream.send("POST", request.path, headers=headers, body=body)

    async def _relay_plain(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        body = await read_whole(answer, MAX_ANSWER_BYTES)
        if answer.status == 200:
            self.meter.feed_json(body, asyncio.get_running_loop().time())
        plain = plain_answer(answer.status, answer.content_type, body)
        headers = self._headers(answer)
        if plain.own or hdrs.CONTENT_TYPE not in headers:
            headers[hdrs.CONTENT_TYPE] = "application/json"
        response = web.Response(status=plain.status, body=plain.body, headers=headers)
        # Written here and not by aiohttp after the handler, so that a client that has gone shows.
        await response.prepare(self.request)
        await response.write_eof()
        self._completed(plain.failure)
        self.status = plain.status
        return response

    async def _relay_stream(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = self._headers(answer)
        headers[hdrs.CACHE_CONTROL] = "no-cache"
        headers["X-Accel-Buffering"] = "no"
        response = web.StreamResponse(headers=headers)
        await response.prepare(self.request)
        self.response, self.status = response, 200
        gate = UsageFilter() if self.prepared.strip_usage else EventGate()
        pulse = KeepAlive(response, gate, self.state.tasks, self.state.config.relay.keepalive_seconds)
        pulse.start()
        try:
            failure = await self._pump(answer, response, gate, pulse)
        except asyncio.CancelledError:
            if not self.watch.drained or self.watch.gone:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # this runs in a task
            failure = _DRAINED
        finally:
            pulse.stop()
        await self._end_stream(response, gate, failure)
        return response

    async def _pump(
        self, answer: aiohttp.ClientResponse, response: web.StreamResponse, gate: EventGate, pulse: KeepAlive
    ) -> UpstreamFailure | None:
        """Relay until vLLM's end or failure; return the latter.  One pass of the loop is what an event costs."""
        content, meter, clock, failure = answer.content, self.meter, asyncio.get_running_loop().time, None
        while failure is None:
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, TimeoutError) as error:
                failure = failure_of(error)
                chunk = _left_over(content)
            if not chunk:
                break
            ready = gate.feed(chunk)
            if ready:
                pulse.writing = True
                await response.write(ready)
                pulse.writing = False
            pulse.last = now = clock()
            meter.feed(chunk, now)
        return failure

    async def _end_stream(
        self, response: web.StreamResponse, gate: EventGate, failure: UpstreamFailure | None
    ) -> None:  # fmt: skip
        if failure is None:
            rest = gate.close()
        elif self.meter.done:
            # All was said; only the framing of the answer is broken.
            rest, failure = gate.close(), None
        else:
            # What is held back is half an event, and stays here.
            rest = (b"\n\n" if gate.half_sent else b"") + _error_event(failure) + DONE
        await response.write_eof(rest)
        if failure is _DRAINED:
            self.outcome = "drained"
        else:
            self._completed(failure.kind if failure is not None else None)

    def _headers(self, answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
        headers = downstream_headers(answer.headers, request_id=self.request[REQUEST_ID])
        headers.update(self.prepared.response_headers)
        return headers

    def _completed(self, failure: str | None) -> None:
        failure = failure or ("in_band" if self.meter.error else None)
        if failure is None:
            self.outcome = "completed"
        else:
            self._failed(failure)

    def _failed(self, kind: str) -> None:
        self.outcome = "upstream_error"
        self.state.metrics.upstream_error(kind)
        if kind in _POKE:
            self.state.models.poke()

    def _left(self, *, by_client: bool) -> None:
        """Record that this was ended from outside: by the client, or by the proxy's own end."""
        if not by_client:
            self.outcome = "drained"
            return
        self.outcome = "client_disconnect"
        self.state.metrics.aborted(self._phase())

    def _phase(self) -> str:
        if not self.streams:
            return "plain"
        if self.response is None:
            return "before_headers"
        return "prefill" if self.meter.first_token is None else "stream"

    def _record(self) -> None:
        """The last phase of every exchange, however it ended.  Nothing here may cost the user the answer."""
        self.request[OUTCOME] = self.outcome
        answered = self.meter if self.response is not None or self.outcome == "completed" else None
        for phase in (partial(self.prepared.record, answered, self.outcome), self._measure):
            try:
                phase()
            except Exception as error:
                log.error("record_failed", extra={"error": type(error).__name__})
                self.state.metrics.step_failed("record")

    def _measure(self) -> None:
        metrics, meter, begun = self.state.metrics, self.meter, self.request[RECEIVED_AT]
        seconds = asyncio.get_running_loop().time() - begun
        first = None
        if self.response is not None and meter.first_token is not None:
            first = meter.first_token - begun
            metrics.observe_first_token(first)
            metrics.observe_gaps(meter.gaps)
        if self.outcome == "completed":
            metrics.observe_end_to_end(seconds)
        tokens: dict[str, int | None] = {}
        if (usage := meter.usage) is not None:
            prompt, cached, written = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            metrics.tokens(self.model, prompt=prompt, cached=cached or 0, generated=written)
            tokens = {"prompt": prompt, "cached": cached, "completion": written}
        metrics.trail(self.prepared.trail)
        logs.access(
            request_id=self.request[REQUEST_ID],
            route=self.request.path,
            status=self.status,
            outcome=self.outcome,
            model=self.model if self.model in self.state.models.known() else "other",
            seconds=seconds,
            trail=self.prepared.trail,
            tokens=tokens,
            first_token_seconds=first,
            caller=self.request[CALLER].name,
        )


def _error_event(failure: UpstreamFailure) -> bytes:
    body = error_body(failure.message, kind="server_error", code=failure.status)
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _left_over(content: aiohttp.StreamReader) -> bytes:
    """Return what came before the connection broke and was not read yet; aiohttp raises first and would drop it."""
    with suppress(Exception):
        return content._read_nowait(-1)
    return b""
