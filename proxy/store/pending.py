"""What waits to be written: the latest change of each key, bounded in rows and bytes.  Plain values, no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from proxy.store.rows import SessionKey, SessionRow

# A delete that waits is a key and little else.
_DELETE_BYTES = 128


@dataclass(frozen=True, slots=True)
class Change:
    """The latest word on one session: its row, or None when it is to be deleted; `since` is a monotonic time."""

    row: SessionRow | None
    since: float

    @property
    def size_bytes(self) -> int:
        """About what the change takes in memory."""
        return _DELETE_BYTES if self.row is None else self.row.size_bytes


@dataclass(slots=True)
class Batch:
    """What goes into one transaction: with `wipe` every stored session goes first."""

    sessions: dict[SessionKey, Change] = field(default_factory=dict)
    meta: dict[str, bytes | None] = field(default_factory=dict)
    wipe: bool = False
    wiped_since: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.sessions or self.meta or self.wipe)

    def puts(self) -> list[SessionRow]:
        """Return the rows to write."""
        return [change.row for change in self.sessions.values() if change.row is not None]

    def deletes(self) -> list[SessionKey]:
        """Return the keys to delete."""
        return [key for key, change in self.sessions.items() if change.row is None]


class Pending:
    """The queue before the writer.  What the writer has taken stays visible in `taken` until it is on disk."""

    def __init__(self, *, max_rows: int = 200_000, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._bytes = 0
        self._waiting = Batch()
        self._taken = Batch()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, key: SessionKey, row: SessionRow | None, now: float) -> int:
        """Take the newest word on `key`; return how many older changes the bounds pushed out."""
        before = self._waiting.sessions.pop(key, None)
        # The age of a session's oldest unwritten change, not of its newest: else steady work would hide a dead disk.
        self._keep(key, Change(row, before.since if before is not None else now))
        self._bytes -= before.size_bytes if before is not None else 0
        return self._shrink()

    def _keep(self, key: SessionKey, change: Change) -> None:
        self._waiting.sessions[key] = change
        self._bytes += change.size_bytes

    def _shrink(self) -> int:
        dropped = 0
        waiting = self._waiting.sessions
        while len(waiting) > 1 and (len(waiting) > self._max_rows or self._bytes > self._max_bytes):
            self._bytes -= waiting.pop(next(iter(waiting))).size_bytes
            dropped += 1
        return dropped

    def set_meta(self, key: str, value: bytes | None) -> None:
        """Take a value of the proxy's own; None deletes it."""
        self._waiting.meta[key] = value

    def wipe(self, now: float) -> int:
        """Forget every session that waits and delete all stored ones; return how many rows waited."""
        count = len(self._waiting.puts())
        self._waiting.sessions.clear()
        self._bytes = 0
        self._waiting.wipe, self._waiting.wiped_since = True, now
        return count

    def find(self, key: SessionKey) -> tuple[bool, SessionRow | None]:
        """Return whether the queue knows better than the disk, and then the row (None: it is to be deleted)."""
        for batch in (self._waiting, self._taken):
            if (change := batch.sessions.get(key)) is not None:
                return True, change.row
            if batch.wipe:
                return True, None
        return False, None

    def find_meta(self, key: str) -> tuple[bool, bytes | None]:
        """The same for a value of the proxy's own."""
        for batch in (self._waiting, self._taken):
            if key in batch.meta:
                return True, batch.meta[key]
        return False, None

    def take(self, max_bytes: int) -> Batch:
        """Hand the writer at most about `max_bytes` of the oldest changes; `done` or `put_back` must follow."""
        batch = Batch(meta=self._waiting.meta, wipe=self._waiting.wipe, wiped_since=self._waiting.wiped_since)
        waiting, size = self._waiting.sessions, 0
        while waiting and size < max_bytes:
            key = next(iter(waiting))
            batch.sessions[key] = change = waiting.pop(key)
            size += change.size_bytes
        self._bytes -= size
        self._waiting = Batch(sessions=waiting)
        self._taken = batch
        return batch

    def done(self) -> None:
        """The batch that was taken is on disk, or given up."""
        self._taken = Batch()

    def put_back(self) -> int:
        """Queue the taken batch again, except where newer changes came; return how many the bounds pushed out."""
        taken, newer = self._taken, self._waiting
        self._taken = Batch()
        if newer.wipe:
            taken.sessions.clear()
        self._waiting = Batch(meta={**taken.meta, **newer.meta}, wipe=taken.wipe or newer.wipe)
        self._waiting.wiped_since = taken.wiped_since if taken.wipe else newer.wiped_since
        self._bytes = 0
        for key, change in (*taken.sessions.items(), *newer.sessions.items()):
            before = self._waiting.sessions.pop(key, None)
            self._bytes -= before.size_bytes if before is not None else 0
            self._keep(key, Change(change.row, before.since if before is not None else change.since))
        return self._shrink()

    def oldest(self) -> float | None:
        """Return the monotonic time of the oldest unwritten change of a session, or None."""
        return min(self._times(), default=None)

    def _times(self) -> Iterable[float]:
        for batch in (self._waiting, self._taken):
            yield from (change.since for change in batch.sessions.values())
            if batch.wipe:
                yield batch.wiped_since

    def __len__(self) -> int:
        """Return how many changes are not on disk."""
        return sum(len(batch.sessions) + len(batch.meta) + batch.wipe for batch in (self._waiting, self._taken))
