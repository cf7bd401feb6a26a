"""The generating routes whose requests are rewritten: POST /v1/chat/completions and /v1/completions."""

import asyncio
from functools import partial

from aiohttp import web

from proxy.core.coalesce import Ask
from proxy.core.identity import Identity, identify
from proxy.core.request import Received, parse_body
from proxy.downstream.body import read_body
from proxy.downstream.entering import Guest, computed_tokens, entered
from proxy.downstream.presence import Watch
from proxy.downstream.relay import Exchange
from proxy.downstream.shared import Run
from proxy.downstream.sharer import Sharer
from proxy.facts import claims_of, model_of
from proxy.rewriting import BIG_BYTES, prepare
from proxy.state import CALLER, OUTCOME, RECEIVED_AT, REQUEST_ID, STATE, State


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat request.  Raises Reject for what is not forwarded or not answered."""
    return await _generate(request, chat=True)


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer a request with a bare prompt.  Raises Reject as `chat_completions` does."""
    return await _generate(request, chat=False)


async def _generate(request: web.Request, *, chat: bool) -> web.StreamResponse:
    state, exchange = request.app[STATE], None
    limits = state.config.limits
    with state.presence.watching(request) as watch:
        try:
            raw = await read_body(request, limits.body_bytes, seconds=limits.body_seconds)
            parse = partial(parse_body, raw, max_messages=limits.messages, max_images=limits.images, chat=chat)
            received = await asyncio.to_thread(parse) if len(raw) > BIG_BYTES else parse()
            who = identify(claims_of(state.config, request[CALLER], request.headers), received.request)
            with entered(request, who) as guest:
                exchange = _boarded(request, state, received, who, watch)
                if exchange is not None:
                    return await _run(exchange, guest, raw)
                with state.holding.answering(who) as answering:
                    exchange = await _alone(request, state, received, who, watch)
                    try:
                        return await _run(exchange, guest, raw)
                    finally:
                        answering.called_tools = exchange.meter.finish_reason == "tool_calls"
        except asyncio.CancelledError:
            if exchange is None:
                request[OUTCOME] = "client_disconnect" if watch.gone else "drained"
                if watch.gone:
                    state.metrics.aborted("before_headers")
            raise


async def _run(exchange: Exchange, guest: Guest, raw: bytes) -> web.StreamResponse:
    exchange.tenant, exchange.task = guest.tenant, guest.task
    if exchange.state.recorder is not None:
        exchange.received = raw
    try:
        return await exchange.run()
    finally:
        if exchange.counts:
            guest.ticket.tokens = computed_tokens(exchange.meter)


def _boarded(
    request: web.Request, state: State, received: Received, who: Identity, watch: Watch
) -> Exchange | None:  # fmt: skip
    """Return the client's end of a flight, if its run may be shared; no `await` lies between the look and the deed."""
    if state.config.profile == "off" or not who.proven:
        return None
    caller, headers, rest = request[CALLER], request.headers, received.request.rest
    ask = Ask(
        who,
        caller.name,
        model_of(state, received.request),
        request.path,
        received.request,
        headers.get("Idempotency-Key") or None,
        again=headers.get("X-Stainless-Retry-Count", "0").strip() not in ("", "0"),
    )
    if not state.flights.concerns(ask):
        return None
    sharer = Sharer(request, state, watch, str(rest.get("model")), streams=rest.get("stream") is True)
    run = Run(state, caller, headers, received, request[REQUEST_ID], request[RECEIVED_AT])
    state.flights.board(ask, sharer, run.fly)
    return sharer


async def _alone(request: web.Request, state: State, received: Received, who: Identity, watch: Watch) -> Exchange:
    """Return an exchange of a request that shares nothing, once it may go.  Raises Reject as `prepare` does."""
    if state.config.profile != "off":
        await state.holding.hold(who)
    rest = received.request.rest
    prepared = await prepare(state, request[CALLER], request.headers, received, request.path, who=who)
    return Exchange(request, state, prepared, watch, str(rest.get("model")), rest.get("stream") is True)
