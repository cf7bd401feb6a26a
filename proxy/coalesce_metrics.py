"""The metrics of coalescing, in the registry of proxy.metrics."""

from prometheus_client import CollectorRegistry, Counter, Histogram

# A wait is a fraction of a second (a chat that is about to begin) to the ten seconds of coalesce.hold_seconds.
BUCKETS_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 5.0, 10.0, 20.0)
HOW = ("joined", "superseded", "debounced", "merged")


class CoalesceMetrics:
    """Requests that needed no answer of their own, sharers that were cut, and how long tasks waited."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Requests that needed no answer of their own, by how."
        spared = Counter("proxy_coalesced", text, ("how",), registry=registry)
        self._spared = {how: spared.labels(how) for how in HOW}
        text = "Sharers of a run that read too slowly and were cut."
        self._cut = Counter("proxy_slow_sharers_cut", text, registry=registry)
        text = "How long tasks waited for their chat's answer."
        self._held = Histogram("proxy_task_held_seconds", text, buckets=BUCKETS_SECONDS, registry=registry)

    def spared(self, how: str) -> None:
        """Count a request that needed no answer of its own; `how` is one of `HOW`."""
        self._spared[how].inc()

    def cut(self) -> None:
        """Count a sharer that was cut."""
        self._cut.inc()

    def held(self, seconds: float) -> None:
        """Record how long a task waited."""
        self._held.observe(seconds)
