"""Rates of keys and tenants: who has used what, and the answer to those above their limit."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from proxy.config.traffic import Rates as Settings
from proxy.core.rates import Limit, Refusal, Use, admit, end
from proxy.core.reject import Reject
from proxy.downstream.auth import Caller
from proxy.metrics import Metrics

# A minute after its last request a tenant's buckets are full again, so that forgetting it changes nothing.
MOST_TENANTS = 10_000


@dataclass(slots=True)
class Ticket:
    """One request that was let in; `tokens` is what it turned out to cost."""

    tokens: int = 0


class Rates:
    """The use of every key and tenant that has a limit."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tenants = Limit(
            "tenant",
            settings.tenant_requests_per_minute,
            settings.tenant_tokens_per_minute,
            settings.tenant_concurrent,
        )
        self._used: dict[tuple[str, str], Use] = {}  # in the order of use

    def on(self, caller: Caller) -> bool:
        """Say whether there is any limit for `caller` or for tenants."""
        return any(limit.any for limit, _ in self._limits(caller, ""))

    @contextmanager
    def entered(self, caller: Caller, tenant: str) -> Iterator[Ticket]:
        """Count one request of `caller` for `tenant` while it runs.  Raises Reject 429 above a limit of either."""
        limits = [(limit, (limit.scope, name)) for limit, name in self._limits(caller, tenant) if limit.any]
        taken: dict[tuple[str, str], Use] = {}
        now = time.monotonic()
        for limit, at in limits:
            use = admit(limit, self._used.get(at, Use()), now)
            if isinstance(use, Refusal):
                self._metrics.rate_limited(use.scope, use.what)
                raise _too_many(use)
            taken[at] = use
        self._keep(taken)
        ticket = Ticket()
        try:
            yield ticket
        finally:
            now = time.monotonic()
            self._keep({at: end(limit, self._used.get(at, Use()), ticket.tokens, now) for limit, at in limits})

    def _limits(self, caller: Caller, tenant: str) -> tuple[tuple[Limit, str], ...]:
        return (caller.limit, caller.name), (self._tenants, tenant)

    def _keep(self, changed: dict[tuple[str, str], Use]) -> None:
        for at, use in changed.items():
            self._used.pop(at, None)
            self._used[at] = use
        while len(self._used) > MOST_TENANTS:
            oldest = next((at for at, use in self._used.items() if not use.running), None)
            if oldest is None:
                return
            del self._used[oldest]


def _too_many(refusal: Refusal) -> Reject:
    """Return the 429 in OpenAI's shape: its SDKs wait as `Retry-After` says and try again."""
    who = "This API key" if refusal.scope == "key" else "This user"
    limit, seconds = refusal.limit, refusal.wait_seconds
    what = f"have {limit} requests at once" if refusal.what == "concurrent" else f"use {limit} {refusal.what} a minute"
    message = f"{who} may {what}. Try again in {seconds} second{'s' if seconds > 1 else ''}."
    kind = "tokens" if refusal.what == "tokens" else "requests"
    headers = {"Retry-After": str(seconds)}
    return Reject(429, message, kind, code="rate_limit_exceeded", headers=headers)
