"""Every metric, label and bucket, in a registry of its own.  Labels come from small closed sets, never from users."""

from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from proxy.coalesce_metrics import CoalesceMetrics
from proxy.collectors import Bulk, Lean
from proxy.config.steps import Steps
from proxy.core.meter import Usage
from proxy.core.prefix import CAUSES, SHORTFALLS
from proxy.restart_metrics import RestartMetrics

# 0.5 ms (what the proxy itself costs) to 120 s (a cold prefill in a full queue).
BUCKETS_SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip

UNMATCHED = "unmatched"
OTHER = "other"
WEBSOCKET = "websocket"  # a connection; its requests count as those of their route
ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/tokenize",
    "/detokenize", "/v1/rerank", "/v1/score", "/v1/models", "/v1/models/{model}", "/health", "/ready",
    "/metrics", "/v1/internal/session/clear", "/v1/internal/sessions", "/v1/internal/sessions/{id}", "/",
    "/v1/internal/events", WEBSOCKET,
)  # fmt: skip
OUTCOMES = ("completed", "client_disconnect", "upstream_error", "rejected", "drained", "failed")
ABORT_PHASES = ("before_headers", "prefill", "stream", "plain")
UPSTREAM_ERRORS = ("connect", "timeout", "status_4xx", "status_5xx", "not_json", "cut", "in_band", OTHER)
STEPS = (*Steps.__dataclass_fields__, "include_usage")
# Where else a failure costs a request what the proxy would have done for it.
STEP_FAILURES = (*STEPS, "record", "template")
# What `code` a refusal may carry as a label; anything else counts as "other".
REJECT_CODES = (
    "admin_key_needed", "bad_request", "context_length_exceeded", "draining", "forbidden", "internal_error",
    "invalid_api_key", "invalid_body", "invalid_json", "invalid_limit", "invalid_value", "method_not_allowed",
    "missing_api_key", "model_not_found", "not_found", "overloaded", "rate_limit_exceeded", "request_timeout",
    "request_too_large", "unsupported_encoding",
    "upstream_timeout", "upstream_unavailable",
)  # fmt: skip
STORE_FAILURES = ("locked", "full", "unusable", "damaged", "refused", "row")
COUNTED_HOW = ("vllm", "local", "estimate", "cached")
RATE_SCOPES = ("key", "tenant")
RATED = ("requests", "tokens", "concurrent")
NO_PLACE = ("task", "queue_full", "timeout")
# A server with more adapters than this would fill the metrics by itself.
_MOST_MODELS = 64
LEFT = 499  # nginx's number for a client that went away before its answer
_STATUSES = frozenset(str(status) for status in (LEFT, *HTTPStatus))


def _reuse(usage: Usage | None) -> str:
    """Say whether at least half of a prompt came from the cache."""
    if usage is None or usage.cached_tokens is None:
        return "unknown"
    return "yes" if 2 * usage.cached_tokens >= usage.prompt_tokens else "no"


def _one_of(value: str, known: Collection[str], otherwise: str = OTHER) -> str:
    return value if value in known else otherwise


