"""What vLLM's /metrics says of the engine's state now."""

import re
from dataclasses import dataclass

_SAMPLE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{[^\n]{0,4000}\})? ([0-9.e+-]{1,24})$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Gauges:
    """Requests in the engine, and the fuller of its KV caches (0 to 1); None where it does not tell."""

    running: int | None = None
    waiting: int | None = None
    kv_cache_usage: float | None = None


def parse_gauges(metrics: bytes) -> Gauges:
    """Read /metrics; requests of several engines are added up."""
    found: dict[bytes, list[float]] = {}
    for name, value in _SAMPLE.findall(metrics):
        try:
            number = float(value)
        except ValueError:
            continue
        found.setdefault(name, []).append(number)
    running, waiting = found.get(b"num_requests_running"), found.get(b"num_requests_waiting")
    usage = found.get(b"kv_cache_usage_perc")
    return Gauges(
        running=None if running is None else int(sum(running)),
        waiting=None if waiting is None else int(sum(waiting)),
        kv_cache_usage=None if usage is None else max(usage),
    )
