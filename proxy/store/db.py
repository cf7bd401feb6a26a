"""One SQLite file: a connection that writes and one that reads, opened, checked and migrated.

Nothing here holds a read transaction open: each read fetches all its rows and ends, so checkpoints are never kept from
finishing and the log stays small.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiosqlite

from proxy.store.faults import StoreError, mapped
from proxy.store.files import Standing, identity_of, move_aside, prepare
from proxy.store.migrations import check_version, folder, migrate, read_migrations
from proxy.store.pending import Batch
from proxy.store.rows import SessionInfo, SessionKey, SessionRow

log = logging.getLogger("proxy.store")

MEMORY = ":memory:"
# A chat request waits for its session's row; a lock that lasts longer than this costs it its memory, not its answer.
_READ_BUSY_SECONDS = 0.25
# Opening is tried again for this long: two processes that make one file at once meet locks that busy_timeout does not
# cover.
_OPEN_SECONDS = 2.0
# A log of at most 4 MiB is kept after a checkpoint, which comes each 1000 pages (4 MiB).
_WAL_KEEP_BYTES = 4 * 1024 * 1024

_COLUMNS = "tenant, chat, model, created, last_seen, expires, turns, cut, skeleton, state"
_WHERE_KEY = "WHERE tenant = ? AND chat = ? AND model = ?"
_SELECT = f"SELECT {_COLUMNS} FROM sessions {_WHERE_KEY}"
_DELETE = f"DELETE FROM sessions {_WHERE_KEY}"
_UPSERT = f"""
INSERT INTO sessions ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (tenant, chat, model) DO UPDATE SET created = excluded.created, last_seen = excluded.last_seen,
expires = excluded.expires, turns = excluded.turns, cut = excluded.cut, skeleton = excluded.skeleton,
state = excluded.state
"""
INFOS = """
SELECT tenant, chat, model, turns, created, last_seen, expires, length(skeleton) + length(state)
FROM sessions WHERE expires > ? ORDER BY last_seen DESC
"""
_UPSERT_META = "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
_DELETE_META = "DELETE FROM meta WHERE key = ?"


@dataclass(slots=True)
class Database:
    """An open file.  `damaged` tells that the one before it went aside, `empty` that it had 0 bytes before."""

    path: Path | None
    identity: tuple[int, int] | None
    writer: aiosqlite.Connection
    reader: aiosqlite.Connection
    damaged: bool = False
    empty: bool = False

    async def close(self) -> None:
        """Close both connections; the last one to close takes the log into the file."""
        for connection in {id(self.reader): self.reader, id(self.writer): self.writer}.values():
            # It cannot be closed any better, and what was committed is safe in the log.
            with suppress(StoreError), mapped():
                await connection.close()

    async def in_place(self) -> bool:
        """Say whether the open file still stands at its path: not after an operator, or another process, moved it."""
        return self.path is None or await asyncio.to_thread(identity_of, self.path) == self.identity

    async def known(self) -> list[tuple[SessionKey, float]]:
        """Return each stored key with its expiry, in wall seconds."""
        with mapped():
            rows = await self.reader.execute_fetchall("SELECT tenant, chat, model, expires FROM sessions")
        return [(SessionKey(bytes(row[0]), bytes(row[1]), str(row[2])), float(row[3])) for row in rows]

    async def load(self, key: SessionKey) -> SessionRow | None:
        """Read one row."""
        return await _select(self.reader, key)

    async def infos(self, now: float) -> list[SessionInfo]:
        """Describe every stored session that has not expired at wall time `now`."""
        with mapped():
            return [info_of(row, now) for row in await self.reader.execute_fetchall(INFOS, (now,))]

    async def get_meta(self, key: str) -> bytes | None:
        """Read one of the proxy's own values."""
        with mapped():
            rows = await self.reader.execute_fetchall("SELECT value FROM meta WHERE key = ?", (key,))
        return next((bytes(row[0]) for row in rows), None)

    async def write(self, batch: Batch) -> int:
        """Write a batch in one transaction; return how many sessions its wipe took."""
        async with self._transaction():
            wiped = await self._delete_all() if batch.wipe else 0
            await self._many(_DELETE, [_key_values(key) for key in batch.deletes()])
            await self._many(_UPSERT, [_row_values(row) for row in batch.puts()])
            await self._many(_UPSERT_META, [item for item in batch.meta.items() if item[1] is not None])
            await self._many(_DELETE_META, [(key,) for key, value in batch.meta.items() if value is None])
        if batch.wipe:
            await self._empty_log()
        return wiped

    async def delete_expired(self, before: float) -> int:
        """Delete the rows that expired before a wall time; return how many."""
        async with self._transaction():
            cursor = await self.writer.execute("DELETE FROM sessions WHERE expires < ?", (before,))
            return cursor.rowcount

    async def update(self, key: SessionKey, change: Callable[[SessionRow | None], SessionRow]) -> SessionRow:
        """Read a row and write what `change` makes of it under one lock: no other process writes in between."""
        async with self._transaction():
            row = change(await _select(self.writer, key))
            await self.writer.execute(_UPSERT, _row_values(row))
            return row

    async def clamp_future(self, now: float) -> int:
        """Bring rows whose last_seen lies after wall time `now` back to it; return how many there were."""
        with mapped():
            found = await self.writer.execute_fetchall("SELECT 1 FROM sessions WHERE last_seen > ? LIMIT 1", (now,))
        if not list(found):
            return 0
        sql = (
            "UPDATE sessions SET created = min(created, :now), last_seen = :now,"
            " expires = :now + max(expires - last_seen, 0) WHERE last_seen > :now"
        )
        async with self._transaction():
            cursor = await self.writer.execute(sql, {"now": now})
            return cursor.rowcount

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[None]:
        # IMMEDIATE takes the write lock first.  A transaction that reads and only then asks for it fails at once with
        # SQLITE_BUSY_SNAPSHOT when another process wrote in between, whatever busy_timeout says.
        with mapped():
            await self.writer.execute("BEGIN IMMEDIATE")
            try:
                yield
                await self.writer.execute("COMMIT")
            except BaseException:
                # SQLite rolls back by itself on a full disk; then there is nothing left to do here.
                await self.writer.rollback()
                raise

    async def _many(self, sql: str, rows: Sequence[tuple[object, ...]]) -> None:
        if rows:
            await self.writer.executemany(sql, rows)

    async def _delete_all(self) -> int:
        # Counted first: SQLite's truncate optimisation is not sure to report how many rows went.
        rows = await self.writer.execute_fetchall("SELECT count(*) FROM sessions")
        await self.writer.execute("DELETE FROM sessions")
        return int(next(iter(rows))[0])

    async def _empty_log(self) -> None:
        # What was cleared is not to live on in the log.  If a reader elsewhere keeps it, the next checkpoint does it.
        with suppress(StoreError), mapped():
            await self.writer.execute_fetchall("PRAGMA wal_checkpoint(TRUNCATE)")


