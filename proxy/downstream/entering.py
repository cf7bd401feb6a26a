"""Letting a request in: whose it is, and whether its key and its user may ask once more now."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from proxy.core.identity import Identity, identify
from proxy.core.meter import Meter
from proxy.core.request import ChatRequest
from proxy.facts import claims_of
from proxy.rates import Ticket
from proxy.state import CALLER, STATE


@dataclass(frozen=True, slots=True)
class Guest:
    """A request that was let in: whose it is (empty where nobody asks), whether it is a task, what it will cost."""

    tenant: str
    task: bool
    ticket: Ticket


@contextmanager
def entered(request: web.Request, who: Identity | None = None) -> Iterator[Guest]:
    """Count `request` of `who` while it runs.  Raises Reject 429 above a rate of its key or tenant."""
    state, caller = request.app[STATE], request[CALLER]
    if not state.rates.on(caller) and not state.admission.on:
        yield Guest("", False, Ticket())
        return
    if who is None:
        who = identify(claims_of(state.config, caller, request.headers), ChatRequest((), {}))
    with state.rates.entered(caller, who.tenant) as ticket:
        yield Guest(who.tenant, who.task is not None, ticket)


def computed_tokens(meter: Meter) -> int:
    """Return what vLLM had to compute for an answer: by its usage, else, where it was cut, the events that came."""
    usage = meter.usage
    if usage is not None:
        return max(0, usage.prompt_tokens - (usage.cached_tokens or 0)) + usage.completion_tokens
    return len(meter.gaps) + (meter.first_token is not None)
