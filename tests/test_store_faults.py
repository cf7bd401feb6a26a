"""The store on a bad day: files that are not what they should be, full disks, locks, two processes, kill -9."""

# ruff: noqa: ASYNC240  # a test is alone in its loop and may look at its files there

import asyncio
import os
import random
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proxy.store.faults import StoreError, kind_of, mapped
from proxy.store.migrations import folder, read_migrations
from proxy.store.sessions import SessionStore, open_store
from tests.store_help import count, key, plain, row, until
from tests.store_worker import ROUNDS, is_whole

REPOSITORY = Path(__file__).parent.parent
KNOWN = len(read_migrations(folder()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "sessions.sqlite3"


async def fill(path: Path, rows: int = 40) -> None:
    async with open_store(path) as store:
        for number in range(rows):
            store.put(row(number, state=b"z" * 4000))


async def serves_without_disk(store: SessionStore) -> None:
    """Everything that a request does with the store works and says nothing but "not known"."""
    store.put(row(1))
    store.delete(key(2))
    store.put_meta("a", b"b")
    await store.flush()
    assert await store.load(key(99)) is None
    assert await store.infos() == []
    assert await store.clear(keys=[key(3)]) == 0


def random_bytes(path: Path) -> None:
    path.write_bytes(random.Random(5).randbytes(4096))


def half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def text(path: Path) -> None:
    path.write_text("shopping list")


def damaged_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:8192] = random.Random(7).randbytes(4096)
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [random_bytes, half, text, damaged_page])
async def test_a_damaged_file_is_kept_aside_and_a_fresh_one_begun(path: Path, harm: Callable[[Path], None]) -> None:
    """Case SE-05: nothing raises, a person is told, and what was there is not deleted."""
    await fill(path)
    harm(path)
    harmed = path.read_bytes()
    kinds: list[str] = []
    async with open_store(path, on_failure=kinds.append) as store:
        assert store.degraded is not None and "damaged" in store.degraded
        assert kinds == ["damaged"] and store.failures == 1
        assert store.writing
        store.put(row(7))
        await store.flush()
    (aside,) = path.parent.glob("sessions.sqlite3.corrupt-*")
    assert aside.read_bytes() == harmed
    assert count(path) == 1
    async with open_store(path) as store:
        assert store.degraded is None


async def test_a_log_goes_aside_with_its_damaged_file(path: Path) -> None:
    await fill(path)
    random_bytes(path)
    path.with_name(path.name + "-wal").write_bytes(b"log")
    async with open_store(path):
        pass
    names = sorted(found.name.partition(".corrupt-")[2].rpartition("-")[2] for found in path.parent.glob("*.corrupt-*"))
    assert "wal" in names and len(names) == 2


async def test_a_second_damage_in_the_same_second_overwrites_nothing(path: Path) -> None:
    for _ in range(2):
        path.parent.mkdir(exist_ok=True)
        random_bytes(path)
        async with open_store(path, clock=lambda: 1_000_000.0):
            pass
    assert sorted(found.name for found in path.parent.glob("*.corrupt-*")) == [
        "sessions.sqlite3.corrupt-19700112T134640Z",
        "sessions.sqlite3.corrupt-19700112T134640Z-2",
    ]


