"""What only a socket shows: how long vLLM keeps an idle connection, and by which addresses it is reached."""

import asyncio
import socket
import ssl
from contextlib import suppress

from yarl import URL

_REACH_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_NOWHERE = ("192.0.2.1", 9)  # of RFC 5737: nothing is sent, the system only chooses the address it would send from
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


async def idle_seconds(url: str, *, watch_seconds: float) -> float | None:
    """Return after how many seconds of silence a kept connection is closed; None if not within `watch_seconds`.

    Raises OSError, TimeoutError.
    """
    async with asyncio.timeout(_ANSWER_SECONDS):
        reader, writer = await _connect(url)
    loop = asyncio.get_running_loop()
    try:
        host = URL(url).host or "localhost"
        writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: keep-alive\r\n\r\n".encode())
        async with asyncio.timeout(_ANSWER_SECONDS):
            await reader.readuntil(b"\r\n\r\n")
        begun = loop.time()
        with suppress(TimeoutError):
            async with asyncio.timeout(watch_seconds):
                while await reader.read(65536):
                    pass
                return loop.time() - begun
        return None
    except asyncio.IncompleteReadError:
        return 0.0
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if url.startswith("unix:"):
        return await asyncio.open_unix_connection(url.removeprefix("unix:").removeprefix("//"))
    where = URL(url)
    tls = ssl.create_default_context() if where.scheme == "https" else None
    return await asyncio.open_connection(where.host, where.port, ssl=tls)


async def is_beyond_loopback(url: str) -> bool | None:
    """Say whether a server on loopback is reached by this machine's other address too; None if that cannot be told."""
    if url.startswith("unix:"):
        return False
    where = URL(url)
    if where.host not in _LOOPBACK:
        return None
    own = await asyncio.to_thread(own_address, *_NOWHERE)
    if own is None or own.startswith("127."):
        return None
    try:
        async with asyncio.timeout(_REACH_SECONDS):
            _, writer = await asyncio.open_connection(own, where.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def own_address(host: str, port: int) -> str | None:
    """Return the address of this machine that `host` would see; nothing is sent to find out.  It may look up a name."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
    return None
