"""The generating routes whose requests are rewritten: POST /v1/chat/completions and /v1/completions."""

import asyncio

from aiohttp import web

from proxy.core.request import parse_body
from proxy.downstream.body import read_body
from proxy.downstream.relay import Exchange
from proxy.rewriting import prepare
from proxy.state import CALLER, OUTCOME, STATE


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
            received = parse_body(raw, max_messages=limits.messages, max_images=limits.images, chat=chat)
            prepared = await prepare(state, request[CALLER], request.headers, received, request.path)
            rest = received.request.rest
            exchange = Exchange(request, state, prepared, watch, str(rest.get("model")), rest.get("stream") is True)
            return await exchange.run()
        except asyncio.CancelledError:
            if exchange is None:
                request[OUTCOME] = "client_disconnect" if watch.gone else "drained"
                if watch.gone:
                    state.metrics.aborted("before_headers")
            raise
