"""Ends of an answer that vLLM did not bring to its own end."""

from contextlib import suppress

import aiohttp
import orjson

from proxy.core.reject import error_body
from proxy.upstream.client import UpstreamFailure

MAX_ANSWER_BYTES = 64 * 1024 * 1024
EVENTS = "text/event-stream"
# Kinds of failure that may mean that vLLM has gone or come back.
POKE = frozenset({"connect", "timeout", "cut", "status_5xx"})
DRAINED = UpstreamFailure("drained", 503, "The proxy is stopping and had to end this answer. Try again in a moment.")


def error_event(failure: UpstreamFailure) -> bytes:
    """Return the event that tells a client of a failure in the middle of its stream."""
    body = error_body(failure.message, kind="server_error", code=failure.status)
    return b"data: " + orjson.dumps(body) + b"\n\n"


def left_over(content: aiohttp.StreamReader) -> bytes:
    """Return what came before the connection broke and was not read yet; aiohttp raises first and would drop it."""
    with suppress(Exception):
        return content._read_nowait(-1)
    return b""
