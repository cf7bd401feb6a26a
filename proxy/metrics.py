"""Every metric, label and bucket, in a registry of its own.  Labels come from small closed sets, never from users."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.config.steps import Steps

# 0.5 ms (what the proxy itself costs) to 120 s (a cold prefill in a full queue).
BUCKETS_SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip

UNMATCHED = "unmatched"
OTHER = "other"
ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/tokenize",
    "/detokenize", "/v1/rerank", "/v1/score", "/v1/models", "/v1/models/{model}", "/health", "/ready",
    "/metrics", "/v1/internal/session/clear", "/v1/internal/sessions", "/v1/internal/sessions/{id}", "/",
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
    "missing_api_key", "model_not_found", "not_found", "request_timeout", "request_too_large", "unsupported_encoding",
    "upstream_timeout", "upstream_unavailable",
)  # fmt: skip
STORE_FAILURES = ("locked", "full", "unusable", "damaged", "refused", "row")
# A server with more adapters than this would fill the metrics by itself.
_MOST_MODELS = 64
LEFT = 499  # nginx's number for a client that went away before its answer
_STATUSES = frozenset(str(status) for status in (LEFT, *HTTPStatus))


class _Gaps(Collector):
    """Gaps between tokens: a histogram that takes a whole answer's gaps at once, without a lock for each."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_SECONDS) + 1)
        self._sum_seconds = 0.0

    def add(self, gaps_seconds: Iterable[float]) -> None:
        """Count every gap, in seconds."""
        for gap in gaps_seconds:
            self._counts[bisect_left(BUCKETS_SECONDS, gap)] += 1
            self._sum_seconds += gap

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram with the cumulative counts that the exposition format wants."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, BUCKETS_SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        name = "proxy_inter_token_latency_seconds"
        yield HistogramMetricFamily(name, "Gap between successive token chunks.", buckets, self._sum_seconds)


class _Lean(Collector):
    """What the registry holds without the `_created` samples, which would double the number of series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


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
        self._requests()
        self._latencies()
        self._failures()
        self._memory()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"proxy_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"proxy_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"proxy_{name}_seconds", text, buckets=BUCKETS_SECONDS, registry=self.registry)

    def _requests(self) -> None:
        self._request = self._counter(
            "requests", "Exchanges ended, by route, status and outcome.", "route", "status", "outcome"
        )
        self._trail = self._counter("trail_steps", "Exchanges that a step changed, by step.", "step")
        self._in_flight = self._gauge("requests_in_flight", "Exchanges running now.", "route")
        self._tokens = {
            name: self._counter(f"{name}_tokens", f"{name.capitalize()} tokens by vLLM's usage, by model.", "model")
            for name in ("prompt", "cached", "generated")
        }

    def _latencies(self) -> None:
        self._first_token = self._histogram("time_to_first_token", "Receipt of a request to its first token.")
        self._end_to_end = self._histogram("end_to_end", "Receipt of a generating request to its answer's end.")
        self._overhead = self._histogram("overhead", "Receipt of a request to its forwarding: the proxy's own part.")
        self._gaps = _Gaps()
        self.registry.register(self._gaps)

    def _failures(self) -> None:
        self._aborts = self._counter("aborts", "Exchanges that the client left, by phase.", "phase")
        self._upstream = self._counter("upstream_errors", "Failures of the upstream, by kind.", "kind")
        self._rejects = self._counter("rejects", "Requests that the proxy refused, by error code.", "code")
        self._step_failures = self._counter("step_failures", "Steps that failed and were skipped, by step.", "step")

    def _memory(self) -> None:
        self._sessions = self._gauge("sessions_live", "Sessions in memory now.")
        self._created = self._counter("sessions_created", "Sessions begun.")
        self._expired = self._counter("sessions_expired", "Sessions whose time ran out.")
        self._swept = self._counter("sessions_swept", "Sessions deleted, by the sweep or on demand.")
        self._lag = self._gauge("store_lag_seconds", "Age of the oldest write that is not on disk yet.")
        self._store_failures = self._counter("store_failures", "Failures of the store, by kind.", "kind")

    def begin(self, route: str) -> None:
        """Count one more exchange in flight."""
        self._in_flight.labels(_one_of(route, ROUTES, UNMATCHED)).inc()

    def end(self, route: str, status: int, outcome: str) -> None:
        """Count the end of an exchange that `begin` counted; `status` is `LEFT` where the client left before one."""
        route = _one_of(route, ROUTES, UNMATCHED)
        code = str(status)
        label = code if code in _STATUSES else f"{code[0]}xx" if 100 <= status <= 599 else OTHER
        self._in_flight.labels(route).dec()
        self._request.labels(route, label, _one_of(outcome, OUTCOMES, "failed")).inc()

    def trail(self, steps: Iterable[str]) -> None:
        """Count the steps that changed one request."""
        for step in steps:
            self._trail.labels(_one_of(step, STEPS)).inc()

    def observe_first_token(self, seconds: float) -> None:
        """Record the time from receipt to the first token."""
        self._first_token.observe(seconds)

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
            self._tokens[name].labels(model).inc(max(count, 0))

    def _model(self, model: str) -> str:
        if model not in self._models and (len(self._models) >= _MOST_MODELS or model not in self.known_models()):
            return OTHER
        self._models.add(model)
        return model

    def aborted(self, phase: str) -> None:
        """Count an exchange that the client left in `phase`."""
        self._aborts.labels(_one_of(phase, ABORT_PHASES)).inc()

    def upstream_error(self, kind: str) -> None:
        """Count a failure of the upstream."""
        self._upstream.labels(_one_of(kind, UPSTREAM_ERRORS)).inc()

    def rejected(self, code: str | int | None) -> None:
        """Count an answer that the proxy gave itself, by its error code."""
        self._rejects.labels(_one_of(str(code), REJECT_CODES)).inc()

    def step_failed(self, step: str) -> None:
        """Count a step that failed: its request went on as received."""
        self._step_failures.labels(_one_of(step, STEP_FAILURES)).inc()

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
        self._store_failures.labels(_one_of(kind, STORE_FAILURES)).inc()

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(_Lean(self.registry))
