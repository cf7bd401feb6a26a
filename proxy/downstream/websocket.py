"""GET /v1/chat/completions with an upgrade: chat requests as messages of one WebSocket, one after another.

A message is the JSON body of a POST.  Its answer is the data of each event of the stream, a text message each; a plain
answer, or an error in OpenAI's shape, is one message; `[DONE]` ends every answer.  Each message passes what a POST of
its body would pass, by way of a request of its own whose answer is written here: `web.Request` is pinned by the version
of aiohttp that pyproject.toml allows, and tests/test_websocket.py would tell if that changed.
"""

import asyncio
from contextlib import suppress
from functools import partial
from typing import cast

from aiohttp import StreamReader, WSCloseCode, WSMsgType, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.core.reject import Reject
from proxy.core.sse import EventScanner
from proxy.downstream.auth import SOCKET_PROTOCOL
from proxy.downstream.chat import chat_completions
from proxy.downstream.failures import EVENTS, MAX_ANSWER_BYTES
from proxy.downstream.middlewares import accepting, answered, counted, expect_body
from proxy.downstream.origin import refuse_foreign_sockets
from proxy.state import CALLER, STATE, State

PATH = "/v1/chat/completions"
HEARTBEAT_SECONDS = 20.0
"""How often a ping goes out; a client that answers none for half of that is gone."""

MOST_WAITING = 4
"""Requests that may be sent while one is answered.  Whoever sends more does not read what comes."""

DONE = b"[DONE]"
# What belongs to the handshake, or to one request alone.
_OWN_HEADERS = (
    hdrs.CONNECTION, hdrs.UPGRADE, hdrs.CONTENT_ENCODING, hdrs.CONTENT_LENGTH, hdrs.TRANSFER_ENCODING,
    hdrs.SEC_WEBSOCKET_KEY, hdrs.SEC_WEBSOCKET_VERSION, hdrs.SEC_WEBSOCKET_PROTOCOL, hdrs.SEC_WEBSOCKET_EXTENSIONS,
    "X-Request-Id", "Idempotency-Key", "X-Stainless-Retry-Count",
)  # fmt: skip


class Sockets:
    """The open sockets of one app."""

    def __init__(self, state: State) -> None:
        self._state, self._open = state, set[_Conversation]()

    def release(self) -> None:
        """Close those that wait for a request, since the proxy stops; the others close after their answer."""
        for each in self._open:
            if each.idle:
                self._state.tasks.spawn(each.leave(), name="websocket-close")

    async def on_shutdown(self, app: web.Application) -> None:
        """As `release`, for whoever runs the app."""
        self.release()

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Answer what comes on one socket until it closes."""
        conversation = _Conversation(request, self._state)
        self._open.add(conversation)
        try:
            return await conversation.run()
        finally:
            self._open.discard(conversation)


SOCKETS = web.AppKey("sockets", Sockets)


def add_routes(app: web.Application) -> None:
    """Add the WebSocket to the app."""
    app[SOCKETS] = Sockets(app[STATE])
    app.on_shutdown.append(app[SOCKETS].on_shutdown)
    app.router.add_get(PATH, chat_socket, expect_handler=expect_body, allow_head=False)


async def chat_socket(request: web.Request) -> web.StreamResponse:
    """Open a WebSocket; raises Reject for pages of other origins, and for what is no WebSocket's handshake."""
    if request.headers.get(hdrs.UPGRADE, "").strip().lower() != "websocket":
        message = "This path takes POST, or the handshake of a WebSocket."
        raise Reject(405, message, code="method_not_allowed", headers={hdrs.ALLOW: "POST"})
    refuse_foreign_sockets(request, request.app[STATE].config)
    offered = request.headers.get(hdrs.SEC_WEBSOCKET_PROTOCOL)
    # aiohttp would log what was offered, which may hold a key.
    if offered is not None and SOCKET_PROTOCOL not in (each.strip() for each in offered.split(",")):
        message = f"The only subprotocol that is known here is {SOCKET_PROTOCOL}."
        raise Reject(400, message, param="Sec-WebSocket-Protocol", code="bad_request")
    return await request.app[SOCKETS].serve(request)


