"""Exchanges with vLLM: the pool, the one retry, and the seam where aiohttp's exceptions become ours."""

import asyncio
import io
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace
from yarl import URL

from proxy.config.groups import Upstream as Settings
from proxy.core.reject import Reject

# A connection that was closed while idle says so at once.  One that breaks later broke while vLLM was at work, and the
# same work is not asked for twice.
_STALE_SECONDS = 2.0
# aiohttp warns above this and wants a file, which it writes in parts.
_PLAIN_BODY_BYTES = 1024 * 1024
RETRY_AFTER_SECONDS = 5


@dataclass(eq=False)
class UpstreamFailure(Exception):
    """vLLM gave no usable answer: `kind` is one of proxy.metrics.UPSTREAM_ERRORS, `status` what the client is told."""

    kind: str
    status: int
    message: str

    def reject(self) -> Reject:
        """Return the answer to the client: never `invalid_request_error`, since clients do not repeat those."""
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if self.status == 503 else {}
        code = {503: "upstream_unavailable", 504: "upstream_timeout"}.get(self.status, self.status)
        return Reject(self.status, self.message, "server_error", code=code, headers=headers)


@dataclass(eq=False, slots=True)
class _Attempt:
    """What one attempt is told about its connection."""

    fresh: bool = False


# aiohttp tells the same by its tracing, which costs every exchange a tenth of its time.
_attempt: ContextVar[_Attempt] = ContextVar("attempt")


class _Tcp(aiohttp.TCPConnector):
    """Notes in `_attempt` when it makes a connection instead of taking an idle one."""

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  # the signature is aiohttp's
    ) -> ResponseHandler:
        _attempt.get().fresh = True
        return await super()._create_connection(req, traces, timeout)


class _Unix(aiohttp.UnixConnector):
    """The same over a socket file."""

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109  # the signature is aiohttp's
    ) -> ResponseHandler:
        _attempt.get().fresh = True
        return await super()._create_connection(req, traces, timeout)


class Upstream:
    """The connections to one vLLM.  Sessions are made at first use, within the loop that uses them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        unix = settings.url.startswith("unix:")
        self._socket_path = settings.url.removeprefix("unix:").removeprefix("//") if unix else None
        self._base = "http://localhost" if unix else settings.url.rstrip("/")
        self._pooled: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, path: str, *, headers: Mapping[str, str], body: bytes | None = None
    ) -> aiohttp.ClientResponse:
        """Send one request and return the answer when its headers are there; the caller reads, then closes it.

        There is no limit on the whole, only on silence.  A status is never a reason to try again.
        Raises UpstreamFailure.
        """
        loop = asyncio.get_running_loop()
        attempt, begun = _Attempt(), loop.time()
        _attempt.set(attempt)
        try:
            return await self._request(self._pool(), method, path, headers, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            if not _may_retry(error, reused=not attempt.fresh, seconds=loop.time() - begun):
                raise failure_of(error) from error
        try:
            return await self._request(self._unpooled(), method, path, headers, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise failure_of(error) from error

    async def fetch(
        self, method: str, path: str, *, body: bytes | None = None, seconds: float, limit_bytes: int
    ) -> tuple[int, str, bytes] | None:
        """Make one small exchange of the proxy's own: (status, content type, body), None without an answer in time."""
        headers = {"Accept-Encoding": "identity"}
        if self._settings.api_key is not None:
            headers["Authorization"] = f"Bearer {self._settings.api_key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with asyncio.timeout(seconds):
                answer = await self.send(method, path, headers=headers, body=body)
                return answer.status, answer.content_type, await read_whole(answer, limit_bytes)
        except (UpstreamFailure, TimeoutError):
            return None

    async def close(self) -> None:
        """Close all connections."""
        for session in (self._pooled, self._fresh):
            if session is not None:
                await session.close()

    async def _request(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> aiohttp.ClientResponse:
        data = io.BytesIO(body) if body is not None and len(body) > _PLAIN_BODY_BYTES else body
        return await session.request(
            method,
            URL(self._base + path, encoded=True),
            data=data,
            headers=headers,
            allow_redirects=False,
        )

    def _pool(self) -> aiohttp.ClientSession:
        if self._pooled is None:
            self._pooled = self._session(self._connector(pooled=True))
        return self._pooled

    def _unpooled(self) -> aiohttp.ClientSession:
        """Return the session of second attempts, whose connections are always new."""
        if self._fresh is None:
            self._fresh = self._session(self._connector(pooled=False))
        return self._fresh

    def _connector(self, *, pooled: bool) -> aiohttp.BaseConnector:
        # aiohttp takes either of the two, and tells "not given" from None.
        idle_seconds = self._settings.pool_idle_seconds
        idle: dict[str, Any] = {"keepalive_timeout": idle_seconds} if pooled else {"force_close": True}
        if self._socket_path is not None:
            return _Unix(self._socket_path, limit=0, **idle)
        return _Tcp(limit=0, **idle)

    def _session(self, connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
        settings = self._settings
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_seconds, sock_read=settings.idle_seconds or None
            ),
            trust_env=False,
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        )


async def read_whole(answer: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Return the body and end the answer; raise UpstreamFailure if it is cut, stalls or passes `limit_bytes`."""
    parts, size = [], 0
    try:
        if (answer.content_length or 0) > limit_bytes:
            raise too_large()
        while part := await answer.content.readany():
            size += len(part)
            if size > limit_bytes:
                raise too_large()
            parts.append(part)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise failure_of(error) from error
    finally:
        # After a complete body the connection is in the pool already; before that this hangs up, which stops vLLM.
        answer.close()
    return b"".join(parts)


def too_large() -> UpstreamFailure:
    """Return the failure of an answer that is larger than the proxy keeps."""
    return UpstreamFailure("other", 502, "The model server's answer is too large.")


def failure_of(error: BaseException) -> UpstreamFailure:
    """Translate what aiohttp raised; never its text, which may name hosts and paths."""
    if isinstance(error, TimeoutError):
        return UpstreamFailure("timeout", 504, "The model server did not answer in time.")
    if isinstance(error, aiohttp.ClientConnectorError):
        return UpstreamFailure("connect", 503, "The model server cannot be reached. Try again in a moment.")
    if isinstance(error, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)):
        return UpstreamFailure("cut", 502, "The connection to the model server broke before the answer was complete.")
    return UpstreamFailure("other", 502, "The model server sent an answer that is not valid HTTP.")


def _may_retry(error: BaseException, *, reused: bool, seconds: float) -> bool:
    if isinstance(error, TimeoutError):
        return False
    if isinstance(error, aiohttp.ClientConnectorError):
        return True
    if not reused or seconds > _STALE_SECONDS:
        return False
    if isinstance(error, aiohttp.ServerDisconnectedError):
        # Where part of the answer's head had come, aiohttp puts that in place of the text.
        return isinstance(error.message, str)
    return isinstance(error, aiohttp.ClientOSError)
