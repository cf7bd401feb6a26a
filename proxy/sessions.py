"""The table of live sessions: found by name or by content, bounded, forgotten when they expire, stored behind."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from proxy.config import Config
from proxy.core.draft import Cut
from proxy.core.identity import Identity
from proxy.core.learned_lines import Lines
from proxy.core.ledger import Ledger
from proxy.core.past import Outcome, Past
from proxy.core.text import digest, encoded, kept
from proxy.metrics import Metrics
from proxy.session_state import dump, load
from proxy.store.sessions import SessionInfo, SessionKey, SessionRow, SessionStore, remaining_seconds

PUT_SECONDS = 0.5
"""Uses of a session this close together make one row, if only the time of its last use has changed."""
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
    tool_list: bytes = b""  # digest of that list as a whole; not stored
    turns: int = 0
    cut_at: Cut | None = None
    skeleton: bytes = b""
    chains: list[bytes] = field(default_factory=list)
    counted: int = 0  # its size when the table last looked
    put_at: float = 0.0  # wall seconds of the use that was stored last, and what else was
    put_as: tuple[object, ...] = ()
    lines: Lines = field(default_factory=Lines)
    past: Past = field(default_factory=Past)  # not stored

    @property
    def size(self) -> int:
        """About the bytes that it holds."""
        return (
            1024
            + self.ledger.size
            + self.past.size
            + 64 * (len(self.tools) + len(self.chains) + sum(map(len, self.lines.recent)))
        )


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
        self._models: Counter[tuple[bytes, bytes]] = Counter()  # sessions of a chat: one a model
        self._bytes = 0

    def key_of(self, who: Identity, model: str) -> SessionKey | None:
        """Return the key of a chat that was named, None for one that only its content tells."""
        if who.chat is None:
            return None
        return SessionKey(digest(encoded(who.tenant)), digest(b"chat", encoded(who.chat)), model)

    async def find(self, who: Identity, model: str, chain: Sequence[bytes]) -> Session:
        """Return the session of a request, begun if there is none.

        `chain` holds, for a chat without a name, the digest of its messages up to each: the longest one known to the
        tenant and model finds it.
        """
        tenant = digest(encoded(who.tenant))
        key = self.key_of(who, model)
        if key is None:
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
        session.skeleton = row.skeleton
        held = load(row.state, self._settings.max_bytes_each)
        session.tools, session.lines, session.cut_at, session.ledger = held
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
        self._models[session.key.tenant, session.key.chat] += 1
        session.counted = session.size
        self._bytes += session.counted
        self._shed()  # a request that is refused later begins a session too, and never touches it
        return session

    def touch(self, session: Session, chain: Sequence[bytes], change: Callable[[], None]) -> None:
        """Make `change` to a session that is used now, keep it alive, within the table's bounds, and stored soon."""
        if self._live.get(session.key) is not session:  # cleared or shed while its request was on its way
            change()
            return
        change()
        now = self._clock()
        session.last_seen = max(now, session.created)
        session.deadline = self._monotonic() + self._settings.ttl_seconds
        self._index(session, chain)
        before, session.counted = session.counted, session.size
        self._bytes += session.counted - before
        self._live.move_to_end(session.key)
        self._shed()
        self._put(session)
        self._metrics.sessions_live(len(self._live))

    def _put(self, session: Session) -> None:
        """Store a session soon; an exchange uses it twice, and the second row mostly says what the first does."""
        told = (session.turns, session.cut_at, session.skeleton, session.tools, session.lines)
        near = 0 <= session.last_seen - session.put_at < PUT_SECONDS
        if near and told == session.put_as and not self._keep_text:
            return
        session.put_at, session.put_as = session.last_seen, told
        self._store.put(self._row(session))

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
            self._bytes -= session.counted
            chat = key.tenant, key.chat
            self._models[chat] -= 1
            if not self._models[chat]:
                del self._models[chat]
            for chain in session.chains:
                self._by_chain.pop(chain, None)

    def _row(self, session: Session) -> SessionRow:
        seen, ttl, cut = session.last_seen, self._settings.ttl_seconds, session.cut_at
        ledger = session.ledger if self._keep_text else None
        state = kept(dump(session.tools, session.lines, cut, ledger))
        place = cut.turn if cut is not None else 0
        return SessionRow(session.key, session.created, seen, seen + ttl, session.turns, place, session.skeleton, state)

    def list(self) -> list[SessionInfo]:
        """Describe the live sessions, the one used last first; no text."""
        return [self._info(session) for session in reversed(self._live.values())]

    def latest(self, limit: int) -> Sequence[tuple[SessionInfo, Sequence[Outcome]]]:
        """Describe the `limit` live sessions used last, with what became of their last exchanges; no text."""
        chosen = islice(reversed(self._live.values()), limit)
        return [(self._info(session), session.past.outcomes()) for session in chosen]

    @property
    def live(self) -> int:
        """How many sessions are in memory."""
        return len(self._live)

    async def stored(self) -> Sequence[SessionInfo]:
        """Describe the sessions that are only in the store: a restart brought nobody back to them yet."""
        live = {key.id for key in self._live}
        return [info for info in await self._store.infos() if info.id not in live]

    def get(self, id: str) -> SessionInfo | None:
        """Describe the session with this id, None if it is not live."""
        return next((self._info(s) for s in self._live.values() if s.key.id == id), None)

    def has_other_model(self, key: SessionKey) -> bool:
        """Say whether the chat of a live session is also live with another model."""
        return self._models[key.tenant, key.chat] > 1

    def exchanges(self, id: str) -> Sequence[Outcome]:
        """Return what became of the last exchanges of a live session, oldest first."""
        return next((s.past.outcomes() for s in self._live.values() if s.key.id == id), ())

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
