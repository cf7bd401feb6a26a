"""One exchange with vLLM from its forwarding to its record: bytes as they came, and an end for every failure."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict

from proxy import logs
from proxy.core.meter import Meter
from proxy.core.reject import Reject
from proxy.core.sse import DONE, EventGate, UsageFilter
from proxy.downstream.answers import plain_answer
from proxy.downstream.failures import DRAINED, EVENTS, MAX_ANSWER_BYTES, POKE, error_event, left_over
from proxy.downstream.keepalive import KeepAlive
from proxy.downstream.presence import Watch
from proxy.metrics import LEFT
from proxy.recorder import Recorded
from proxy.rewriting import LEFT_OUT, Prepared
from proxy.state import CALLER, OUTCOME, RECEIVED_AT, REQUEST_ID, State
from proxy.upstream.client import UpstreamFailure, failure_of, read_whole
from proxy.upstream.headers import downstream_headers, upstream_headers

log = logging.getLogger("proxy.relay")


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
    tenant: str = ""
    task: bool = False
    counts: bool = True  # what the run cost is counted with this one
    received: bytes = b""  # the body, kept for the recorder alone
    sent: bytes = b""

    async def run(self) -> web.StreamResponse:
        """Forward, relay, record; raise Reject where there is no answer to relay."""
        try:
            return await self._answer()
        except Reject as reject:  # no place was free
            self.outcome, self.status = "rejected", reject.status
            raise
        except UpstreamFailure as failure:
            self._failed(failure.kind)
            self.status = failure.status
            raise failure.reject() from failure
        except asyncio.CancelledError:
            self._left(by_client=self.watch.gone)
            if self.watch.drained and self.response is None:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]  # this runs in a task
                raise DRAINED.reject() from None
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
        async with self.state.admission.place(self.tenant, task=self.task):
            return await self._exchanged()

    async def _exchanged(self) -> web.StreamResponse:
        answer = await self._forward(self.prepared.body)
        try:
            if answer.status == 400 and (fallback := self.prepared.fallback()) is not None:
                answer.close()
                answer = await self._forward(fallback)
                if answer.status < 400:
                    self.prepared.fell_back()
            if answer.status == 200 and answer.content_type == EVENTS:
                return await self._relay_stream(answer)
            return await self._relay_plain(answer)
        finally:
            # Hangs up unless the answer was read to its end: that is what stops vLLM.
            answer.close()

    async def _forward(self, body: bytes) -> aiohttp.ClientResponse:
        request, self.sent = self.request, body
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
        await self._comment(response)
        gate = UsageFilter() if self.prepared.strip_usage else EventGate()
        pulse = KeepAlive(response, gate, self.state.tasks, self.state.config.relay.keepalive_seconds)
        pulse.start()
        try:
            failure = await self._pump(answer, response, gate, pulse)
        except asyncio.CancelledError:
            if not self.watch.drained or self.watch.gone:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # this runs in a task
            failure = DRAINED
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
                chunk = left_over(content)
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
            rest = (b"\n\n" if gate.half_sent else b"") + error_event(failure) + DONE
        await response.write_eof(rest)
        if failure is DRAINED:
            self.outcome = "drained"
        else:
            self._completed(failure.kind if failure is not None else None)

    async def _comment(self, response: web.StreamResponse) -> None:
        """Begin a stream with a comment that tells what was left out of its prompt, where that is wanted."""
        if LEFT_OUT in response.headers and self.state.config.trim.stream_comment:
            await response.write(f": left out {response.headers[LEFT_OUT]} messages\n\n".encode())

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
        if kind in POKE:
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
        for phase in (partial(self.prepared.record, answered, self.outcome), self._measure, self._write_down):
            try:
                phase()
            except Exception as error:
                log.error("record_failed", extra={"error": type(error).__name__})
                self.state.metrics.step_failed("record")

    def _write_down(self) -> None:
        """Hand the exchange to the recorder, where there is one."""
        recorder = self.state.recorder
        if recorder is None:
            return
        request, first = self.request, self.meter.first_token
        end, now = time.time(), asyncio.get_running_loop().time()
        recorder.take(
            Recorded(
                at=end - (now - request[RECEIVED_AT]),
                method=request.method,
                path=request.path,
                headers=recorder.headers(request.headers),
                body=self.received,
                sent=self.sent,
                first_at=None if first is None else end - (now - first),
                end_at=end,
                status=self.status,
                outcome=self.outcome,
                model=self.model if self.model in self.state.models.known() else "",
                trail=self.prepared.trail,
                usage=self.meter.usage,
            )
        )

    def _first_at(self) -> float | None:
        """Return when the client had its first token, in the loop's seconds."""
        return self.meter.first_token if self.response is not None else None

    def _measure(self) -> None:
        metrics, meter, begun = self.state.metrics, self.meter, self.request[RECEIVED_AT]
        seconds, first_at = asyncio.get_running_loop().time() - begun, self._first_at()
        first = first_at - begun if first_at is not None else None
        if first is not None:
            metrics.observe_first_token(first, meter.usage)
        if self.outcome == "completed":
            metrics.observe_end_to_end(seconds)
        tokens: dict[str, int | None] = {}
        if self.counts and (usage := meter.usage) is not None:
            prompt, cached, written = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            metrics.tokens(self.model, prompt=prompt, cached=cached or 0, generated=written)
            tokens = {"prompt": prompt, "cached": cached, "completion": written}
        if self.counts:
            metrics.observe_gaps(meter.gaps if self.response is not None else ())
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