async def open_database(
    path: Path | None,
    *,
    clock: Callable[[], float] = time.time,
    busy_seconds: float = 5.0,
    vfs: str | None = None,
) -> Database:
    """Open (or make) the database at `path`, None for one in memory, check it and bring it to our schema.

    A damaged file is moved aside and a fresh one begun.  `vfs` is the name of one of SQLite's file layers, for tests.
    Raises `StoreError`: nothing is open then, and a file that is not ours is as it was.
    """
    if path is None:
        return await _open(None, None, clock, busy_seconds, vfs)
    deadline = time.monotonic() + _OPEN_SECONDS
    pause, damaged = 0.02, False
    while True:
        standing = await asyncio.to_thread(prepare, path)
        try:
            database = await _open(path, standing, clock, busy_seconds, vfs)
        except StoreError as error:
            if error.kind == "damaged" and not damaged:
                damaged = True
                moved_to = await asyncio.to_thread(move_aside, path, standing.identity, now=clock())
                log.error("database_damaged", extra={"moved_to": moved_to.name if moved_to else "by another process"})
            elif error.kind != "locked" or time.monotonic() > deadline:
                raise
            await asyncio.sleep(pause)
            pause *= 2
        else:
            database.damaged = damaged
            return database


async def _open(
    path: Path | None, standing: Standing | None, clock: Callable[[], float], busy_seconds: float, vfs: str | None
) -> Database:
    if standing is not None and standing.garbled:
        raise StoreError("damaged")
    writer = await _connect(path, _READ_BUSY_SECONDS, vfs)
    reader = writer
    try:
        await _set_up(writer, in_file=standing is not None)
        if path is not None:
            reader = await _connect(path, _READ_BUSY_SECONDS, vfs)
        database = Database(path, standing.identity if standing is not None else None, writer, reader)
        if await database.clamp_future(clock()):
            log.warning("sessions_from_the_future", extra={"act": "their last use is taken to be now"})
        with mapped():
            await writer.execute(f"PRAGMA busy_timeout = {int(busy_seconds * 1000)}")
    except BaseException:
        await Database(None, None, writer, reader).close()
        raise
    database.empty = standing is not None and standing.empty
    return database


