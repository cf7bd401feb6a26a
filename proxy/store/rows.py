"""A session as the database knows it: plain values, no I/O."""

import hashlib
import math
from dataclasses import dataclass, replace

DIGEST_BYTES = 16
# SQLite takes blobs up to 1 GB; a ledger is packed and bounded far below this.
MAX_ROW_BYTES = 16 * 1024 * 1024
_MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Whose conversation, which one, with which model.  `tenant` and `chat` are digests of 16 bytes."""

    tenant: bytes
    chat: bytes
    model: str

    @property
    def id(self) -> str:
        """A name for people and URLs, 32 hex digits, that tells nothing of tenant or chat."""
        mixed = b"prefix-proxy session\0" + self.tenant + self.chat + self.model.encode(errors="surrogatepass")
        return hashlib.sha256(mixed).digest()[:DIGEST_BYTES].hex()


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One row.  `created`, `last_seen` and `expires` are wall seconds; `skeleton` and `state` are opaque here."""

    key: SessionKey
    created: float
    last_seen: float
    expires: float
    turns: int
    cut: int
    skeleton: bytes
    state: bytes

    @property
    def size_bytes(self) -> int:
        """About what the row takes, in bytes."""
        return len(self.skeleton) + len(self.state) + len(self.key.model) + 128

    @property
    def ttl_seconds(self) -> float:
        """How long the session lives after its last use."""
        return max(self.expires - self.last_seen, 0.0)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What an operator may see of a session: no text.  `created` and `last_seen` are wall seconds."""

    id: str
    model: str
    turns: int
    created: float
    last_seen: float
    expires_seconds: float
    size_bytes: int


def remaining_seconds(row: SessionRow, now: float, ttl: float) -> float:
    """Return how long a stored session still lives at wall time `now`: never below 0 nor above `ttl` seconds.

    A clock that jumped back since the row was written cannot make it immortal, one that jumped ahead cannot make an age
    negative.
    """
    return min(max(row.expires - now, 0.0), max(ttl, 0.0))


def clamped(row: SessionRow, now: float) -> SessionRow:
    """Return the row with no time in the future: last seen now at the latest, and its own time to live from there."""
    if row.last_seen <= now:
        return row
    return replace(row, created=min(row.created, now), last_seen=now, expires=now + row.ttl_seconds)


def storable(row: SessionRow) -> bool:
    """Say whether the schema takes this row; one that it refuses would hold up every row of its batch."""
    return (
        len(row.key.tenant) == len(row.key.chat) == DIGEST_BYTES
        and math.isfinite(row.created)
        and math.isfinite(row.last_seen)
        and math.isfinite(row.expires)
        and 0 <= row.turns <= _MAX_INTEGER
        and 0 <= row.cut <= _MAX_INTEGER
        and row.size_bytes <= MAX_ROW_BYTES
        and _is_text(row.key.model)
    )


def _is_text(model: str) -> bool:
    try:
        model.encode()
    except UnicodeEncodeError:  # A lone surrogate out of a client's JSON.
        return False
    return True
