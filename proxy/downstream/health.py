"""GET /health (the process lives), /ready (it can serve) and /metrics."""

from aiohttp import web

from proxy.config import Config
from proxy.core.reject import Reject
from proxy.downstream.auth import authenticate, matches, presented_token
from proxy.downstream.errors import json_response
from proxy.state import STATE, State

_RETRY_AFTER = {"Retry-After": "2"}


async def health(request: web.Request) -> web.Response:
    """Answer 200 as long as the process can answer at all, also while it drains and while vLLM is away."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Answer 200 if a chat request would be served now, else 503; the body says what is wrong."""
    state = request.app[STATE]
    upstream_well = await state.vllm.healthy()
    if upstream_well and state.models.stale:
        # vLLM came back before the list was due.
        state.models.poke()
    degraded = state.store is not None and state.store.degraded
    body = {
        "status": "ok",
        "upstream": "ok" if upstream_well else "down",
        "store": "degraded" if degraded else "ok",
        "draining": state.draining,
    }
    if state.draining or not upstream_well:
        body["status"] = "draining" if state.draining else "unavailable"
        return json_response(body, status=503, headers=_RETRY_AFTER)
    if degraded:
        # Without its database the proxy serves from memory: worse, but far better than not at all.
        body["status"] = "degraded"
    return json_response(body)


async def metrics(request: web.Request) -> web.Response:
    """Answer with all metrics; raises Reject 404 if they have a port of their own, 401 without a right to them."""
    state = request.app[STATE]
    if state.config.metrics.port is not None:
        raise Reject(404, "The metrics are on a port of their own.", code="not_found")
    if not _may_read(request, state.config):
        message = "The metrics need the metrics token or an admin key: send it as Authorization: Bearer TOKEN."
        raise Reject(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return _render(state)


async def metrics_on_own_port(request: web.Request) -> web.Response:
    """Answer with all metrics on their own port, where only a configured token is asked for."""
    state = request.app[STATE]
    if state.config.metrics.token_hash is not None and not _may_read(request, state.config):
        raise Reject(401, "The metrics need the metrics token.", code="invalid_api_key")
    return _render(state)


def _may_read(request: web.Request, config: Config) -> bool:
    token, wanted = presented_token(request), config.metrics.token_hash
    if wanted is not None and token is not None and matches(wanted, token):
        return True
    if wanted is not None and not config.keys:
        return False
    try:
        return authenticate(request, config).admin
    except Reject:
        return False


def _render(state: State) -> web.Response:
    metrics = state.metrics
    if state.store is not None:
        metrics.store_lag(state.store.lag_seconds)
    return web.Response(body=metrics.render(), headers={"Content-Type": metrics.content_type})
