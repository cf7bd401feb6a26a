"""How the app listens: like aiohttp's own runner, but what its parser refuses is answered in OpenAI's shape too."""

import asyncio
from http import HTTPStatus

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from proxy.core.reject import error_body
from proxy.downstream.errors import json_response


class _Connection(RequestHandler):
    """One connection.  aiohttp's answer to bytes that are no request would be plain text, and quote them."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer an error from outside the app's handlers and close; raises ConnectionError after an answer began."""
        super().handle_error(request, status, exc, message)  # logs, and refuses where an answer has begun
        fault = "internal_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        told = "This is not a valid HTTP request." if status == HTTPStatus.BAD_REQUEST else HTTPStatus(status).phrase
        response = json_response(error_body(told, kind=fault, code="bad_request"), status=status)
        # No signal sees this answer; elsewhere the header, which would name aiohttp and Python, is taken out.
        response.headers["Server"] = "prefix-proxy"
        response.force_close()
        return response


class _Server(web.Server):
    """Makes such connections."""

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs the app on any number of sites; use it as `web.AppRunner`."""

    __slots__ = ()

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **made._kwargs,
        )
