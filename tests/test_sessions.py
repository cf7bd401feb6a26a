"""The table of live sessions: how long they live, how many there are, how they are found, what a restart leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from proxy.config import Config
from proxy.core.identity import Identity
from proxy.core.ledger import Record
from proxy.metrics import Metrics
from proxy.sessions import CHAINS_EACH, Session, Sessions
from proxy.store.sessions import SessionStore, open_store

TTL = 3600.0


@dataclass
class Time:
    """Two clocks that a test sets."""

    wall: float = 1_000_000.0
    mono: float = 0.0

    def passes(self, seconds: float) -> None:
        """Let time pass on both."""
        self.wall += seconds
        self.mono += seconds


@dataclass
class Table:
    """A table over a store, with its clocks."""

    sessions: Sessions
    store: SessionStore
    time: Time
    metrics: Metrics = field(default_factory=Metrics)

    async def use(self, chat: str = "c", change: Callable[[], None] = lambda: None, user: str = "u") -> Session:
        """One exchange of a named chat."""
        session = await self.sessions.find(named(chat, user), "m", ())
        self.sessions.touch(session, (), change)
        return session


def named(chat: str | None, user: str = "u") -> Identity:
    """Return an identity; None: the chat has no name."""
    return Identity(user, True, chat, None, None, chat is not None)


@asynccontextmanager
async def opened(path: Path | str = ":memory:", time: Time | None = None, **settings: Any) -> AsyncIterator[Table]:
    """Open a table; `settings` by their path."""
    time = time or Time()
    values = {"sessions.ttl_seconds": TTL} | {name.replace("__", "."): value for name, value in settings.items()}
    config, metrics = Config().with_values(values), Metrics()

    def wall() -> float:
        return time.wall

    def mono() -> float:
        return time.mono

    async with open_store(path, write_delay_seconds=0, clock=wall, monotonic=mono) as store:
        yield Table(Sessions(config, store, metrics, clock=wall, monotonic=mono), store, time, metrics)


def remembered(session: Session, size: int = 10) -> Callable[[], None]:
    """Return a change that puts `size` bytes of text into the ledger."""

    def change() -> None:
        count = sum(1 for _ in session.ledger.nodes())
        session.ledger.record([Record("user", b"%d" % count, sent=b"x" * size)])

    return change


def on_disk(folder: Path) -> bytes:
    """Return the bytes of all files."""
    return b"".join(path.read_bytes() for path in folder.iterdir())


async def test_a_session_in_use_slides_on_and_an_idle_one_is_forgotten() -> None:
    """An hour after its last exchange, not after its first."""
    async with opened() as table:
        session = await table.use()
        for _ in range(5):
            table.time.passes(TTL - 1)
            assert await table.use() is session
        table.time.passes(TTL + 1)
        assert await table.use() is not session


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0, -2e9])
async def test_a_wall_clock_that_jumps_ends_no_session_and_keeps_none_alive(jump: float) -> None:
    """The monotonic clock counts; no age is negative (SE-03)."""
    async with opened() as table:
        session = await table.use()
        table.time.wall += jump
        assert await table.use() is session
        table.time.passes(10)
        await table.use()
        (info,) = table.sessions.list()
        assert 0 <= info.expires_seconds <= TTL and info.last_seen >= info.created
        table.time.passes(TTL + 1)
        assert await table.sessions.sweep() == 1 and table.sessions.list() == []


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
async def test_after_a_restart_no_session_lives_longer_than_its_time(tmp_path: Path, jump: float) -> None:
    """A row from the future is clamped to now; an idle session is gone two TTLs later at the latest (SE-03)."""
    path, time = tmp_path / "s.db", Time()
    async with opened(path, time) as table:
        await table.use()
    time.wall += jump
    async with opened(path, time) as table:
        session = await table.sessions.find(named("c"), "m", ())
        assert 0 <= session.deadline - time.mono <= TTL
        table.sessions.touch(session, (), lambda: None)
        (info,) = table.sessions.list()
        assert 0 <= info.expires_seconds <= TTL
        time.passes(TTL + 1)
        await table.sessions.sweep()
        assert table.sessions.list() == [] and table.store.keys() == {}


async def test_the_one_unused_longest_goes_when_there_are_too_many() -> None:
    """At most max_live sessions."""
    async with opened(sessions__max_live=3) as table:
        for chat in "abc":
            await table.use(chat)
        a = await table.use("a")
        await table.use("d")
        assert len(table.sessions.list()) == 3
        assert (await table.use("a")) is a
        assert [s.last_seen for s in table.sessions.list()] and table.sessions.list()[0].id == a.key.id


async def test_all_ledgers_together_are_bounded_in_bytes() -> None:
    """The last one used stays, whatever its size; the count is right after sheds and clears."""
    async with opened(sessions__max_bytes_total=20_000) as table:
        for chat in "abcdefgh":
            session = await table.use(chat)
            table.sessions.touch(session, (), remembered(session, 5000))
            assert sum(s.size_bytes for s in table.sessions.list()) <= 20_000
        assert len(table.sessions.list()) == 3
        session = await table.use("big")
        table.sessions.touch(session, (), remembered(session, 50_000))
        assert [s.id for s in table.sessions.list()] == [session.key.id]
        await table.sessions.clear(everything=True)
        assert table.sessions._bytes == 0 and not table.sessions._by_chain


async def test_sessions_of_refused_requests_are_bounded_too() -> None:
    """They are found, then never touched."""
    async with opened(sessions__max_live=5) as table:
        for i in range(50):
            await table.sessions.find(named(str(i)), "m", ())
        assert len(table.sessions.list()) <= 5


async def test_a_session_shed_while_its_request_was_on_its_way_changes_alone() -> None:
    """Its record goes nowhere, and breaks no count."""
    async with opened() as table:
        session = await table.use()
        await table.sessions.clear(everything=True)
        table.sessions.touch(session, (), remembered(session, 5000))
        assert table.sessions.list() == [] and table.sessions._bytes == 0


async def test_users_and_models_have_sessions_of_their_own() -> None:
    """One chat id, two users, two models: four."""
    async with opened() as table:
        found = [await table.sessions.find(named("c", user), model, ()) for user in "ab" for model in "mn"]
        assert len(set(map(id, found))) == 4
        assert await table.sessions.find(named("c", "a"), "m", ()) is found[0]


async def test_a_chat_without_a_name_is_found_by_the_longest_chain() -> None:
    """Its beginning and all that follows; another beginning is another session."""
    async with opened() as table:
        one = await table.sessions.find(named(None), "m", [b"1"])
        table.sessions.touch(one, [b"1"], lambda: None)
        assert await table.sessions.find(named(None), "m", [b"1", b"2", b"3"]) is one
        table.sessions.touch(one, [b"1", b"2", b"3"], lambda: None)
        assert await table.sessions.find(named(None), "m", [b"0", b"2", b"3", b"4"]) is one
        assert await table.sessions.find(named(None), "m", [b"9"]) is not one
        assert not one.explicit


async def test_a_session_is_found_by_a_bounded_number_of_chains() -> None:
    """A thousand requests cost no thousand entries; what is dropped leaves none."""
    async with opened() as table:
        session = await table.sessions.find(named(None), "m", [b"0"])
        for i in range(3 * CHAINS_EACH):
            table.sessions.touch(session, [b"0", b"%d" % i], lambda: None)
        assert len(table.sessions._by_chain) == CHAINS_EACH
        await table.sessions.clear(id=session.key.id)
        assert table.sessions._by_chain == {}


async def test_with_text_in_the_store_a_restart_changes_nothing(tmp_path: Path) -> None:
    """Ledger, tools, turns: the very same."""
    path, time = tmp_path / "s.db", Time()
    async with opened(path, time, store__text=True) as table:
        session = await table.use()

        def change() -> None:
            remembered(session, 50)()
            session.tools, session.turns = (b"t" * 16, b"u" * 16), 3

        table.sessions.touch(session, (), change)
        size = session.size
    async with opened(path, time, store__text=True) as table:
        again = await table.sessions.find(named("c"), "m", ())
        assert (again.tools, again.turns, again.size, again.created) == (session.tools, 3, size, session.created)
        assert [n.sent for n in again.ledger.nodes()] == [n.sent for n in session.ledger.nodes()]


async def test_without_text_in_the_store_no_text_is_on_the_disk(tmp_path: Path) -> None:
    """Digests and counts are; the ledger begins anew."""
    path = tmp_path / "s.db"
    async with opened(path) as table:
        session = await table.use()
        table.sessions.touch(session, (), remembered(session, 50))
        session.tools = (b"t" * 16,)
        await table.use()
    assert b"x" * 20 not in on_disk(tmp_path)
    async with opened(path) as table:
        again = await table.sessions.find(named("c"), "m", ())
        assert again.tools == (b"t" * 16,) and again.ledger.size == 0


async def test_what_expired_while_the_proxy_was_down_is_a_new_session(tmp_path: Path) -> None:
    """Also before the first sweep."""
    path, time = tmp_path / "s.db", Time()
    async with opened(path, time, store__text=True) as table:
        session = await table.use()
        table.sessions.touch(session, (), remembered(session, 50))
    time.passes(TTL + 5)
    async with opened(path, time, store__text=True) as table:
        again = await table.sessions.find(named("c"), "m", ())
        assert again.ledger.size == 0 and again.created == time.wall


async def test_a_live_session_that_expired_does_not_come_back_from_the_store(tmp_path: Path) -> None:
    """Its row waits for the sweep; its text is forgotten all the same."""
    async with opened(tmp_path / "s.db", store__text=True) as table:
        session = await table.use()
        table.sessions.touch(session, (), remembered(session, 50))
        await table.store.flush()
        table.time.passes(TTL + 5)
        again = await table.sessions.find(named("c"), "m", ())
        assert again.ledger.size == 0 and again is not session
        await table.use()
        (info,) = table.sessions.list()
        assert info.expires_seconds == TTL


async def test_clearing_one_all_or_the_expired(tmp_path: Path) -> None:
    """Each answers how many there were, stored ones counted once."""
    async with opened(tmp_path / "s.db") as table:
        a, _, c = [await table.use(chat) for chat in "abc"]
        assert table.sessions.get(a.key.id) is not None and table.sessions.get("nobody") is None
        assert await table.sessions.clear(id=a.key.id) == 1
        assert await table.sessions.clear(id=a.key.id) == 0 and table.sessions.get(a.key.id) is None
        assert await table.sessions.clear() == 0
        table.time.passes(TTL - 10)
        await table.use("c")
        table.time.passes(20)
        assert await table.sessions.clear() == 1
        assert [s.id for s in table.sessions.list()] == [c.key.id]
        assert await table.sessions.clear(everything=True) == 1
        assert table.store.keys() == {} and await table.sessions.clear(everything=True) == 0


async def test_a_session_described_has_no_text() -> None:
    """Ids are digests."""
    async with opened() as table:
        session = await table.use("secret chat")
        assert "secret" not in repr(table.sessions.list()) and session.key.id == table.sessions.list()[0].id


async def test_a_row_of_another_version_is_a_cold_start(tmp_path: Path) -> None:
    """Whatever its bytes are."""
    path, time = tmp_path / "s.db", Time()
    async with AsyncExitStack() as stack:
        table = await stack.enter_async_context(opened(path, time))
        session = await table.use()
        row = table.sessions._row(session)
        for state in (b"", b"{}", b'{"tools":3}', b'{"tools":["zz"]}', b'{"tools":[],"ledger":3}', b"\xff"):
            table.store.put(replace(row, state=state))
            await table.store.flush()
            table.sessions._drop(session.key)
            assert (await table.sessions.find(named("c"), "m", ())).ledger.size == 0


async def test_requests_of_one_chat_at_once_share_its_session(tmp_path: Path) -> None:
    """Also while it is read from the disk after a restart."""
    path, time = tmp_path / "s.db", Time()
    async with opened(path, time, store__text=True) as table:
        session = await table.use()
        table.sessions.touch(session, (), remembered(session, 50))
    async with opened(path, time, store__text=True) as table:
        found = await asyncio.gather(*(table.sessions.find(named("c"), "m", ()) for _ in range(9)))
        assert len(set(map(id, found))) == 1 and found[0].ledger.size > 0
        assert table.sessions._bytes == found[0].size
