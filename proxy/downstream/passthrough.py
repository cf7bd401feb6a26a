"""The other routes of the allow-list: no text moves; limits and salt hold where an answer is generated."""

import asyncio
from collections.abc import Mapping

from aiohttp import ClientError, ClientResponse, web

from proxy.core.images import check_media
from proxy.core.reject import Reject
from proxy.core.request import parse_body
from proxy.core.sse import DONE, EventGate
from proxy.downstream.body import read_body
from proxy.downstream.entering import entered
from proxy.downstream.errors import json_response, upstream_error_body
from proxy.downstream.failures import EVENTS, MAX_ANSWER_BYTES, error_event, left_over
from proxy.rewriting import OUTPUT_FIELD, prepare_other
from proxy.state import CALLER, OUTCOME, REQUEST_ID, STARTED, STATE
from proxy.upstream.client import UpstreamFailure, failure_of, read_whole
from proxy.upstream.headers import downstream_headers, upstream_headers

_SMALL = ("/tokenize", "/detokenize")
PATHS = ("/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank", "/v1/score", *_SMALL)
# An error of vLLM is a sentence or a list of them.
_ERROR_BYTES = 1024 * 1024


async def passthrough(request: web.Request) -> web.StreamResponse:
    """Pass one request on and its answer back; raises Reject where there is no answer to pass."""
    state = request.app[STATE]
    with state.presence.watching(request) as watch:
        try:
            return await _exchange(request)
        except (asyncio.CancelledError, ConnectionError):
            if watch.drained and not watch.gone:
                request[OUTCOME] = "drained"
                asyncio.current_task().uncancel()  # type: ignore[union-attr]  # this runs in a task
                message = "The proxy is stopping and had to end this answer. Try again in a moment."
                raise Reject(503, message, "service_unavailable", code="draining") from None
            request[OUTCOME] = "client_disconnect"
            state.metrics.aborted("stream" if _streams(request) else "plain")
            raise


async def _exchange(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    limits = state.config.limits
    limit_bytes = limits.tokenize_bytes if request.path in _SMALL else limits.body_bytes
    body = await read_body(request, limit_bytes, seconds=limits.body_seconds)
    if request.path in OUTPUT_FIELD:
        body = await prepare_other(state, request[CALLER], request.headers, body, request.path)
    else:
        # Chats are counted, embedded and ranked with their images, which vLLM fetches for that.
        fields = parse_body(body, max_messages=limits.messages, max_images=limits.images, chat=False).request.rest
        check_media(fields, state.config.images.allow_hosts, limits.images)
    with entered(request) as guest:
        if request.path in _SMALL:
            return await _forwarded(request, body)
        async with state.admission.place(guest.tenant, task=False):
            return await _forwarded(request, body)


async def _forwarded(request: web.Request, body: bytes) -> web.StreamResponse:
    state = request.app[STATE]
    headers = upstream_headers(
        request.headers, request_id=request[REQUEST_ID], api_key=state.config.upstream.api_key
    )  # fmt: skip
    try:
        answer = await state.upstream.send("POST", request.path, headers=headers, body=body)
        try:
            return await (_refused if answer.status >= 400 else _relay)(request, answer)
        finally:
            # Hangs up unless the answer was read to its end: that is what stops vLLM when the client has gone.
            answer.close()
    except UpstreamFailure as failure:
        request[OUTCOME] = "upstream_error"
        state.metrics.upstream_error(failure.kind)
        state.models.poke()
        raise failure.reject() from failure


def _streams(request: web.Request) -> bool:
    started = request.get(STARTED)
    return started is not None and started.content_type == "text/event-stream"


async def _refused(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
    """Answer as vLLM did, in OpenAI's shape also where vLLM's own is another."""
    request[OUTCOME] = "upstream_error"
    request.app[STATE].metrics.upstream_error(f"status_{answer.status // 100}xx")
    headers = downstream_headers(answer.headers, request_id=request[REQUEST_ID])
    raw = await read_whole(answer, _ERROR_BYTES)
    body = upstream_error_body(raw, answer.status)
    if body is None:
        return web.Response(body=raw, status=answer.status, headers=headers)
    del headers["Content-Type"]
    return json_response(body, status=answer.status, headers=headers)


async def _relay(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
    if not 200 <= answer.status < 300:
        raise UpstreamFailure("other", 502, "The model server answered with a redirect. Its address may be wrong.")
    headers = downstream_headers(answer.headers, request_id=request[REQUEST_ID])
    if answer.content_type == EVENTS:
        return await _relay_stream(request, answer, headers)
    # Whole or not at all: half an answer under a 200 would pass for one.
    body = await read_whole(answer, MAX_ANSWER_BYTES)
    response = web.Response(status=answer.status, body=body, headers=headers)
    # Written here and not by aiohttp after the handler, so that a client that has gone shows.
    await response.prepare(request)
    await response.write_eof()
    return response


async def _relay_stream(
    request: web.Request, answer: ClientResponse, headers: Mapping[str, str]
) -> web.StreamResponse:  # fmt: skip
    response, gate, failure = web.StreamResponse(headers=headers), EventGate(), None
    response.headers["X-Accel-Buffering"] = "no"
    await response.prepare(request)
    while failure is None:
        try:
            chunk = await answer.content.readany()
        except (ClientError, TimeoutError) as error:
            failure, chunk = failure_of(error), left_over(answer.content)
        if not chunk:
            break
        if ready := gate.feed(chunk):
            await response.write(ready)
    if failure is None:
        await response.write_eof(gate.close())
        return response
    # The head has gone out, so this can only be told within the stream; half an event stays here.
    request[OUTCOME] = "upstream_error"
    request.app[STATE].metrics.upstream_error(failure.kind)
    await response.write_eof((b"\n\n" if gate.half_sent else b"") + error_event(failure) + DONE)
    return response
