"""Numbered SQL: found in the wheel and in a checkout, applied once, whole or not at all."""

# a test is alone in its loop and may look at its files there

import asyncio
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiosqlite
import pytest

from proxy.store.faults import StoreError
from proxy.store.files import APPLICATION_ID
from proxy.store.migrations import Migration, folder, migrate, read_migrations, schema_version, split
from tests.store_help import plain

OURS = read_migrations(folder())


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[aiosqlite.Connection]:
    async with aiosqlite.connect(path, isolation_level=None, timeout=5) as connection:
        yield connection


def migration(number: int, *statements: str) -> Migration:
    return Migration(number, f"{number:04}_test.sql", statements)


async def test_an_empty_file_gets_the_whole_schema_and_a_record_of_each_file(tmp_path: Path) -> None:
    async with connected(tmp_path / "db") as connection:
        assert await migrate(connection, OURS) == len(OURS)
        assert await migrate(connection, OURS) == 0
        assert await schema_version(connection) == len(OURS)
    with plain(tmp_path / "db") as again:
        recorded = again.execute("SELECT number, name FROM schema_migrations ORDER BY number").fetchall()
        assert recorded == [(each.number, each.name) for each in OURS]
        assert again.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert again.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_a_migration_that_fails_half_way_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    bad = migration(len(OURS) + 1, "CREATE TABLE half (x)", "CREATE TABLE sessions (twice)")
    async with connected(tmp_path / "db") as connection:
        await migrate(connection, OURS)
        with pytest.raises(StoreError):
            await migrate(connection, (*OURS, bad))
        assert await schema_version(connection) == len(OURS)
        assert not connection.in_transaction
    with plain(tmp_path / "db") as again:
        assert again.execute("SELECT count(*) FROM sqlite_master WHERE name = 'half'").fetchone() == (0,)


async def test_a_failed_first_migration_leaves_no_table_of_records(tmp_path: Path) -> None:
    async with connected(tmp_path / "db") as connection:
        with pytest.raises(StoreError):
            await migrate(connection, (migration(1, "CREATE TABLE a (x)", "NONSENSE"),))
        assert await schema_version(connection) == 0


async def test_a_later_migration_is_applied_to_a_file_that_holds_rows(tmp_path: Path) -> None:
    later = migration(len(OURS) + 1, "ALTER TABLE meta ADD COLUMN note TEXT NOT NULL DEFAULT 'old'")
    async with connected(tmp_path / "db") as connection:
        await migrate(connection, OURS)
        await connection.execute("INSERT INTO meta (key, value) VALUES ('k', x'01')")
        assert await migrate(connection, (*OURS, later)) == 1
    with plain(tmp_path / "db") as again:
        assert again.execute("SELECT key, note FROM meta").fetchall() == [("k", "old")]


async def test_two_that_migrate_at_once_apply_each_file_once(tmp_path: Path) -> None:
    many = (*OURS, *(migration(n, f"CREATE TABLE t{n} (x)") for n in range(len(OURS) + 1, len(OURS) + 9)))
    async with connected(tmp_path / "db") as one, connected(tmp_path / "db") as two:
        applied = await asyncio.gather(migrate(one, many), migrate(two, many))
        assert sum(applied) == len(many)
        assert await schema_version(one) == await schema_version(two) == len(many)


async def test_a_newer_file_and_a_foreign_one_are_refused(tmp_path: Path) -> None:
    async with connected(tmp_path / "db") as connection:
        await migrate(connection, (*OURS, migration(len(OURS) + 1, "CREATE TABLE later (x)")))
        with pytest.raises(StoreError) as caught:
            await migrate(connection, OURS)
        assert caught.value.kind == "refused" and str(len(OURS) + 1) in caught.value.reason
    async with connected(tmp_path / "other") as connection:
        await connection.execute("CREATE TABLE schema_migrations (number)")
        with pytest.raises(StoreError) as caught:
            await migrate(connection, OURS)
        assert caught.value.kind == "refused"


def test_statements_end_where_sqlite_says_so() -> None:
    script = """
    -- a comment; with a semicolon
    CREATE TABLE a (x TEXT DEFAULT ';');
    CREATE TRIGGER t AFTER INSERT ON a BEGIN DELETE FROM a; SELECT 1; END;
    ;
    INSERT INTO a VALUES ('--;');
    -- the end
    """
    found = list(split(script))
    assert [statement.split()[-1] for statement in found] == ["';');", "END;", "('--;');"]
    with pytest.raises(ValueError, match="does not end"):
        list(split("CREATE TABLE a (x)"))


@pytest.mark.parametrize(
    "names",
    [[], ["0002_b.sql"], ["0001_a.sql", "0003_c.sql"], ["0001_a.sql", "0001_b.sql"], ["1_a.sql"], ["0001 a.sql"]],
)
def test_a_folder_with_a_gap_or_an_odd_name_is_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("SELECT 1;")
    with pytest.raises(ValueError, match="migration"):
        read_migrations(tmp_path)


def test_the_built_wheel_holds_the_sql_and_finds_it(tmp_path: Path) -> None:
    """Only the wheel's own files are on the path, so the checkout's folder cannot stand in."""
    pytest.importorskip("hatchling", reason="the wheel is built by CI, which has hatchling")
    repository = Path(__file__).parent.parent
    if not (repository / "README.md").exists():
        pytest.skip("the wheel needs the README")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=repository, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
    ask = "from proxy.store.migrations import *; print(folder(), len(read_migrations(folder())))"
    told = subprocess.run(
        [sys.executable, "-c", ask], cwd=tmp_path / "installed", check=True, capture_output=True, text=True
    ).stdout
    assert told.split() == [str(tmp_path / "installed" / "proxy" / "migrations"), str(len(OURS))]


def test_the_readme_names_every_migration() -> None:
    readme = (Path(__file__).parent.parent / "migrations" / "README.md").read_text(encoding="utf-8")
    assert [each.name for each in OURS if each.name not in readme] == []