async def _connect(path: Path | None, busy_seconds: float, vfs: str | None) -> aiosqlite.Connection:
    # mode=rw: the file is there by now; if it went away in between, SQLite shall not make one with a mode of its own.
    layer = f"&vfs={vfs}" if vfs is not None else ""
    uri = MEMORY if path is None else f"file:{quote(os.fsencode(path))}?mode=rw{layer}"
    with mapped():
        return await aiosqlite.connect(uri, uri=True, isolation_level=None, timeout=busy_seconds)


async def _set_up(writer: aiosqlite.Connection, *, in_file: bool) -> None:
    with mapped():
        migrations = await asyncio.to_thread(lambda: read_migrations(folder()))
    # Before any pragma: the file of another program, or of a newer version, is not written to.
    await check_version(writer, migrations)
    with mapped():
        result = [row[0] for row in await writer.execute_fetchall("PRAGMA quick_check(1)")]
    if result != ["ok"]:
        raise StoreError("damaged")
    if in_file:
        await _set_journal(writer)
    with mapped():
        # Deleted text is overwritten (it is only there with store.text).
        await writer.execute_fetchall("PRAGMA secure_delete = ON")
    await migrate(writer, migrations)


async def _set_journal(writer: aiosqlite.Connection) -> None:
    mode = ""
    try:
        with mapped():
            mode = "".join(str(row[0]) for row in await writer.execute_fetchall("PRAGMA journal_mode = WAL"))
    except StoreError as error:
        if error.kind != "unusable":
            raise
    with mapped():
        if mode != "wal":
            # A network share, say: it has no shared memory between processes, which WAL's index needs.
            log.warning("wal_refused", extra={"act": "a rollback journal is used; keep the database on a local disk"})
            await writer.execute_fetchall("PRAGMA journal_mode = DELETE")
        # In WAL a power cut may cost the last batches, never the file; a rollback journal needs FULL for that promise.
        await writer.execute_fetchall(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
        await writer.execute_fetchall(f"PRAGMA journal_size_limit = {_WAL_KEEP_BYTES}")


async def _select(connection: aiosqlite.Connection, key: SessionKey) -> SessionRow | None:
    with mapped():
        rows: Iterable[aiosqlite.Row] = await connection.execute_fetchall(_SELECT, _key_values(key))
    return next((_row(key, row) for row in rows), None)


def _row(key: SessionKey, row: aiosqlite.Row) -> SessionRow:
    return SessionRow(key, row[3], row[4], row[5], row[6], row[7], bytes(row[8]), bytes(row[9]))


def info_of(row: Sequence[Any], now: float) -> SessionInfo:
    """Make a description of a row that `INFOS` found; `now` is wall seconds."""
    tenant, chat, model, turns, created, last_seen, expires, size = row
    left = max(float(expires) - now, 0.0)
    return SessionInfo(SessionKey(tenant, chat, model).id, model, turns, created, last_seen, left, size)


def _key_values(key: SessionKey) -> tuple[object, ...]:
    return key.tenant, key.chat, key.model


def _row_values(row: SessionRow) -> tuple[object, ...]:
    tail = (row.created, row.last_seen, row.expires, row.turns, row.cut, row.skeleton, row.state)
    return (*_key_values(row.key), *tail)
