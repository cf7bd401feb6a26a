"""A small server with the admin routes of Open WebUI 0.12.4 that the doctor uses, and the calls that these make."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

KEY = "sk-admin"


@dataclass
class FakeWebUI:
    """Its settings; `forwards` is what ENABLE_FORWARD_USER_INFO_HEADERS says."""

    config: dict[str, Any]
    forwards: bool = False
    tasks: dict[str, Any] = field(default_factory=lambda: {"TASK_MODEL_EXTERNAL": ""})
    documents: dict[str, Any] = field(default_factory=lambda: {"RAG_TEMPLATE": "<context>", "RAG_FULL_CONTEXT": False})
    updates: int = 0
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeWebUI"]:
        """Serve on a free port."""
        app = web.Application()
        app.router.add_get("/api/version", self._version)
        app.router.add_get("/openai/config", self._config)
        app.router.add_post("/openai/config/update", self._update)
        app.router.add_post("/openai/verify", self._verify)
        app.router.add_get("/api/v1/tasks/config", self._tasks)
        app.router.add_get("/api/v1/retrieval/config", self._documents)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def _admin(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise web.HTTPUnauthorized

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "0.12.4", "deployment_id": ""})

    async def _config(self, request: web.Request) -> web.Response:
        self._admin(request)
        return web.json_response(self.config)

    async def _update(self, request: web.Request) -> web.Response:
        self._admin(request)
        self.config, self.updates = await request.json(), self.updates + 1
        return web.json_response(self.config)

    async def _verify(self, request: web.Request) -> web.Response:
        self._admin(request)
        body = await request.json()
        headers = {"Authorization": f"Bearer {body['key']}"}
        headers |= {"X-OpenWebUI-User-Id": "u1", "X-OpenWebUI-User-Role": "admin"} if self.forwards else {}
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{body['url']}/models", headers=headers) as got:
                return web.Response(status=got.status, body=await got.read(), content_type="application/json")
        except aiohttp.ClientError:
            raise web.HTTPInternalServerError from None

    async def _tasks(self, request: web.Request) -> web.Response:
        self._admin(request)
        return web.json_response(self.tasks)

    async def _documents(self, request: web.Request) -> web.Response:
        self._admin(request)
        return web.json_response(self.documents)