class Metrics:
    """The counters and histograms of one app.  Every method is synchronous, cheap, and safe with any argument."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, known_models: Callable[[], Collection[str]] = tuple) -> None:
        """`known_models` names the models that may be a label at this moment; all others count as "other"."""
        self.registry = CollectorRegistry()
        self.known_models = known_models
        self._models: set[str] = set()  # those that are a label already
        self._children: dict[tuple[Counter, tuple[str, ...]], Counter] = {}
        self._requests()
        self._latencies()
        self._failures()
        self._memory()
        self._prefixes()
        self._traffic()
        self.coalesce = CoalesceMetrics(self.registry)
        self.restarts = RestartMetrics(self.registry)

    def _child(self, metric: Counter, *labels: str) -> Counter:
        """Return `metric` with these labels, of a closed set; prometheus_client would check them anew each time."""
        if (child := self._children.get((metric, labels))) is None:
            child = self._children[metric, labels] = metric.labels(*labels)
        return child

    def _counter(self, name: str, text: str, *labels: str, of: Iterable[str] = ()) -> Counter:
        """Make a counter; those `of` a closed set of labels begin at 0, so that the first failure is a rise too."""
        counter = Counter(f"proxy_{name}", text, labels, registry=self.registry)
        for label in of:
            self._child(counter, label)
        return counter

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"proxy_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"proxy_{name}_seconds", text, labels, buckets=BUCKETS_SECONDS, registry=self.registry)

    def _requests(self) -> None:
        self._request = self._counter(
            "requests", "Exchanges ended, by route, status and outcome.", "route", "status", "outcome"
        )
        self._trail = self._counter("trail_steps", "Exchanges that a step changed, by step.", "step", of=STEPS)
        self._in_flight = self._gauge("requests_in_flight", "Exchanges running now.", "route")
        self._tokens = {
            name: self._counter(f"{name}_tokens", f"{name.capitalize()} tokens by vLLM's usage, by model.", "model")
            for name in ("prompt", "cached", "generated")
        }

    def _latencies(self) -> None:
        self._first_token = self._histogram("time_to_first_token", "Receipt of a request to its first token.", "reuse")
        self._end_to_end = self._histogram("end_to_end", "Receipt of a generating request to its answer's end.")
        self._overhead = self._histogram("overhead", "Receipt of a request to its forwarding: the proxy's own part.")
        self._gaps = Bulk("proxy_inter_token_latency_seconds", "Gap between successive token chunks.", BUCKETS_SECONDS)
        self.registry.register(self._gaps)

    def _failures(self) -> None:
        self._aborts = self._counter("aborts", "Exchanges that the client left, by phase.", "phase", of=ABORT_PHASES)
        self._upstream = self._counter(
            "upstream_errors", "Failures of the upstream, by kind.", "kind", of=UPSTREAM_ERRORS
        )
        self._restarts = self._counter("upstream_restarts", "Times that vLLM was found started anew.")
        self._rejects = self._counter("rejects", "Requests that the proxy refused, by error code.", "code")
        self._step_failures = self._counter("step_failures", "Steps that failed, by step.", "step", of=STEP_FAILURES)

    def _memory(self) -> None:
        self._sessions = self._gauge("sessions_live", "Sessions in memory now.")
        self._created = self._counter("sessions_created", "Sessions begun.")
        self._expired = self._counter("sessions_expired", "Sessions whose time ran out.")
        self._swept = self._counter("sessions_swept", "Sessions deleted, by the sweep or on demand.")
        self._lag = self._gauge("store_lag_seconds", "Age of the oldest write that is not on disk yet.")
        self._store_failures = self._counter(
            "store_failures", "Failures of the store, by kind.", "kind", of=STORE_FAILURES
        )

    def _prefixes(self) -> None:
        self._predicted = self._counter("predicted_cached_tokens", "Tokens that should have come from vLLM's cache.")
        self._actual = self._counter("actual_cached_tokens", "Tokens that did, of the same exchanges.")
        self._breaks = self._counter(
            "prefix_breaks", "Prompts that left the last one of their chat, by cause.", "cause", of=CAUSES
        )
        text = "Prompts of which vLLM had less, by cause."
        self._shortfalls = self._counter("prefix_shortfalls", text, "cause", of=SHORTFALLS)

    def _traffic(self) -> None:
        self._counts = self._counter("token_counts", "Prompts counted, by how.", "how")
        self._count_seconds = self._histogram("token_count", "Counting one prompt that was not known.")
        self._limited = self._counter("limited_answers", "Answers that ended at a limit set by the proxy.")
        self._trims = self._counter("trims", "Cuts made into conversations that outgrew their context.")
        self._left_out = self._counter("messages_left_out", "Messages that these cuts newly left out.")
        self._rate_limited = self._counter("rate_limited", "Requests above a rate, by scope and what.", "scope", "what")
        self._admission_refused = self._counter("admission_refused", "Requests without a place.", "kind", of=NO_PLACE)
        self._admission_wait = self._histogram("admission_wait", "Waiting for a place at vLLM, of those that had to.")
        self._waiting = self._gauge("admission_waiting", "Requests waiting for a place now.")

    def begin(self, route: str) -> None:
        """Count one more exchange in flight."""
        self._in_flight.labels(_one_of(route, ROUTES, UNMATCHED)).inc()

    def end(self, route: str, status: int, outcome: str) -> None:
        """Count the end of an exchange that `begin` counted; `status` is `LEFT` where the client left before one."""
        route = _one_of(route, ROUTES, UNMATCHED)
        code = str(status)
        label = code if code in _STATUSES else f"{code[0]}xx" if 100 <= status <= 599 else OTHER
        self._in_flight.labels(route).dec()
        self._child(self._request, route, label, _one_of(outcome, OUTCOMES, "failed")).inc()

    def trail(self, steps: Iterable[str]) -> None:
        """Count the steps that changed one request."""
        for step in steps:
            self._child(self._trail, _one_of(step, STEPS)).inc()

    def observe_first_token(self, seconds: float, usage: Usage | None = None) -> None:
        """Record the time from receipt to the first token; by `usage`, whether most of the prompt was cached."""
        self._first_token.labels(_reuse(usage)).observe(seconds)

    def observe_gaps(self, gaps_seconds: Iterable[float]) -> None:
        """Record all gaps between the tokens of one answer."""
        self._gaps.add(gaps_seconds)

    def observe_end_to_end(self, seconds: float) -> None:
        """Record the time from receipt to the end of the answer."""
        self._end_to_end.observe(seconds)

    def observe_overhead(self, seconds: float) -> None:
        """Record the time from receipt to forwarding."""
        self._overhead.observe(seconds)

    def tokens(self, model: str, *, prompt: int, cached: int, generated: int) -> None:
        """Add what vLLM's usage says of one answer, in tokens."""
        model = self._model(model)
        for name, count in (("prompt", prompt), ("cached", cached), ("generated", generated)):
            self._child(self._tokens[name], model).inc(max(count, 0))

    def _model(self, model: str) -> str:
        if model not in self._models and (len(self._models) >= _MOST_MODELS or model not in self.known_models()):
            return OTHER
        self._models.add(model)
        return model

    def aborted(self, phase: str) -> None:
        """Count an exchange that the client left in `phase`."""
        self._child(self._aborts, _one_of(phase, ABORT_PHASES)).inc()

    def upstream_error(self, kind: str) -> None:
        """Count a failure of the upstream."""
        self._child(self._upstream, _one_of(kind, UPSTREAM_ERRORS)).inc()

    def rejected(self, code: str | int | None) -> None:
        """Count an answer that the proxy gave itself, by its error code."""
        self._child(self._rejects, _one_of(str(code), REJECT_CODES)).inc()

    def upstream_restarted(self) -> None:
        """Count a start of vLLM that followed another one, whoever started it."""
        self._restarts.inc()

    def step_failed(self, step: str) -> None:
        """Count a step that failed: its request went on as received."""
        self._child(self._step_failures, _one_of(step, STEP_FAILURES)).inc()

    def sessions_live(self, count: int) -> None:
        """Set the number of sessions in memory."""
        self._sessions.set(count)

    def sessions_created(self, count: int = 1) -> None:
        """Count new sessions."""
        self._created.inc(count)

    def sessions_expired(self, count: int) -> None:
        """Count sessions whose time ran out."""
        self._expired.inc(count)

    def sessions_swept(self, count: int) -> None:
        """Count sessions that were deleted."""
        self._swept.inc(count)

    def store_lag(self, seconds: float) -> None:
        """Set the age of the oldest write that is not on disk."""
        self._lag.set(seconds)

    def store_failed(self, kind: str) -> None:
        """Count a failure of the store."""
        self._child(self._store_failures, _one_of(kind, STORE_FAILURES)).inc()

    def predicted(self, predicted_tokens: int, cached_tokens: int) -> None:
        """Add what one exchange should have had from the cache, and what it had, in tokens."""
        self._predicted.inc(predicted_tokens)
        self._actual.inc(max(cached_tokens, 0))

    def prefix_judged(self, cause: str, shortfall: str) -> None:
        """Count where a prompt left the last one of its chat, and why vLLM had less than that; empty: it did not."""
        if cause:
            self._breaks.labels(_one_of(cause, CAUSES, "unknown")).inc()
        if shortfall:
            self._shortfalls.labels(_one_of(shortfall, SHORTFALLS)).inc()

    def counted(self, how: str, seconds: float | None = None) -> None:
        """Count a prompt whose tokens were wanted, and how long that took where it was not known."""
        self._counts.labels(_one_of(how, COUNTED_HOW)).inc()
        if seconds is not None:
            self._count_seconds.observe(seconds)

    def limited_answer(self) -> None:
        """Count an answer that ended at a limit that the proxy had set."""
        self._limited.inc()

    def trimmed(self, messages: int) -> None:
        """Count a cut, and the messages that it left out beyond those of the cut before it."""
        self._trims.inc()
        self._left_out.inc(max(messages, 0))

    def rate_limited(self, scope: str, what: str) -> None:
        """Count a refusal for a rate."""
        self._rate_limited.labels(_one_of(scope, RATE_SCOPES), _one_of(what, RATED)).inc()

    def admission_refused(self, kind: str) -> None:
        """Count a request that got no place."""
        self._admission_refused.labels(_one_of(kind, NO_PLACE)).inc()

    def admission_waited(self, seconds: float) -> None:
        """Record how long a request waited, whether it got a place or not."""
        self._admission_wait.observe(seconds)

    def admission_waiting(self, count: int) -> None:
        """Set the number of requests that wait for a place."""
        self._waiting.set(count)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(Lean(self.registry))
