"""The app's typed state: everything that outlives one request, and what one request carries through its handlers."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from proxy.aio import Tasks
from proxy.chats import Chats
from proxy.config import Config
from proxy.core.ledger import Ledger
from proxy.downstream.auth import Caller
from proxy.downstream.presence import Presence
from proxy.last_texts import LastTexts
from proxy.learning import Learning
from proxy.metrics import Metrics
from proxy.upstream.client import Upstream
from proxy.upstream.vllm import Models, Vllm

if TYPE_CHECKING:
    from proxy.admission import Admission
    from proxy.flight import Flights
    from proxy.holding import Holding
    from proxy.rates import Rates
    from proxy.recorder import Recorder
    from proxy.sessions import Sessions
    from proxy.store.sessions import SessionStore
    from proxy.upstream.probe import Templates
    from proxy.upstream.tokens import TokenCounter


@dataclass(slots=True)
class State:
    """One per app, under `STATE`; built and closed by `proxy.app`."""

    config: Config
    tasks: Tasks
    metrics: Metrics
    upstream: Upstream
    vllm: Vllm
    models: Models
    store: "SessionStore | None" = None
    sessions: "Sessions" = field(init=False)  # opened on startup, with the store
    templates: "Templates" = field(init=False)
    counter: "TokenCounter" = field(init=False)
    chats: Chats = field(default_factory=Chats)
    learning: Learning = field(default_factory=Learning)
    last_texts: LastTexts = field(default_factory=LastTexts)
    recorder: "Recorder | None" = None  # only where requests are recorded
    secret: bytes = b""
    reasoning: set[str] = field(default_factory=set)  # models seen to reason: closed, names that vLLM lists
    no_ledger: Ledger = field(default_factory=lambda: Ledger(0))  # of requests that no session remembers
    draining: bool = False
    presence: Presence = field(default_factory=Presence)
    rates: "Rates" = field(init=False)
    admission: "Admission" = field(init=False)
    flights: "Flights" = field(init=False)
    holding: "Holding" = field(init=False)


STATE = web.AppKey("state", State)

# Set by the outermost middleware for every request.
REQUEST_ID = web.RequestKey("request_id", str)
RECEIVED_AT = web.RequestKey("received_at", float)  # loop.time(), in seconds
# Set by a handler that knows better than the status how its exchange ended (one of proxy.metrics.OUTCOMES).
OUTCOME = web.RequestKey("outcome", str)
# Set for every route that needs a key.
CALLER = web.RequestKey("caller", Caller)
# Set when the head of an answer goes out: from then on no other answer can take its place.
STARTED = web.RequestKey("started", web.StreamResponse)
