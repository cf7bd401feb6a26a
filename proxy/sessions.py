"""The table of live sessions: found by name or by content, bounded, forgotten when they expire, stored behind."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson

from proxy.config import Config
from proxy.core.identity import Identity
from proxy.core.ledger import Ledger
from proxy.core.ledger_pack import pack, unpack
from proxy.core.text import digest, encoded
from proxy.metrics import Metrics
from proxy.store.sessions import SessionInfo, SessionKey, SessionRow, SessionStore, remaining_seconds

CHAINS_EACH = 64
"""Requests of a session without a name that it can be found by; edits reach back no further."""


@dataclass(slots=True, eq=False)
class Session:
    """One conversation over many exchanges.  `created` and `last_seen` are wall seconds, `deadline` monotonic ones."""

    key: SessionKey
    created: float
    last_seen: float
    deadline: float
    ledger: Ledger
    explicit: bool = True
    tools: tuple[bytes, ...] = ()
    turns: int = 0
    cut: int = 0
    skeleton: bytes = b""
    chains: list[bytes] = field(default_factory=list)

    @property
    def size(self) -> int:
        """About the bytes that it holds."""
        return 1024 + self.ledger.size + 16 * (len(self.tools) + len(self.chains))


class Sessions:
    """All live sessions of one proxy.  Everything but `find`, `clear` and `sweep` is free of waiting."""

    def __init__(
        self,
        config: Config,
        store: SessionStore,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._keep_text = config.sessions, config.store.text
        self._store, self._metrics = store, metrics
        self._clock, self._monotonic = clock, monotonic
        self._live: OrderedDict[SessionKey, Session] = OrderedDict()
        self._by_chain: dict[bytes, SessionKey] = {}
        self._bytes = 0

    async def find(self, who: Identity, model: str, chain: Sequence[bytes]) -> Session:
        """Return the session of a request, begun if there is none.

        `chain` holds, for a chat without a name, the digest of its messages up to each: the longest one known to the
        tenant and model finds it.
        """
        tenant = digest(encoded(who.tenant))
        if who.chat is not None:
            key = SessionKey(tenant, digest(b"chat", encoded(who.chat)), model)
        else:
            known = next((self._by_chain[c] for c in reversed(chain) if c in self._by_chain), None)
            key = known or SessionKey(tenant, digest(b"content", *chain[:1]), model)
        session = self._live.get(key)
        if session is not None and session.deadline <= self._monotonic():
            self._drop(key)
            self._metrics.sessions_expired(1)
            session = None
        if session is None:
            session = await self._load(key) or self._begin(key)
        session.explicit = who.explicit
        return session

    async def _load(self, key: SessionKey) -> Session | None:
        row = await self._store.load(key) if self._store.holds(key) else None
        if row is None:
            return None
        if (other := self._live.get(key)) is not None:  # another request of the chat was quicker
            return other
        left = remaining_seconds(row, self._clock(), self._settings.ttl_seconds)
        session = Session(key, row.created, row.last_seen, self._monotonic() + left, Ledger(0), turns=row.turns)
        session.cut, session.skeleton = row.cut, row.skeleton
        session.tools, session.ledger = _state(row.state, self._settings.max_bytes_each)
        return self._add(session)

    def _begin(self, key: SessionKey) -> Session:
        if (other := self._live.get(key)) is not None:
            return other
        now = self._clock()
        self._metrics.sessions_created()
        ledger = Ledger(self._settings.max_bytes_each)
        return self._add(Session(key, now, now, self._monotonic() + self._settings.ttl_seconds, ledger))

    def _add(self, session: Session) -> Session:
        self._live[session.key] = session
        self._bytes += session.size
        self._shed()  # a request that is refused later begins a session too, and never touches it
        return session

    def touch(self, session: Session, chain: Sequence[bytes], change: Callable[[], None]) -> None:
        """Make `change` to a session that is used now, keep it alive, within the table's bounds, and stored soon."""
        if self._live.get(session.key) is not session:  # cleared or shed while its request was on its way
            change()
            return
        before = session.size
        change()
        now = self._clock()
        session.last_seen = max(now, session.created)
        session.deadline = self._monotonic() + self._settings.ttl_seconds
        self._index(session, chain)
        self._bytes += session.size - before
        self._live.move_to_end(session.key)
        self._shed()
        self._store.put(self._row(session))
        self._metrics.sessions_live(len(self._live))

    def _index(self, session: Session, chain: Sequence[bytes]) -> None:
        if chain and chain[-1] not in session.chains:
            session.chains.append(chain[-1])
            self._by_chain[chain[-1]] = session.key
            while len(session.chains) > CHAINS_EACH:
                self._by_chain.pop(session.chains.pop(0), None)

    def _shed(self) -> None:
        while len(self._live) > 1 and (
            len(self._live) > self._settings.max_live or self._bytes > self._settings.max_bytes_total
        ):  # fmt: skip
            self._drop(next(iter(self._live)))

    def _drop(self, key: SessionKey) -> None:
        session = self._live.pop(key, None)
        if session is not None:
            self._bytes -= session.size
            for chain in session.chains:
                self._by_chain.pop(chain, None)

    def _row(self, session: Session) -> SessionRow:
        state: dict[str, object] = {"tools": [value.hex() for value in session.tools]}
        if self._keep_text:
            state["ledger"] = pack(session.ledger).decode()
        seen, ttl = session.last_seen, self._settings.ttl_seconds
        packed = orjson.dumps(state)
        return SessionRow(
            session.key, session.created, seen, seen + ttl, session.turns, session.cut, session.skeleton, packed
        )

    def list(self) -> list[SessionInfo]:
        """Describe the live sessions, the one used last first; no text."""
        return [self._info(session) for session in reversed(self._live.values())]

    async def stored(self) -> Sequence[SessionInfo]:
        """Describe the sessions that are only in the store: a restart brought nobody back to them yet."""
        live = {key.id for key in self._live}
        return [info for info in await self._store.infos() if info.id not in live]

    def get(self, id: str) -> SessionInfo | None:
        """Describe the session with this id, None if it is not live."""
        return next((self._info(s) for s in self._live.values() if s.key.id == id), None)

    def _info(self, session: Session) -> SessionInfo:
        left = max(session.deadline - self._monotonic(), 0.0)
        key = session.key
        return SessionInfo(key.id, key.model, session.turns, session.created, session.last_seen, left, session.size)

    async def clear(self, *, id: str | None = None, everything: bool = False) -> int:
        """Forget one session, all, or (neither given) the expired ones; return how many there were."""
        if everything:
            live = set(self._live)
            for key in live:
                self._drop(key)
            stored = set(self._store.keys())
            await self._store.clear(everything=True)
            self._metrics.sessions_live(0)
            return len(live | stored)
        if id is None:
            return await self.sweep()
        keys = {key for key in (*self._live, *self._store.keys()) if key.id == id}
        for key in keys:
            self._drop(key)
        if keys:
            await self._store.clear(keys=keys)
        self._metrics.sessions_live(len(self._live))
        return len(keys)

    async def sweep(self) -> int:
        """Forget what has expired, in memory and in the store; return how many sessions went."""
        now = self._monotonic()
        expired = {key for key, session in self._live.items() if session.deadline <= now}
        for key in expired:
            self._drop(key)
        stored = {key for key, left in self._store.keys().items() if left <= 0}
        await self._store.sweep()
        count = len(expired | stored)
        self._metrics.sessions_expired(len(expired))
        self._metrics.sessions_swept(count)
        self._metrics.sessions_live(len(self._live))
        return count


def _state(raw: bytes, max_bytes: int) -> tuple[tuple[bytes, ...], Ledger]:
    try:
        state = orjson.loads(raw)
        tools = tuple(bytes.fromhex(value) for value in state["tools"])
        return tools, unpack(state["ledger"].encode(), max_bytes) if "ledger" in state else Ledger(max_bytes)
    except (ValueError, TypeError, KeyError, AttributeError):  # a row of another version: a cold start
        return (), Ledger(max_bytes)
