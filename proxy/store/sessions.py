"""The store of sessions: reads at once, writes a little later, and goes on without its file when it must."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from proxy.aio import Tasks
from proxy.store.db import MEMORY, Database, open_database
from proxy.store.faults import Kind, StoreError
from proxy.store.keeper import FileKeeper
from proxy.store.pending import Pending
from proxy.store.rows import SessionInfo, SessionKey, SessionRow, clamped, remaining_seconds, storable

__all__ = ["MEMORY", "SessionInfo", "SessionKey", "SessionRow", "SessionStore", "open_store", "remaining_seconds"]

log = logging.getLogger("proxy.store")

# A transaction holds the lock that other processes wait for, and the log grows by what it writes.
_BATCH_BYTES = 1024 * 1024
_LEFT_BEHIND_SECONDS = 86_400.0

Clock = Callable[[], float]
T = TypeVar("T")


@asynccontextmanager
async def open_store(
    path: Path | str,
    *,
    write_delay_seconds: float = 0.5,
    retry_seconds: float = 3.0,
    clock: Clock = time.time,
    monotonic: Clock = time.monotonic,
    on_failure: Callable[[Kind], None] = lambda kind: None,
    busy_seconds: float = 5.0,
    vfs: str | None = None,
) -> AsyncIterator["SessionStore"]:
    """Open the store for the length of a block; leaving it writes what waits.  `path` may be ":memory:".

    Never raises because of the file: then `degraded` says why and the file is tried again each `retry_seconds`.
    `on_failure` is called with the kind of each failure, and must not block.  A write waits `busy_seconds` for the lock
    of another process.
    """
    where = None if str(path) == MEMORY else Path(path)
    opener = partial(open_database, where, clock=clock, busy_seconds=busy_seconds, vfs=vfs)
    store = SessionStore(opener, write_delay_seconds, retry_seconds, clock, monotonic, on_failure)
    try:
        await store.start()
        yield store
    finally:
        await store.close()


class SessionStore:
    """Sessions on disk.  All methods are for the one event loop that opened it; make it with `open_store`."""

    def __init__(
        self,
        opener: Callable[[], Awaitable[Database]],
        write_delay_seconds: float,
        retry_seconds: float,
        clock: Clock,
        monotonic: Clock,
        on_failure: Callable[[Kind], None],
    ) -> None:
        self._file = FileKeeper(opener, on_failure=on_failure, on_open=self._opened)
        self._write_delay_seconds, self._retry_seconds = write_delay_seconds, retry_seconds
        self._clock, self._monotonic = clock, monotonic
        self._pending = Pending()
        # When each session ends, by the monotonic clock: a wall clock that jumps ends none and keeps none alive.
        self._deadlines: dict[SessionKey, float] = {}
        self._tasks = Tasks()
        self._writing = asyncio.Lock()
        self._work, self._stopping = asyncio.Event(), asyncio.Event()

    async def start(self) -> None:
        """Open the file, or note why not, and begin to write what is put."""
        await self.flush()
        if self._file.degraded is not None:
            self._work.set()
        self._tasks.spawn(self._write_later(), name="store-writer")

    async def close(self) -> None:
        """Write what waits and close the file."""
        self._stopping.set()
        self._work.set()
        await self.flush()
        async with self._writing:
            if self._pending:
                log.error("changes_lost", extra={"count": len(self._pending)})
            await self._file.close()
            self._file.refused = True  # A request that ends later must not open it again.
        await self._tasks.close()

    @property
    def degraded(self) -> str | None:
        """None, or one sentence that says why nothing is written now, or that a damaged file was replaced at the start.

        The latter stays until the next start although writing works: sessions were lost, and a person should look why.
        """
        return self._file.degraded or self._file.notice

    @property
    def writing(self) -> bool:
        """Whether what is put reaches the disk."""
        return self._file.degraded is None

    @property
    def failures(self) -> int:
        """How often reading, writing or opening failed, or a row was dropped."""
        return self._file.failures

    # What may be asked at any time; none of these waits.

    def keys(self) -> dict[SessionKey, float]:
        """Return what this process knows to be stored, or about to be, each with its remaining seconds (0 or more)."""
        now = self._monotonic()
        return {key: max(deadline - now, 0.0) for key, deadline in self._deadlines.items()}

    def holds(self, key: SessionKey) -> bool:
        """Say whether `load` may find this key: a new chat need not ask the disk."""
        return key in self._deadlines

    def put(self, row: SessionRow) -> None:
        """Store a row soon.  A row that the schema cannot take is dropped and counted."""
        if not storable(row):
            self._file.failed("row")
            return
        now = self._monotonic()
        self._deadlines[row.key] = now + row.ttl_seconds
        self._queue(row.key, row, now)

    def delete(self, key: SessionKey) -> None:
        """Delete a row soon."""
        self._deadlines.pop(key, None)
        self._queue(key, None, self._monotonic())

    def put_meta(self, key: str, value: bytes | None) -> None:
        """Store one of the proxy's own values soon; None deletes it."""
        if not self._file.refused:
            self._pending.set_meta(key, value)
            self._work.set()

    @property
    def lag_seconds(self) -> float:
        """The age of the oldest change that is not on disk, in seconds; 0 when all are."""
        oldest = self._pending.oldest()
        return 0.0 if oldest is None else max(self._monotonic() - oldest, 0.0)

    def _queue(self, key: SessionKey, row: SessionRow | None, now: float) -> None:
        if self._file.refused:
            return  # Memory only until a restart: nothing would ever take it out of the queue.
        self._count_dropped(self._pending.add(key, row, now))
        self._work.set()

    async def load(self, key: SessionKey) -> SessionRow | None:
        """Return the newest row of `key`, with no time in the future, None if unknown, expired or not to be had."""
        queued, row = self._pending.find(key)
        if not queued:
            row = await self._read(lambda db: db.load(key))
        if row is None:
            return None
        row = clamped(row, self._clock())
        # What this process has seen of a session it dates by its own clock; the row's times are for a restart.
        left = row.expires - self._clock()
        if (deadline := self._deadlines.get(key)) is not None and abs(deadline - self._monotonic() - left) > 1:
            left = deadline - self._monotonic()
            row = replace(row, expires=self._clock() + left)
        return row if left > 0 else None

    async def infos(self) -> list[SessionInfo]:
        """Describe what is stored and has not expired, newest first; [] when it cannot be read."""
        await self.flush()
        return await self._read(lambda db: db.infos(self._clock())) or []

    async def get_meta(self, key: str) -> bytes | None:
        """Return one of the proxy's own values, or None."""
        queued, value = self._pending.find_meta(key)
        return value if queued else await self._read(lambda db: db.get_meta(key))

    async def _read(self, ask: Callable[[Database], Awaitable[T]]) -> T | None:
        answer = await self._file.read(ask)
        if self._file.doubted:
            self._work.set()
        return answer

    # Writing and waiting for it.

    async def flush(self) -> None:
        """Return when all that was put is on disk, or could not be written and was counted."""
        await self._to_the_end(self._write_now(), name="store-write")

    async def clear(
        self, *, keys: Iterable[SessionKey] | None = None, everything: bool = False, expired_before: float | None = None
    ) -> int:
        """Delete the rows of `keys`, or all, or those expired before a wall time; return how many there were.

        Without a usable file they are forgotten at once and wiped when it is back.
        """
        # Decided before anything is awaited: what is put from now on stays.
        chosen = frozenset(self._deadlines if everything else keys or ())
        known = len(chosen & self._deadlines.keys())
        if everything:
            self._deadlines.clear()
            self._pending.wipe(self._monotonic())
        for key in () if everything else chosen:
            self.delete(key)
        return await self._to_the_end(self._clear(known, expired_before), name="store-clear")

    async def sweep(self) -> int:
        """Delete what this process knows to be expired, by its monotonic clock; return how many rows went.

        Rows that another process left behind go by the wall clock, a day late so that a clock that jumped takes none.
        """
        now = self._monotonic()
        expired = [key for key, deadline in self._deadlines.items() if deadline <= now]
        return await self.clear(keys=expired, expired_before=self._clock() - _LEFT_BEHIND_SECONDS)

    async def update(self, key: SessionKey, change: Callable[[SessionRow | None], SessionRow]) -> SessionRow | None:
        """Read a row and write what `change` makes of it, with no write of another process in between.

        Returns what was written, or None if that failed (it is counted).
        """
        return await self._to_the_end(self._update(key, change), name="store-update")

    async def _to_the_end(self, work: Coroutine[object, object, T], *, name: str) -> T:
        # A caller that is cancelled (its client hung up) must not leave a transaction open behind it.
        return cast(T, await asyncio.shield(self._tasks.spawn(work, name=name)))

    async def _write_later(self) -> None:
        while not self._stopping.is_set():
            await self._work.wait()
            pause = self._write_delay_seconds if self._file.degraded is None else self._retry_seconds
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
                    return
            self._work.clear()
            await self.flush()
            if self._file.degraded is not None and not self._file.refused:
                self._work.set()

    async def _write_now(self) -> None:
        async with self._writing:
            await self._write_waiting()

    async def _clear(self, known: int, expired_before: float | None) -> int:
        async with self._writing:
            wiped = await self._write_waiting()
            # The file may hold rows of another process, the queue some that were not written yet.
            count = max(wiped or 0, known)
            if wiped is not None and expired_before is not None and (database := await self._file.ready()) is not None:
                count += await self._file.attempt(database.delete_expired(expired_before)) or 0
            return count

    async def _update(self, key: SessionKey, change: Callable[[SessionRow | None], SessionRow]) -> SessionRow | None:
        async with self._writing:
            if await self._write_waiting() is None or (database := await self._file.ready()) is None:
                return None
            row = await self._file.attempt(database.update(key, change))
            if row is not None:
                self._deadlines[key] = self._monotonic() + row.ttl_seconds
            return row

    async def _write_waiting(self) -> int | None:
        """Write all that waits, with `_writing` held; return how many rows a wipe took, None if not all is written."""
        if (database := await self._file.ready()) is None:
            if self._file.refused:
                self._pending = Pending()
            return None
        wiped = 0
        while self._pending:
            batch = self._pending.take(_BATCH_BYTES)
            try:
                wiped += await database.write(batch)
            except StoreError as error:
                self._file.down(error)
                # A batch that the schema refuses would be refused for ever; nothing that `put` lets in should be.
                if error.kind != "row":
                    self._count_dropped(self._pending.put_back())
                    return None
            self._pending.done()
        self._file.recovered()
        return wiped

    def _opened(self, known: list[tuple[SessionKey, float]]) -> None:
        wall, now = self._clock(), self._monotonic()
        for key, expires in known:
            self._deadlines.setdefault(key, now + expires - wall)

    def _count_dropped(self, count: int) -> None:
        for _ in range(count):
            self._file.failed("full")
