"""What vLLM's /metrics says of its engine."""

from proxy.upstream.gauges import Gauges, parse_gauges

LABELS = 'engine="{}",model_name="m"'


def test_requests_of_all_engines_are_added_and_the_fullest_cache_counts() -> None:
    """Two engines behind one API server."""
    lines = []
    for engine, (running, waiting, usage) in enumerate(((3.0, 0.0, 0.25), (1.0, 2.0, 0.5))):
        label = LABELS.format(engine)
        lines += [
            f"vllm:num_requests_running{{{label}}} {running}",
            f"vllm:num_requests_waiting{{{label}}} {waiting}",
            f'vllm:num_requests_waiting_by_reason{{{label},reason="capacity"}} 9.0',
            f"vllm:kv_cache_usage_perc{{{label}}} {usage}",
        ]
    assert parse_gauges("\n".join(lines).encode()) == Gauges(4, 2, 0.5)


def test_what_is_not_told_is_not_made_up() -> None:
    """Another server, an error page, a number that is none."""
    assert parse_gauges(b"<html>") == Gauges()
    assert parse_gauges(b"vllm:num_requests_running 1.2.3\n") == Gauges()
