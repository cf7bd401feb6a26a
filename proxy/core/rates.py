"""Rates of one key or tenant: decisions on values.  Times are seconds of any clock that never goes back."""

import math
from dataclasses import dataclass, replace
from typing import Literal

Scope = Literal["key", "tenant"]
What = Literal["requests", "tokens", "concurrent"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A token bucket that was `level` full at the time `at`; below zero it is in debt."""

    level: float
    at: float

    def now(self, time: float, per_minute: int) -> "Bucket":
        """Return the bucket as it is at `time`: it fills by `per_minute` a minute and holds as much."""
        level = self.level + max(0.0, time - self.at) * per_minute / 60
        return Bucket(min(float(per_minute), level), max(time, self.at))


@dataclass(frozen=True, slots=True)
class Limit:
    """What a key or tenant may do; None: as it likes."""

    scope: Scope
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is anything to hold to."""
        return (self.requests_per_minute, self.tokens_per_minute, self.concurrent) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Use:
    """What a key or tenant has used: its buckets (None: full) and its requests that run."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    running: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request above a limit; in `wait_seconds` the next one may pass."""

    scope: Scope
    what: What
    limit: int
    wait_seconds: int


def admit(limit: Limit, use: Use, now: float) -> Use | Refusal:
    """Take one request, or refuse it: then nothing is taken.

    Of tokens only a debt refuses, for what a request costs is known when it ends (`end`).
    """
    if limit.concurrent is not None and use.running >= limit.concurrent:
        return Refusal(limit.scope, "concurrent", limit.concurrent, 1)
    tokens = _filled(use.tokens, limit.tokens_per_minute, now)
    if tokens is not None and limit.tokens_per_minute is not None and tokens.level <= 0:
        return _refused(limit.scope, "tokens", limit.tokens_per_minute, 1 - tokens.level)
    requests = _filled(use.requests, limit.requests_per_minute, now)
    if requests is not None and limit.requests_per_minute is not None:
        if requests.level < 1:
            return _refused(limit.scope, "requests", limit.requests_per_minute, 1 - requests.level)
        requests = Bucket(requests.level - 1, requests.at)
    return Use(requests, tokens, use.running + 1)


def end(limit: Limit, use: Use, tokens: int, now: float) -> Use:
    """Return the use after a request that `admit` took has ended and cost `tokens`."""
    bucket = _filled(use.tokens, limit.tokens_per_minute, now)
    paid = None if bucket is None else Bucket(bucket.level - max(0, tokens), bucket.at)
    return replace(use, tokens=paid, running=max(0, use.running - 1))


def _filled(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    return Bucket(float(per_minute), now) if bucket is None else bucket.now(now, per_minute)


def _refused(scope: Scope, what: What, per_minute: int, lacking: float) -> Refusal:
    return Refusal(scope, what, per_minute, max(1, math.ceil(lacking * 60 / per_minute)))
