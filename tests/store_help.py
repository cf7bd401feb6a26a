"""What the tests of the store share: rows, and the file opened as any other program would."""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from proxy.store.sessions import SessionKey, SessionRow


def key(number: int = 1, *, model: str = "m") -> SessionKey:
    """Make a key that differs by number."""
    return SessionKey(b"t" * 16, number.to_bytes(16, "big"), model)


def row(
    number: int = 1, *, turns: int = 1, now: float | None = None, ttl: float = 1800, state: bytes = b"s"
) -> SessionRow:
    """Make a row that was last seen at wall time `now` (the real one by default)."""
    seen = time.time() if now is None else now
    return SessionRow(key(number), seen, seen, seen + ttl, turns, 0, b"skeleton", state)


@contextmanager
def plain(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file with sqlite3 alone, in autocommit mode."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
        yield connection


def count(path: Path) -> int:
    """Count the stored sessions."""
    with plain(path) as connection:
        found: int = connection.execute("SELECT count(*) FROM sessions").fetchone()[0]
    return found


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait for what comes true by itself; fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)
