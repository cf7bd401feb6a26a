"""What can go wrong with the database file: the one seam where errors of SQLite and of the file system are mapped."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

# What the proxy does next depends on the kind, so it is a closed set (it is also a metric's label):
# locked, full: try again with the same connection; unusable: open anew; damaged: move the file aside; refused: leave
# the file alone until a person has looked at it; row: drop this row, the file is well.
Kind = Literal["locked", "full", "unusable", "damaged", "refused", "row"]

# Primary result codes of SQLite (https://www.sqlite.org/rescode.html).  Those that are not here mean "unusable".
_KINDS: dict[int, Kind] = {
    sqlite3.SQLITE_BUSY: "locked",
    sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_CORRUPT: "damaged",
    sqlite3.SQLITE_NOTADB: "damaged",
    sqlite3.SQLITE_TOOBIG: "row",
    sqlite3.SQLITE_CONSTRAINT: "row",
    sqlite3.SQLITE_MISMATCH: "row",
}
_REASONS: dict[Kind, str] = {
    "locked": "another process holds a lock on the session database",
    "full": "no space is left for the session database",
    "unusable": "the session database cannot be read or written",
    "damaged": "the session database is damaged",
    "refused": "the session database is not ours to use",
    "row": "a session could not be stored",
}


class StoreError(Exception):
    """The database could not do what was asked.  `reason` is one plain sentence without a path or any user text."""

    def __init__(self, kind: Kind, reason: str | None = None) -> None:
        super().__init__(reason or _REASONS[kind])
        self.kind: Kind = kind
        self.reason = reason or _REASONS[kind]


def kind_of(error: sqlite3.Error) -> Kind:
    """Say what an error of SQLite means for us."""
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int):
        # The low byte is the primary code; an extended one (SQLITE_BUSY_SNAPSHOT) adds detail above it.
        return _KINDS.get(code & 0xFF, "unusable")
    return "row" if isinstance(error, (sqlite3.InterfaceError, sqlite3.DataError)) else "unusable"


@contextmanager
def mapped() -> Iterator[None]:
    """Turn what sqlite3, aiosqlite and the file system raise into a `StoreError`."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(kind_of(error)) from error
    except (UnicodeError, OverflowError) as error:
        # A value that SQLite has no form for: a lone surrogate, an integer above 63 bits.
        raise StoreError("row") from error
    except (OSError, ValueError) as error:
        # ValueError: aiosqlite says so when its connection is closed.
        raise StoreError("unusable") from error
