"""Numbered SQL, each file applied once, together with its record, in one transaction."""

import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiosqlite

from proxy.store.faults import StoreError, mapped
from proxy.store.files import APPLICATION_ID

_NAME = re.compile(r"([0-9]{4})_[a-z0-9_]+\.sql")
_RECORD_TABLE = """
CREATE TABLE IF NOT EXISTS schema_migrations (
    number  INTEGER NOT NULL PRIMARY KEY,
    name    TEXT    NOT NULL,
    applied TEXT    NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now'))
)
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: its number, its name and its statements."""

    number: int
    name: str
    statements: tuple[str, ...]


def folder() -> Path:
    """Return where the SQL is: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).parent.parent
    packed = package / "migrations"
    return packed if packed.is_dir() else package.parent / "migrations"


def read_migrations(where: Path) -> tuple[Migration, ...]:
    """Read the migrations of a folder in order (blocking).

    Raises `ValueError` for a `.sql` name out of pattern, and for numbers that are not 1, 2, 3 and so on.
    """
    found: list[Migration] = []
    for path in sorted(where.glob("*.sql")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path.name}: a migration is named NNNN_words.sql")
        found.append(Migration(int(match[1]), path.name, tuple(split(path.read_text(encoding="utf-8")))))
    if not found or [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError("migrations are numbered 0001, 0002 and so on, without a gap")
    return tuple(found)


def split(sql: str) -> Iterator[str]:
    """Cut a script into statements, as SQLite itself sees their ends (strings, comments and triggers may hold a `;`).

    `executescript` would do it too, but it commits first, and a migration must not part from its record.
    """
    statement = ""
    for piece in re.split(r"(?<=;)", sql):
        statement += piece
        if sqlite3.complete_statement(statement):
            if statement.strip() != ";":
                yield statement.strip()
            statement = ""
    if any(line.strip() and not line.strip().startswith("--") for line in statement.splitlines()):
        raise ValueError("the last statement of a migration does not end")


async def schema_version(connection: aiosqlite.Connection) -> int:
    """Return the number of the newest applied migration, 0 for an empty file.  Writes nothing.

    Raises `StoreError` "refused" for the database of another program.
    """
    with mapped():
        tables = {str(row[0]) for row in await connection.execute_fetchall("SELECT name FROM sqlite_master")}
        if not tables:
            return 0
        mark = [int(row[0]) for row in await connection.execute_fetchall("PRAGMA application_id")]
        if "schema_migrations" not in tables or mark != [APPLICATION_ID]:
            raise StoreError("refused", "the file is the database of another program")
        newest = await connection.execute_fetchall("SELECT coalesce(max(number), 0) FROM schema_migrations")
        return int(next(iter(newest))[0])


async def check_version(connection: aiosqlite.Connection, migrations: Sequence[Migration]) -> int:
    """Return the file's schema version; raise `StoreError` "refused" if a newer prefix-proxy wrote it."""
    version = await schema_version(connection)
    if version > len(migrations):
        reason = f"the session database has schema {version} and this version of prefix-proxy knows {len(migrations)}"
        raise StoreError("refused", reason)
    return version


async def migrate(connection: aiosqlite.Connection, migrations: Sequence[Migration]) -> int:
    """Apply what is missing; return how many were applied.  Raises `StoreError`; then the file is as it was before.

    `connection` is in autocommit mode.
    """
    applied = 0
    while await check_version(connection, migrations) < len(migrations):
        applied += await _apply_next(connection, migrations)
    return applied


async def _apply_next(connection: aiosqlite.Connection, migrations: Sequence[Migration]) -> int:
    with mapped():
        await connection.execute("BEGIN IMMEDIATE")
        try:
            # Asked again under the lock: another process may have migrated in between.
            version = await check_version(connection, migrations)
            if version < len(migrations):
                migration = migrations[version]
                await connection.execute(_RECORD_TABLE)
                for statement in migration.statements:
                    await connection.execute(statement)
                record = "INSERT INTO schema_migrations (number, name) VALUES (?, ?)"
                await connection.execute(record, (migration.number, migration.name))
            await connection.execute("COMMIT")
        except BaseException:
            await connection.rollback()
            raise
        return int(version < len(migrations))
