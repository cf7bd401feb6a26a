"""The file underneath: how it is opened, set up and moved aside."""

# ruff: noqa: ASYNC240  # a test is alone in its loop and may look at its files there

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.store.db import Database, open_database
from proxy.store.faults import StoreError
from proxy.store.files import identity_of, move_aside, prepare
from proxy.store.pending import Batch, Change
from proxy.store.rows import SessionRow
from tests.store_help import count, key, row


def batch(*rows: SessionRow, wipe: bool = False) -> Batch:
    return Batch({each.key: Change(each, 0.0) for each in rows}, {}, wipe)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.sqlite3"


async def value_of(database: Database, pragma: str) -> object:
    return next(iter(await database.writer.execute_fetchall(f"PRAGMA {pragma}")))[0]


async def test_the_pragmas_are_those_of_the_design(path: Path) -> None:
    database = await open_database(path)
    wanted = {
        "journal_mode": "wal",
        "synchronous": 1,
        "busy_timeout": 5000,
        "journal_size_limit": 4 * 1024 * 1024,
        "secure_delete": 1,
    }
    assert {pragma: await value_of(database, pragma) for pragma in wanted} == wanted
    await database.close()
    assert os.listdir(path.parent) == [path.name]


async def test_a_batch_is_written_whole_or_not_at_all(path: Path) -> None:
    database = await open_database(path)
    bad = replace(row(2), key=replace(key(2), chat=b"short"))
    with pytest.raises(StoreError) as caught:
        await database.write(batch(row(1), bad))
    assert caught.value.kind == "row"
    assert count(path) == 0
    assert await database.write(batch(row(1))) == 0
    assert await database.write(batch(row(3), wipe=True)) == 1
    assert await database.load(key(3)) is not None and await database.load(key(1)) is None
    await database.close()


async def test_an_update_keeps_others_out_between_its_read_and_its_write(path: Path) -> None:
    one, two = await open_database(path), await open_database(path)

    async def count_up(database: Database) -> None:
        for _ in range(50):
            await database.update(key(1), lambda old: row(1) if old is None else replace(old, turns=old.turns + 1))

    await asyncio.gather(count_up(one), count_up(two))
    found = await one.load(key(1))
    assert found is not None and found.turns == 100
    await one.close()
    await two.close()


async def test_a_change_that_raises_leaves_the_row_and_the_connection_as_they_were(path: Path) -> None:
    database = await open_database(path)
    await database.write(batch(row(1)))

    def fail(old: SessionRow | None) -> SessionRow:
        raise LookupError

    with pytest.raises(LookupError):
        await database.update(key(1), fail)
    assert not database.writer.in_transaction
    found = await database.load(key(1))
    assert found is not None and found.turns == 1
    await database.close()


async def test_a_closed_database_says_so_in_our_words(path: Path) -> None:
    database = await open_database(path)
    await database.close()
    await database.close()
    with pytest.raises(StoreError) as caught:
        await database.load(key(1))
    assert caught.value.kind == "unusable"


async def test_rows_from_the_future_are_brought_back_at_opening(path: Path) -> None:
    database = await open_database(path)
    await database.write(batch(row(1, now=5000.0, ttl=60), row(2, now=100.0, ttl=60)))
    await database.close()
    database = await open_database(path, clock=lambda: 1000.0)
    found = await database.load(key(1))
    assert found is not None and (found.created, found.last_seen, found.expires) == (1000.0, 1000.0, 1060.0)
    assert dict(await database.known()) == {key(1): 1060.0, key(2): 160.0}
    assert [info.id for info in await database.infos(1000.0)] == [key(1).id]
    assert await database.delete_expired(1000.0) == 1
    await database.close()


async def test_a_file_is_known_by_its_inode_not_by_its_name(path: Path) -> None:
    database = await open_database(path)
    assert await database.in_place()
    path.rename(path.with_name("elsewhere"))
    assert not await database.in_place()
    path.touch()
    assert not await database.in_place()
    await database.close()


def test_only_the_file_that_was_found_damaged_is_moved(path: Path) -> None:
    """Two processes find the same damage: the second comes when the first has begun a fresh file already."""
    path.write_bytes(b"damaged")
    found = prepare(path)
    assert found.garbled and not found.empty
    aside = move_aside(path, found.identity, now=0.0)
    assert aside is not None and aside.read_bytes() == b"damaged"
    assert move_aside(path, found.identity, now=0.0) is None
    path.write_bytes(b"fresh")
    assert move_aside(path, found.identity, now=0.0) is None
    assert path.read_bytes() == b"fresh"
    path.unlink()
    assert identity_of(path) is None


def test_a_new_file_comes_to_its_place_whole(path: Path) -> None:
    """No process ever sees our new file with 0 bytes, and no draft is left."""
    made = prepare(path)
    assert not made.empty and not made.garbled and path.stat().st_size > 0
    assert prepare(path).identity == made.identity
    assert os.listdir(path.parent) == [path.name]
