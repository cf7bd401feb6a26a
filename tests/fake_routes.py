"""The routes of the fake vLLM that generate no chat: models, tokens, health, metrics, pooling, the dangerous ones."""

import json
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.fake_engine import Refused, render
from tests.fake_faults import SEEN
from tests.fake_metrics import exposition
from tests.fake_replies import DONE, event

if TYPE_CHECKING:
    from tests.fake_vllm import FakeVllm


def add_small_routes(app: web.Application, fake: "FakeVllm") -> None:
    """Add to `app` every route but the two that generate from `fake`'s scripts."""
    routes = _SmallRoutes(fake)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/version", routes.version)
    app.router.add_get("/health", routes.empty)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_post("/tokenize", routes.tokenize)
    app.router.add_post("/detokenize", routes.detokenize)
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/responses", "/v1/messages"):
        app.router.add_post(path, routes.pooled)
    # Served without a key by vLLM: a proxy that lets them through hands out the machine.
    app.router.add_post("/invocations", routes.empty)
    if fake.dev_mode:
        app.router.add_post("/reset_prefix_cache", routes.reset)
        for path in ("/sleep", "/collective_rpc"):
            app.router.add_post(path, routes.empty)


def _parse(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(request[SEEN].raw)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Refused(400, "1 validation error: json_invalid", "Bad Request")
    request[SEEN].body = body
    return body


class _SmallRoutes:
    def __init__(self, fake: "FakeVllm") -> None:
        self.fake = fake

    async def models(self, request: web.Request) -> web.Response:
        rules = self.fake.rules
        model = {
            "id": rules.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": rules.model,
            "parent": None,
            "max_model_len": rules.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def empty(self, request: web.Request) -> web.Response:
        return web.Response()

    async def reset(self, request: web.Request) -> web.Response:
        self.fake.cache.hashes.clear()
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        fake = self.fake
        text = exposition(
            fake.gauges,
            fake.generations,
            model=fake.rules.model,
            live=fake.live,
            queries=fake.queries,
            hits=fake.hits,
            block_size=fake.block_size,
        )
        return web.Response(text=text, content_type="text/plain")

    async def tokenize(self, request: web.Request) -> web.Response:
        body = _parse(request)
        text = render(body) if "messages" in body else str(body.get("prompt", ""))
        tokens = self.fake.vocabulary.encode(text)
        strings = [self.fake.vocabulary.decode([token]) for token in tokens] if body.get("return_token_strs") else None
        length = self.fake.rules.max_model_len
        return web.json_response(
            {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": strings}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self.fake.vocabulary.decode(_parse(request).get("tokens", []))})

    async def pooled(self, request: web.Request) -> web.StreamResponse:
        body = _parse(request)
        kind = request.path.rsplit("/", 1)[-1]
        if not body.get("stream"):
            return web.json_response({"object": kind, "model": self.fake.rules.model, "data": []})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(event({"type": f"{kind}.created"}) + DONE)
        return response