async def test_a_file_of_no_bytes_is_used_and_a_person_is_told(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    async with open_store(path) as store:
        assert store.degraded is not None and "empty" in store.degraded and store.failures == 1
        store.put(row(1))
    assert count(path) == 1


async def test_a_file_that_is_damaged_while_it_is_open_is_replaced(path: Path) -> None:
    await fill(path)
    async with open_store(path, write_delay_seconds=0, retry_seconds=0.02) as store:
        with path.open("r+b") as file:
            file.write(os.urandom(path.stat().st_size))
        assert await store.load(key(33)) is None
        await until(lambda: bool(list(path.parent.glob("*.corrupt-*"))) and store.writing)
        store.put(row(2))
        await store.flush()
        assert store.failures and store.degraded is not None
    assert count(path) == 1


async def test_a_file_that_is_taken_away_while_it_is_open_is_made_anew(path: Path) -> None:
    async with open_store(path) as store:
        store.put(row(1))
        await store.flush()
        shutil.move(path, path.with_name("moved"))
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink()
        store.put(row(2))
        await store.flush()
        assert store.writing
    assert count(path) == 1


async def test_a_folder_at_the_path_is_served_around_and_recovered_from(path: Path) -> None:
    path.mkdir(parents=True)
    async with open_store(path, retry_seconds=0.02) as store:
        assert store.degraded == "the path of the session database is a folder"
        await serves_without_disk(store)
        failures = store.failures
        path.rmdir()
        await until(lambda: store.writing)
        assert failures >= 1 and await store.load(key(1)) is not None
        await store.flush()
    assert count(path) == 1


async def test_a_read_only_file_is_left_alone_also_by_root(path: Path) -> None:
    await fill(path)
    before = path.read_bytes()
    path.chmod(0o444)
    async with open_store(path, retry_seconds=0.02) as store:
        assert store.degraded == "the session database is read-only"
        await serves_without_disk(store)
        assert path.read_bytes() == before and stat.S_IMODE(path.stat().st_mode) == 0o444
        path.chmod(0o600)
        await until(lambda: store.degraded is None)
        assert await store.load(key(5)) is not None


async def test_a_folder_that_cannot_be_written_is_served_around(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o555)
    try:
        async with open_store(path) as store:
            assert store.degraded == "the folder of the session database cannot be written"
            await serves_without_disk(store)
        assert list(path.parent.iterdir()) == []
    finally:
        path.parent.chmod(0o755)


async def test_a_parent_that_is_a_file_or_a_path_that_is_a_device_is_served_around(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for bad in (tmp_path / "file" / "db", tmp_path / "pipe", Path("/dev/null"), Path("/proc/none/db")):
        async with open_store(bad) as store:
            assert store.degraded is not None
            await serves_without_disk(store)


async def test_a_newer_schema_is_refused_and_its_file_not_touched(path: Path) -> None:
    await fill(path)
    with plain(path) as connection:
        connection.execute("INSERT INTO schema_migrations (number, name) VALUES (9999, '9999_later.sql')")
    before = path.read_bytes()
    async with open_store(path, retry_seconds=0.01, write_delay_seconds=0) as store:
        assert store.degraded == (
            f"the session database has schema 9999 and this version of prefix-proxy knows {KNOWN}"
        )
        await serves_without_disk(store)
        failures = store.failures
        await asyncio.sleep(0.1)
        assert store.failures == failures and store.lag_seconds == 0
    assert path.read_bytes() == before and [found.name for found in path.parent.iterdir()] == [path.name]


async def test_the_database_of_another_program_is_refused_and_not_touched(path: Path) -> None:
    path.parent.mkdir()
    with plain(path) as connection:
        connection.execute("CREATE TABLE sessions (id)")
    before = path.read_bytes()
    async with open_store(path) as store:
        assert store.degraded == "the file is the database of another program"
    assert path.read_bytes() == before


async def test_where_wal_is_refused_a_rollback_journal_is_used(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case SE-08: SQLite's dot-file layer has no shared memory, as some network shares have none."""
    async with open_store(path, vfs="unix-dotfile") as store:
        store.put(row(1))
        await store.flush()
        assert store.degraded is None and await store.load(key(1)) is not None
    assert "wal_refused" in caplog.messages
    with plain(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


async def test_a_locked_file_delays_writes_but_nothing_that_a_request_waits_for(path: Path) -> None:
    await fill(path)
    kinds: list[str] = []
    async with open_store(
        path, write_delay_seconds=0, retry_seconds=0.05, busy_seconds=0.1, on_failure=kinds.append
    ) as store:
        with plain(path) as other:
            other.execute("BEGIN EXCLUSIVE")
            store.put(row(100))
            await until(lambda: not store.writing)
            assert store.degraded == "another process holds a lock on the session database"
            begun = time.monotonic()
            assert await store.load(key(3)) is not None
            assert await store.load(key(100)) is not None
            assert time.monotonic() - begun < 1
            assert set(kinds) == {"locked"} and store.lag_seconds > 0
            other.execute("ROLLBACK")
        await until(lambda: store.writing and store.lag_seconds == 0)
    assert count(path) == 41


async def test_a_file_that_is_locked_at_the_start_is_opened_later(path: Path) -> None:
    path.parent.mkdir()
    with plain(path) as other:
        other.execute("CREATE TABLE first (x)")
        other.execute("DROP TABLE first")
        other.execute("BEGIN EXCLUSIVE")
        async with open_store(path, retry_seconds=0.02) as store:
            assert store.degraded == "another process holds a lock on the session database"
            store.put(row(1))
            other.execute("ROLLBACK")
            await until(lambda: store.degraded is None)
            await store.flush()
    assert count(path) == 1


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_file_that_may_not_grow_keeps_rows_waiting_until_it_may(path: Path) -> None:
    await fill(path, 5)
    async with open_store(path, write_delay_seconds=60) as store:
        with files_at_most(64 * 1024):
            for number in range(100, 140):
                store.put(row(number, state=os.urandom(8000)))
            await store.flush()
            assert not store.writing and store.failures
            assert await store.load(key(120)) is not None
        await store.flush()
        assert store.degraded is None
    assert count(path) == 45


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    options = ["-t", "tmpfs", "-o", "size=400k", "none", str(where)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield where
    subprocess.run(["umount", str(where)], check=True)


async def test_on_a_full_disk_rows_wait_in_memory_until_there_is_space(small_disk: Path) -> None:
    path, kinds = small_disk / "sessions.sqlite3", list[str]()
    async with open_store(path, write_delay_seconds=0, retry_seconds=0.05, on_failure=kinds.append) as store:
        store.put(row(1))
        await store.flush()
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        for number in range(2, 12):
            store.put(row(number, state=os.urandom(6000)))
        await store.flush()
        assert store.degraded == "no space is left for the session database" and "full" in kinds
        assert await store.load(key(5)) is not None
        ballast.unlink()
        await until(lambda: store.degraded is None and store.lag_seconds == 0)
    assert count(path) == 11


def worker(action: str, path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.store_worker", action, str(path)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


async def test_two_processes_lose_no_update_and_meet_no_error(path: Path) -> None:
    """Case SE-01: both make the file at once, then each reads and writes one row 500 times."""
    workers = [worker("increment", path) for _ in range(2)]
    told = [await asyncio.to_thread(process.communicate) for process in workers]
    assert [out for out, _ in told] == ["0 None\n"] * 2
    async with open_store(path) as store:
        found = await store.load(key(1))
        assert found is not None and found.turns == 2 * ROUNDS


async def test_a_kill_in_mid_write_leaves_every_row_whole(path: Path) -> None:
    dice, reached = random.Random(3), 0
    for _ in range(6):
        process = worker("write", path)
        assert process.stdout is not None
        first = await asyncio.to_thread(process.stdout.readline)
        await asyncio.sleep(dice.uniform(0, 0.08))
        process.kill()
        lines = [first, *(await asyncio.to_thread(process.stdout.readlines))]
        await asyncio.to_thread(process.wait)
        process.stdout.close()
        promised = int([line for line in lines if line.endswith("\n")][-1])
        async with open_store(path) as store:
            known = store.keys()
            rows = [await store.load(found) for found in known]
            assert store.degraded is None and len(rows) == 20
            assert all(found is not None and is_whole(found) for found in rows)
            # What flush promised survives a kill; a batch is there in whole or not at all.
            turns = {found.turns for found in rows if found is not None}
            assert len(turns) == 1 and turns.pop() >= promised
        reached = max(reached, promised)
    assert reached > 1


async def test_files_are_for_their_owner_alone(path: Path) -> None:
    async with open_store(path) as store:
        store.put(row(1))
        await store.flush()
        modes = {found.name.rpartition(".")[2]: stat.S_IMODE(found.stat().st_mode) for found in path.parent.iterdir()}
        assert modes == {"sqlite3": 0o600, "sqlite3-wal": 0o600, "sqlite3-shm": 0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    async with open_store(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_names_with_signs_that_mean_something_in_a_uri_are_only_names(tmp_path: Path) -> None:
    for name in ("a?mode=memory#%41 ü.db", os.fsdecode(b"\xff.db")):
        path = tmp_path / name
        async with open_store(path) as store:
            store.put(row(1))
            await store.flush()
            assert store.degraded is None and path.exists()
        assert count(path) == 1
    async with open_store("nul\0") as store:
        assert store.degraded is not None


def test_errors_of_sqlite_are_told_apart_by_their_primary_code() -> None:
    error = sqlite3.OperationalError("text that is not looked at")
    assert kind_of(error) == "unusable"
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY_SNAPSHOT
    assert kind_of(error) == "locked"
    assert kind_of(sqlite3.InterfaceError()) == "row"
    with pytest.raises(StoreError) as caught, mapped():
        raise OSError("/secret/path")
    assert "secret" not in caught.value.reason
