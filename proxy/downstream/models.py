"""GET /v1/models and /v1/models/{model}, from the cache that outlives a restart of vLLM."""

import orjson
from aiohttp import web

from proxy.core.reject import Reject
from proxy.state import STATE
from proxy.upstream.vllm import ModelList, Models

# A user sees a blank page until the list is there: wait for the first poll only a little.
_WAIT_SECONDS = 1.5
_RETRY_AFTER = {"Retry-After": "2"}


async def list_models(request: web.Request) -> web.Response:
    """Answer with vLLM's own bytes; raises Reject 503 if there was never a list."""
    models = request.app[STATE].models
    found = await _known(models)
    return _answer(found.body, models)


async def get_model(request: web.Request) -> web.Response:
    """Answer with one entry of the list; raises Reject 404 for a model that is not on it."""
    models = request.app[STATE].models
    found = await _known(models)
    entry = found.models.get(request.match_info["model"])
    if entry is None:
        raise Reject(404, "This model does not exist. GET /v1/models has the list.", code="model_not_found")
    return _answer(orjson.dumps(entry), models)


async def _known(models: Models) -> ModelList:
    found = await models.get(wait_seconds=_WAIT_SECONDS)
    if found is None:
        message = "vLLM has not answered yet, so its models are not known. Try again in a moment."
        raise Reject(503, message, "service_unavailable", code="upstream_unavailable", headers=_RETRY_AFTER)
    return found


def _answer(body: bytes, models: Models) -> web.Response:
    headers = {"X-Prefix-Proxy-Stale": "true"} if models.stale else None
    return web.Response(body=body, content_type="application/json", headers=headers)
