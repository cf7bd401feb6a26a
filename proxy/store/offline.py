"""The database of a proxy that may not run, for the command line: nothing is made, moved aside or migrated here."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from proxy.store.db import INFOS, info_of
from proxy.store.faults import StoreError, mapped
from proxy.store.files import APPLICATION_ID
from proxy.store.migrations import folder, read_migrations
from proxy.store.rows import SessionInfo, SessionKey

_BUSY_SECONDS = 5.0


def list_sessions(path: Path, *, now: float) -> list[SessionInfo]:
    """Describe the sessions in a file, the one used last first; `expires_seconds` is 0 for expired ones.

    `now` is wall seconds.  Raises StoreError.
    """
    with _opened(path) as connection:
        return [info_of(row, now) for row in connection.execute(INFOS, (float("-inf"),))]


def clear_sessions(path: Path, *, now: float, id: str | None = None, everything: bool = False) -> int:
    """Delete one session, all, or (neither given) the expired ones from a file; return how many there were.

    Raises StoreError.  A proxy that runs on the file keeps what it has in memory, and stores it again when it is used.
    """
    with _opened(path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        keys = connection.execute("SELECT tenant, chat, model, expires FROM sessions").fetchall()
        gone = [key for *key, expires in keys if everything or _is_meant(key, expires, id, now)]
        connection.executemany("DELETE FROM sessions WHERE tenant = ? AND chat = ? AND model = ?", gone)
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return len(gone)


def _is_meant(key: list[object], expires: float, id: str | None, now: float) -> bool:
    if id is None:
        return expires <= now
    tenant, chat, model = key
    return isinstance(tenant, bytes) and isinstance(chat, bytes) and SessionKey(tenant, chat, str(model)).id == id


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():
        raise StoreError("unusable", "there is no session database at this path")
    with mapped():
        # mode=rw also to read: a reader that may not write can neither use nor clear away the log of a proxy that was
        # killed.
        uri = f"file:{quote(os.fsencode(path))}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS)) as connection:
            connection.execute("PRAGMA secure_delete = ON").fetchall()
            _check(connection)
            yield connection


def _check(connection: sqlite3.Connection) -> None:
    mark = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    if mark != APPLICATION_ID or "schema_migrations" not in tables:
        raise StoreError("refused", "the file is not a session database of prefix-proxy")
    version = connection.execute("SELECT max(number) FROM schema_migrations").fetchone()[0]
    if version != (known := len(read_migrations(folder()))):
        raise StoreError("refused", f"the file has schema {version} and this version of prefix-proxy knows {known}")