class _Conversation:
    """One socket: a reader, and one task that answers."""

    def __init__(self, request: web.Request, state: State) -> None:
        self._request, self._state = request, state
        self._link = _Link(request)
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(MOST_WAITING)
        self._answering = False
        self._socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_SECONDS,
            max_msg_size=state.config.limits.body_bytes,
            compress=False,  # an answer of few bytes a message gains nothing, and what is inflated needs no bound
            protocols=(SOCKET_PROTOCOL,),
            decode_text=False,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is being answered, and nothing waits for it."""
        return not self._answering and self._waiting.empty()

    async def run(self) -> web.WebSocketResponse:
        """Read until the end of the socket; what is being answered then ends at once."""
        if not self._socket.can_prepare(self._request):
            raise Reject(400, "This is not a valid handshake of a WebSocket.", code="bad_request")
        await self._socket.prepare(self._request)
        worker = self._state.tasks.spawn(self._work(), name="websocket")
        try:
            while await self._read():
                pass
        finally:
            self._link.left = True
            worker.cancel()
            await asyncio.wait((worker,))
        return self._socket

    async def leave(self) -> None:
        """Close, since the proxy stops."""
        await self._socket.close(code=WSCloseCode.GOING_AWAY, message=b"The proxy is stopping.")

    async def _read(self) -> bool:
        """Take one message; say whether another one may come."""
        message = await self._socket.receive()
        if message.type is WSMsgType.TEXT:
            if not self._waiting.full():
                self._waiting.put_nowait(message.data)
                return True
            code, why = WSCloseCode.POLICY_VIOLATION, b"Too many requests wait for their answer."
        elif message.type is WSMsgType.BINARY:
            code, why = WSCloseCode.UNSUPPORTED_DATA, b"Requests are text messages."
        else:
            return False
        self._link.left = True
        await self._socket.close(code=code, message=why)
        return False

    async def _work(self) -> None:
        while True:
            raw = await self._waiting.get()
            self._answering = True
            try:
                await self._answer(raw)
            finally:
                self._answering = False
            if self._state.draining and self._waiting.empty():
                await self.leave()

    async def _answer(self, raw: bytes) -> None:
        inner = self._as_post(raw)
        handler = partial(accepting, handler=chat_completions)
        response = await counted(inner, partial(answered, handler=handler))
        # As aiohttp does after a handler; neither does anything where all is written.
        with suppress(ConnectionError):
            await response.prepare(inner)
            await response.write_eof()

    def _as_post(self, raw: bytes) -> web.Request:
        """Return a request as a POST of `raw` would have made it."""
        outer, loop = self._request, asyncio.get_running_loop()
        headers = CIMultiDict(outer.headers)
        for name in _OWN_HEADERS:
            headers.popall(name, None)
        headers[hdrs.CONTENT_TYPE] = "application/json"
        head = RawRequestMessage(
            hdrs.METH_POST, PATH, outer.version, CIMultiDictProxy(headers), (), False, None, False, False, outer.rel_url
        )
        body = StreamReader(BaseProtocol(loop), 2**16, loop=loop)
        body.feed_data(raw)
        body.feed_eof()
        task = cast("asyncio.Task[None]", asyncio.current_task())
        inner = web.Request(
            head, body, cast(web.RequestHandler, self._link), _Messages(self._socket), task, loop
        )  # fmt: skip
        inner._match_info = outer.match_info
        inner[CALLER] = outer[CALLER]
        return inner


class _Link:
    """The connection as a request of one message sees it: gone as soon as its client has said goodbye."""

    def __init__(self, request: web.Request) -> None:
        protocol = request.protocol
        self.ssl_context, self.peername, self.sockname = protocol.ssl_context, protocol.peername, protocol.sockname
        self._protocol = protocol
        self.left = False

    @property
    def transport(self) -> asyncio.Transport | None:
        """The socket's transport; None once the client has gone."""
        return None if self.left else self._protocol.transport


class _Messages(AbstractStreamWriter):
    """Where an answer's bytes go: each event's data into a message, comments nowhere, a plain body whole."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self._scanner: EventScanner | None = None
        self._plain = bytearray()
        self._last = b""

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """Note what kind of an answer comes."""
        if headers.get(hdrs.CONTENT_TYPE, "").startswith(EVENTS):
            self._scanner = EventScanner(MAX_ANSWER_BYTES)

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Send the events that `chunk` completes."""
        self.output_size += len(chunk)
        if self._scanner is None:
            self._plain += chunk
            return
        for data in self._scanner.feed(bytes(chunk)):
            await self._send(data)

    async def write_eof(self, chunk: bytes = b"") -> None:
        """Send the rest, and `[DONE]` where that was not said."""
        await self.write(chunk)
        if self._plain:
            await self._send(bytes(self._plain))
        if self._last != DONE:
            await self._send(DONE)

    async def _send(self, data: bytes) -> None:
        self._last = data
        await self._socket.send_frame(data, WSMsgType.TEXT)

    async def drain(self) -> None:
        """Messages are drained as they are sent."""

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        """Nothing is compressed."""

    def enable_chunking(self) -> None:
        """A message is no chunk."""
