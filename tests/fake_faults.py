"""Requests as the fake vLLM saw them, and answers that are written byte for byte or broken off."""

import asyncio
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from aiohttp import web
from multidict import CIMultiDictProxy

from tests.fake_replies import Raw


@dataclass
class Seen:
    """One request as it arrived, and how it went.  Times are the event loop's, in seconds."""

    method: str
    path: str
    headers: CIMultiDictProxy[str]
    raw: bytes
    connection: int
    on_connection: int  # 1 for the first request of a connection
    arrived_at: float
    body: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""
    tokens: Sequence[int] = ()
    hit: int = 0
    generated: int = 0  # pieces written
    ended_at: float | None = None
    aborted_at: float | None = None  # the client's connection closed before the answer was complete
    broke_off: bool = False  # the fake itself closed the connection, as it was told to
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # ended or aborted

    @property
    def n(self) -> int:
        """The number of prompt tokens."""
        return len(self.tokens)


SEEN = web.RequestKey("seen", Seen)


async def write_raw(request: web.Request, raw: Raw) -> web.StreamResponse:
    """Write `raw` as the answer to `request`."""
    if raw.before_headers is not None:
        await raw.before_headers.wait()
    response = web.StreamResponse(status=raw.status, headers=raw.headers)
    written = sum(len(piece) for piece in raw.body if isinstance(piece, bytes))
    if raw.framing == "chunked":
        response.enable_chunked_encoding()
    else:
        response.content_length = written if raw.content_length is None else raw.content_length
    await response.prepare(request)
    for piece in raw.body:
        if isinstance(piece, asyncio.Event):
            await piece.wait()
        elif isinstance(piece, bytes):
            await response.write(piece)
            request[SEEN].generated += 1
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(piece)
    if raw.end != "clean":
        break_off(request, raw.end)
        await forever()
    await response.write_eof()
    return response


def break_off(request: web.Request, end: str) -> None:
    """Close the connection of `request` in mid-answer: "cut" with a FIN, "rst" with a reset, "hang" not at all."""
    transport = request.transport
    if transport is None or end == "hang":
        return
    request[SEEN].broke_off = True
    if end == "rst":
        sock = transport.get_extra_info("socket")
        # The linger time of 0 makes the kernel send a reset instead of a FIN.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    else:
        transport.close()


async def forever() -> NoReturn:
    """Wait until the end of the connection cancels the handler."""
    await asyncio.Event().wait()
    raise AssertionError("nothing sets this event")
