"""What the fake vLLM tells at /metrics: names, types and labels of vLLM 0.32.0, figures from the requests it saw."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.fake_faults import Seen

SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
NAMES = frozenset({
    "process_start_time_seconds",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
    "vllm:cache_config_info",
})  # fmt: skip
"""Every name that is told here, and so every name that dashboard and rules may use."""


@dataclass
class Gauges:
    """What a test may say of the engine; everything else is counted."""

    waiting: int = 0
    kv_cache_usage: float = 0.0
    preemptions: int = 0
    started: float = field(default_factory=time.time)  # wall seconds; another one is another process


def exposition(
    gauges: Gauges, seen: Sequence[Seen], *, model: str, live: int, queries: int, hits: int, block_size: int
) -> str:  # fmt: skip
    """Return the text of /metrics: `seen` are the requests for an answer."""
    label, blocks = f'engine="0",model_name="{model}"', 1000
    answered = [each for each in seen if each.ended_at is not None and each.aborted_at is None and each.n]
    seconds = [each.ended_at - each.arrived_at for each in answered if each.ended_at is not None]
    lines = [
        *_plain("process_start_time_seconds", "gauge", "", gauges.started),
        *_plain("vllm:num_requests_running", "gauge", label, live),
        *_plain("vllm:num_requests_waiting", "gauge", label, gauges.waiting),
        *_plain("vllm:kv_cache_usage_perc", "gauge", label, gauges.kv_cache_usage),
        *_plain("vllm:prefix_cache_queries_total", "counter", label, queries),
        *_plain("vllm:prefix_cache_hits_total", "counter", label, hits),
        *_plain("vllm:num_preemptions_total", "counter", label, gauges.preemptions),
        *_plain("vllm:prompt_tokens_total", "counter", label, sum(each.n for each in seen)),
        *_plain("vllm:generation_tokens_total", "counter", label, sum(each.generated for each in seen)),
        *_plain("vllm:request_success_total", "counter", f'{label},finished_reason="stop"', len(answered)),
        *_histogram("vllm:time_to_first_token_seconds", label, seconds),
        *_histogram("vllm:e2e_request_latency_seconds", label, seconds),
        *_histogram("vllm:request_queue_time_seconds", label, [0.0 for _ in answered]),
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{block_size="{block_size}",enable_prefix_caching="True",engine="0",'
        f'kv_cache_size_tokens="{blocks * block_size}",num_gpu_blocks="{blocks}",'
        'prefix_caching_hash_algo="sha256"} 1.0',
    ]
    return "\n".join(lines) + "\n"


def _plain(name: str, kind: str, labels: str, value: float) -> Iterator[str]:
    yield f"# TYPE {name.removesuffix('_total')} {kind}"
    yield f"{name}{{{labels}}} {float(value)}" if labels else f"{name} {float(value)}"


def _histogram(name: str, labels: str, values: Iterable[float]) -> Iterator[str]:
    held = list(values)
    yield f"# TYPE {name} histogram"
    for bound in SECONDS:
        yield f'{name}_bucket{{{labels},le="{bound}"}} {float(sum(value <= bound for value in held))}'
    yield f'{name}_bucket{{{labels},le="+Inf"}} {float(len(held))}'
    yield f"{name}_count{{{labels}}} {float(len(held))}"
    yield f"{name}_sum{{{labels}}} {sum(held)}"
