"""The database read and cleared without a proxy: nothing is made, moved or migrated."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from proxy.store.faults import StoreError
from proxy.store.offline import clear_sessions, list_sessions
from proxy.store.sessions import open_store
from tests.store_help import count, key, plain, row


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    path = tmp_path / "a file?.sqlite3"
    async with open_store(path) as store:
        for number in range(3):
            store.put(row(number, now=time.time() - number * 1000, ttl=1500))
    return path


def test_the_list_shows_expired_ones_too_and_leaves_no_trace(path: Path) -> None:
    before = path.read_bytes()
    found = list_sessions(path, now=time.time())
    assert [info.id for info in found] == [key(0).id, key(1).id, key(2).id]
    assert found[0].expires_seconds > 1400 and found[2].expires_seconds == 0
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_expired_ones_or_one_or_all_are_cleared(path: Path) -> None:
    assert clear_sessions(path, now=time.time()) == 1
    assert clear_sessions(path, now=time.time(), id=key(0).id) == 1
    assert clear_sessions(path, now=time.time(), id=key(0).id) == 0
    assert clear_sessions(path, now=time.time(), everything=True) == 1
    assert count(path) == 0


async def test_it_works_beside_a_store_that_has_the_file_open(path: Path) -> None:
    async with open_store(path) as store:
        assert await asyncio.to_thread(clear_sessions, path, now=time.time(), everything=True) == 3
        store.put(row(9))
        await store.flush()
        assert store.degraded is None
        assert len(await asyncio.to_thread(list_sessions, path, now=time.time())) == 1


def test_what_is_not_our_database_is_left_alone(path: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("notes")
    (tmp_path / "empty").touch()
    with plain(tmp_path / "foreign") as other:
        other.execute("CREATE TABLE sessions (x)")
    with plain(path) as ours:
        ours.execute("INSERT INTO schema_migrations (number, name) VALUES (99, '0099_later.sql')")
    kinds = []
    for name in ("missing", "text", "empty", "foreign", path.name):
        with pytest.raises(StoreError) as caught:
            clear_sessions(tmp_path / name, now=0.0, everything=True)
        kinds.append(caught.value.kind)
    assert kinds == ["unusable", "damaged", "refused", "refused", "refused"]
    assert not (tmp_path / "missing").exists() and count(path) == 3
