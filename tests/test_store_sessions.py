"""The store as the rest of the proxy sees it, on a file that is well."""

# ruff: noqa: ASYNC240  # a test is alone in its loop and may look at its files there

import asyncio
import os
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.store.pending import Pending
from proxy.store.rows import MAX_ROW_BYTES
from proxy.store.sessions import MEMORY, SessionKey, SessionRow, open_store, remaining_seconds
from tests.store_help import count, key, plain, row, until


class Clock:
    """A wall clock or a monotonic one that a test turns by hand."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.sqlite3"


async def test_what_was_put_is_there_after_a_restart(path: Path) -> None:
    first = row(1, turns=3, state=b"\x00ledger\xff")
    async with open_store(path) as store:
        store.put(first)
    async with open_store(path) as store:
        assert await store.load(first.key) == first
        assert await store.load(key(2)) is None
        assert store.degraded is None and store.failures == 0


async def test_a_put_is_read_at_once_and_written_a_little_later(path: Path) -> None:
    async with open_store(path, write_delay_seconds=0.05) as store:
        store.put(row(1))
        assert await store.load(key(1)) is not None
        assert count(path) == 0
        await until(lambda: store.lag_seconds == 0)
        assert count(path) == 1


async def test_many_puts_of_one_session_are_one_write_of_the_last(path: Path) -> None:
    async with open_store(path, write_delay_seconds=60) as store:
        for turn in range(1000):
            store.put(row(1, turns=turn))
        await store.flush()
        with plain(path) as connection:
            assert connection.execute("SELECT turns FROM sessions").fetchall() == [(999,)]


async def test_a_delete_after_a_put_wins_and_a_put_after_a_delete_too(path: Path) -> None:
    async with open_store(path) as store:
        store.put(row(1))
        await store.flush()
        store.delete(key(1))
        assert await store.load(key(1)) is None
        assert not store.holds(key(1))
        await store.flush()
        assert count(path) == 0
        store.delete(key(1))
        store.put(row(1, turns=7))
        await store.flush()
        found = await store.load(key(1))
        assert found is not None and found.turns == 7


async def test_lag_is_the_age_of_the_oldest_change_and_nothing_resets_it_but_the_disk(path: Path) -> None:
    clock = Clock(100.0)
    async with open_store(path, write_delay_seconds=60, monotonic=clock) as store:
        assert store.lag_seconds == 0
        store.put(row(1))
        clock.now += 2
        store.put(row(1, turns=2))
        store.put(row(2))
        assert store.lag_seconds == 2
        clock.now -= 50
        assert store.lag_seconds == 0  # never negative
        await store.flush()
        assert store.lag_seconds == 0


async def test_a_restart_tells_the_stored_keys_with_what_is_left_of_their_time(path: Path) -> None:
    wall, mono = Clock(1_000_000.0), Clock(5.0)
    async with open_store(path, clock=wall, monotonic=mono) as store:
        store.put(row(1, now=wall.now, ttl=1800))
        store.put(row(2, now=wall.now - 1700, ttl=1800))
        store.put(row(3, now=wall.now - 1900, ttl=1800))
    wall.now += 50
    async with open_store(path, clock=wall, monotonic=mono) as store:
        assert {found.chat[-1]: left for found, left in store.keys().items()} == {1: 1750, 2: 50, 3: 0}
        assert await store.load(key(3)) is None
        mono.now += 60
        assert store.keys()[key(2)] == 0 and await store.load(key(2)) is None
        assert await store.sweep() == 2
        assert set(store.keys()) == {key(1)}
    assert count(path) == 1


async def test_rows_that_another_process_left_behind_are_swept_a_day_later(path: Path) -> None:
    wall = Clock(1_000_000.0)
    async with open_store(path, clock=wall) as ours, open_store(path, clock=wall) as theirs:
        theirs.put(row(1, now=wall.now))
        await theirs.flush()
        wall.now += 80_000
        assert await ours.sweep() == 0
        wall.now += 20_000
        assert await ours.sweep() == 1
        assert await ours.clear(expired_before=wall.now) == 0
    assert count(path) == 0


async def test_after_the_end_nothing_is_opened_again_and_nothing_raises(path: Path) -> None:
    async with open_store(path) as store:
        store.put(row(1))
    path.unlink()
    store.put(row(2))
    store.put_meta("a", b"b")
    await store.flush()
    assert await store.clear(everything=True) in (0, 2)
    assert await store.load(key(1)) is None
    assert not path.exists()


async def test_a_wall_clock_that_jumps_neither_ends_a_session_nor_makes_it_immortal(path: Path) -> None:
    """Case SE-03: back a day, on a day, then a restart."""
    wall, mono = Clock(1_000_000.0), Clock(0.0)
    async with open_store(path, clock=wall, monotonic=mono) as store:
        store.put(row(1, now=wall.now, ttl=3600))
        wall.now -= 86_400
        mono.now += 10
        store.put(row(1, now=wall.now, ttl=3600))
        store.put(row(2, now=wall.now + 86_400, ttl=3600))
        assert await store.sweep() == 0
        loaded = await store.load(key(2))
        assert loaded is not None and loaded.last_seen == wall.now and loaded.expires == wall.now + 3600
    async with open_store(path, clock=wall, monotonic=mono) as store:
        assert store.keys() == {key(1): 3600, key(2): 3600}
        mono.now += 3600
        wall.now -= 500
        assert await store.sweep() == 2
        assert count(path) == 0


@given(
    now=st.floats(-1e12, 1e12),
    expires=st.floats(-1e12, 1e12),
    ttl=st.floats(-10, 1e9),
)
def test_what_remains_is_never_negative_nor_more_than_the_time_to_live(now: float, expires: float, ttl: float) -> None:
    stored = SessionRow(key(), 0.0, 0.0, expires, 0, 0, b"", b"")
    assert 0 <= remaining_seconds(stored, now, ttl) <= max(ttl, 0)


async def test_clear_counts_stored_and_waiting_rows_once_each(path: Path) -> None:
    async with open_store(path, write_delay_seconds=60) as store:
        for number in range(5):
            store.put(row(number))
        await store.flush()
        store.put(row(0, turns=2))
        store.put(row(9))
        assert await store.clear(keys=[key(0), key(0), key(77)]) == 1
        assert await store.clear(everything=True) == 5
        assert await store.clear(everything=True) == 0
        assert store.keys() == {} and count(path) == 0
        assert await store.clear() == 0


async def test_a_clear_also_takes_rows_of_another_process_and_leaves_later_puts(path: Path) -> None:
    async with open_store(path) as ours, open_store(path) as theirs:
        theirs.put(row(5))
        await theirs.flush()
        cleared = asyncio.ensure_future(ours.clear(everything=True))  # noqa: TID251  # two calls at once, by hand
        await asyncio.sleep(0)
        ours.put(row(6))
        assert await cleared >= 1
        await ours.flush()
        assert count(path) <= 1
        assert await ours.load(key(6)) is not None


async def test_a_caller_that_is_cancelled_leaves_no_transaction_open(path: Path) -> None:
    async with open_store(path) as store:
        for hops in range(12):
            store.put(row(hops))
            call = asyncio.ensure_future(store.flush())  # noqa: TID251  # the test is the caller that goes away
            for _ in range(hops):
                await asyncio.sleep(0)
            call.cancel()
        await store.flush()
        assert count(path) == 12
        with plain(path) as connection:
            connection.execute("BEGIN EXCLUSIVE")


async def test_the_values_of_the_proxy_itself_are_kept(path: Path) -> None:
    async with open_store(path, write_delay_seconds=60) as store:
        assert await store.get_meta("salt") is None
        store.put_meta("salt", b"\x01\x02")
        assert await store.get_meta("salt") == b"\x01\x02"
    async with open_store(path, write_delay_seconds=60) as store:
        assert await store.clear(everything=True) == 0
        assert await store.get_meta("salt") == b"\x01\x02"
        store.put_meta("salt", None)
        assert await store.get_meta("salt") is None
        await store.flush()
        assert await store.get_meta("salt") is None


async def test_in_memory_it_works_the_same_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_store(MEMORY) as store:
        store.put(row(1))
        await store.flush()
        assert await store.load(key(1)) is not None
        assert [info.turns for info in await store.infos()] == [1]
        assert await store.clear(everything=True) == 1
        assert store.degraded is None
    assert os.listdir(tmp_path) == []


async def test_infos_tell_numbers_and_no_digest(path: Path) -> None:
    async with open_store(path) as store:
        store.put(row(1, turns=4, state=b"x" * 100))
        store.put(row(2, now=time.time() + 5))
        newest, older = await store.infos()
        assert (older.id, older.turns, older.model, older.size_bytes) == (key(1).id, 4, "m", 108)
        assert newest.id == key(2).id != key(2, model="other").id
        assert 1700 < older.expires_seconds <= 1800
        assert key(1).chat.hex() not in older.id and len(older.id) == 32


@pytest.mark.parametrize(
    "bad",
    [
        SessionRow(SessionKey(b"short", b"c" * 16, "m"), 0, 0, 9e9, 0, 0, b"", b""),
        SessionRow(SessionKey(b"t" * 16, b"c" * 16, "\ud800"), 0, 0, 9e9, 0, 0, b"", b""),
        SessionRow(key(7), 0, 0, float("nan"), 0, 0, b"", b""),
        SessionRow(key(7), 0, 0, 9e9, 2**63, 0, b"", b""),
        SessionRow(key(7), 0, 0, 9e9, 0, -1, b"", b""),
        SessionRow(key(7), 0, 0, 9e9, 0, 0, b"", b"x" * MAX_ROW_BYTES),
    ],
)
async def test_a_row_that_the_schema_refuses_is_dropped_alone(path: Path, bad: SessionRow) -> None:
    kinds: list[str] = []
    async with open_store(path, on_failure=kinds.append) as store:
        store.put(bad)
        store.put(row(1))
        await store.flush()
        assert kinds == ["row"] and store.failures == 1
        assert store.degraded is None
    assert count(path) == 1


async def test_a_model_name_of_any_kind_is_kept(path: Path) -> None:
    names = ["", "a\0b", "模型/7B", "'; DROP TABLE sessions; --", "x" * 5000]
    async with open_store(path) as store:
        for name in names:
            store.put(SessionRow(key(1, model=name), 0, 0, 9e9, 0, 0, b"", b""))
    async with open_store(path) as store:
        known = store.keys()
        assert {found.model for found in known} == set(names)
        assert [(await store.load(key(1, model=name))) is not None for name in names] == [True] * 5


def test_the_queue_is_bounded_and_the_oldest_change_goes_first() -> None:
    queue = Pending(max_rows=3, max_bytes=10_000)
    assert [queue.add(key(n), row(n), float(n)) for n in range(5)] == [0, 0, 0, 1, 1]
    assert queue.find(key(1)) == (False, None)
    assert queue.find(key(4))[0] and queue.oldest() == 2.0
    assert queue.add(key(9), row(9, state=b"x" * 9_900), 9.0) == 3
    assert len(queue) == 1


def test_what_could_not_be_written_waits_again_behind_newer_words() -> None:
    queue = Pending()
    for number in range(3):
        queue.add(key(number), row(number), 1.0)
    taken = queue.take(max_bytes=1 << 20)
    assert len(taken.sessions) == 3 and not queue and queue.oldest() == 1.0
    queue.add(key(1), None, 2.0)
    queue.set_meta("a", b"new")
    assert queue.find(key(0))[1] is not None  # still to be read while it is on its way
    queue.put_back()
    assert queue.find(key(1)) == (True, None)
    assert queue.oldest() == 1.0 and len(queue) == 4
    queue.wipe(3.0)
    assert queue.find(key(0)) == (True, None)
    assert [bool(queue.take(1).wipe), len(queue.take(1).sessions)] == [True, 0]


def test_a_batch_is_cut_by_bytes_so_that_no_transaction_is_long() -> None:
    queue = Pending()
    for number in range(10):
        queue.add(key(number), row(number, state=b"x" * 1000), 0.0)
    sizes = []
    while queue:
        sizes.append(len(queue.take(3000).sessions))
        queue.done()
    assert sum(sizes) == 10 and max(sizes) <= 3


async def test_no_read_transaction_stays_open(path: Path) -> None:
    """A log that nobody reads from can be emptied: TRUNCATE answers busy = 0."""
    async with open_store(path) as store:
        for number in range(50):
            store.put(row(number))
        await store.flush()
        for number in range(50):
            await store.load(key(number))
        await store.infos()
        with plain(path) as connection:
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert busy == 0


async def test_the_log_stays_small_under_steady_writing(path: Path) -> None:
    """Case SE-02: 1500 writes of 20 KiB while others read; the log never reaches 16 MiB and shrinks to its limit."""
    wal = path.with_name(path.name + "-wal")
    largest = 0
    async with open_store(path, write_delay_seconds=0) as store:
        for number in range(1500):
            store.put(row(number % 50, turns=number, state=bytes(20_000)))
            if number % 5 == 0:
                await store.flush()
                await store.load(key(number % 50))
                largest = max(largest, await asyncio.to_thread(lambda: wal.stat().st_size))
        assert 0 < largest < 16 * 1024 * 1024
    assert not wal.exists()


async def test_cleared_text_is_neither_in_the_file_nor_in_its_log(path: Path) -> None:
    secret = b"what a user said"
    async with open_store(path) as store:
        store.put(row(1, state=secret * 200))
        await store.flush()
        await store.clear(everything=True)
        left = b"".join(part.read_bytes() for part in path.parent.glob(path.name + "*"))
        assert secret not in left


def test_sqlite_is_new_enough_for_upserts() -> None:
    assert sqlite3.sqlite_version_info >= (3, 24)
