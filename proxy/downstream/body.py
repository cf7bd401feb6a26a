"""Reading a request's body: bounded in bytes (as inflated) and in time."""

import asyncio
import zlib

from aiohttp import ClientError, web

from proxy.core.reject import Reject

# One step of inflating: what a body may pass its limit by before that is noticed.
_STEP_BYTES = 256 * 1024
# Empty members pass no limit on what comes out, and each costs time.
_MOST_MEMBERS = 64
_IDENTITY = ("", "identity")


async def read_body(request: web.Request, limit_bytes: int, *, seconds: float = 60.0) -> bytes:
    """Return the body, inflated if it came as gzip or deflate.

    `limit_bytes` bounds what is kept, also while inflating (0: no limit, only by an explicit setting); `seconds` bounds
    the whole reading.  The server must not inflate by itself: `proxy.app` turns that off.
    Raises Reject: 413 over the limit, 415 for another coding, 408 if it takes too long, 400 if the coding is broken,
    or if a transfer coding other than chunked is named.
    """
    if ",".join(request.headers.getall("Transfer-Encoding", ())).strip().lower() not in ("", "chunked"):
        # What a list of codings means is where parsers disagree, and where requests are smuggled.
        message = "This transfer coding is not supported."
        raise Reject(400, message, code="invalid_body", headers={"Connection": "close"})
    coding = ",".join(request.headers.getall("Content-Encoding", ())).strip().lower()
    if coding not in (*_IDENTITY, "gzip", "x-gzip", "deflate"):
        # Brotli and zstd would each need a library and a bound of its own; no client of vLLM sends them.
        message = "This content coding is not supported. Send the body as it is, or as gzip or deflate."
        raise Reject(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "gzip, deflate"})
    if limit_bytes and (request.content_length or 0) > limit_bytes:
        raise too_large(limit_bytes)
    whole = request.content.is_eof() and request.content.exception() is None
    if coding in _IDENTITY and whole:  # most bodies came with their head: no clock is needed
        held = request.content.read_nowait()
        if limit_bytes and len(held) > limit_bytes:
            raise too_large(limit_bytes)
        return held
    sink = _Plain(limit_bytes) if coding in _IDENTITY else _Inflating(limit_bytes, coding)
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.content.iter_any():
                sink.feed(chunk)
    except TimeoutError:
        message = f"The request body did not arrive within {seconds:g} seconds."
        raise Reject(408, message, code="request_timeout", headers={"Connection": "close"}) from None
    except (web.RequestPayloadError, ClientError):
        raise Reject(400, "The request body could not be read.", code="invalid_body") from None
    return sink.close()


def too_large(limit_bytes: int) -> Reject:
    """Return the refusal of a body above `limit_bytes`.  The rest of it is not read, so the connection ends here."""
    message = f"The request body is larger than the {limit_bytes} bytes that are allowed."
    return Reject(413, message, code="request_too_large", headers={"Connection": "close"})


class _Plain:
    """Collects a body up to its limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        # Not a list of chunks: a client that sends single bytes would make each cost forty.
        self._held = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Keep `chunk`; raises Reject 413 as soon as the limit is passed."""
        self._held += chunk
        if self._limit_bytes and len(self._held) > self._limit_bytes:
            self._held.clear()
            raise too_large(self._limit_bytes)

    def close(self) -> bytes:
        """Return the whole body."""
        return bytes(self._held)


class _Inflating(_Plain):
    """Collects a gzip or deflate body: inflated in small steps, so that a bomb is noticed a step after the limit."""

    def __init__(self, limit_bytes: int, coding: str) -> None:
        super().__init__(limit_bytes)
        self._deflate = coding == "deflate"
        self._inflater: zlib._Decompress | None = None if self._deflate else zlib.decompressobj(wbits=31)
        self._members = 1

    def feed(self, chunk: bytes) -> None:
        """Inflate `chunk`; raises Reject 413 over the limit, 400 if it is not what the header says."""
        if not chunk:
            return
        if self._inflater is None:
            # "deflate" means zlib's format, but some clients send the bare stream (RFC 9110, 8.4.1.2).
            self._inflater = zlib.decompressobj(wbits=15 if chunk[0] & 0x0F == 8 else -15)
        try:
            while chunk:
                super().feed(self._inflater.decompress(chunk, _STEP_BYTES))
                chunk = self._inflater.unconsumed_tail
                if self._inflater.eof:
                    chunk = self._next_member()
        except zlib.error:
            raise _broken() from None

    def _next_member(self) -> bytes:
        rest = self._inflater.unused_data if self._inflater else b""
        if rest and not self._deflate:
            # A gzip body may consist of several members (RFC 1952, 2.2).
            self._members += 1
            self._inflater = zlib.decompressobj(wbits=31)
        if rest and (self._deflate or self._members > _MOST_MEMBERS):
            raise _broken()
        return rest

    def close(self) -> bytes:
        """Return the whole body; raises Reject 400 if the stream is cut."""
        if self._inflater is None or not self._inflater.eof:
            raise _broken()
        return super().close()


def _broken() -> Reject:
    return Reject(400, "The request body is not in the content coding that its header names.", code="invalid_body")
