"""Metrics: few series whatever clients send, and buckets that fit."""

import random
import re
from pathlib import Path

import orjson
import pytest

import proxy
from proxy.metrics import BUCKETS_SECONDS, REJECT_CODES, STEP_FAILURES, UPSTREAM_ERRORS, Metrics
from tests.conftest import RunningProxy, StartProxy
from tests.fake_vllm import FakeVllm


def series(metrics: Metrics) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def noise(random_source: random.Random) -> str:
    return "".join(random_source.choices('abcABC/"\\\n{}=é', k=12))


def test_any_argument_ends_in_a_small_closed_set_of_labels() -> None:
    """A typo in `model`, a scanner's paths or an error's text must not become series for ever."""
    metrics, source = Metrics(lambda: ("known",)), random.Random(7)
    metrics.tokens("known", prompt=1, cached=1, generated=1)
    before = set(series(metrics))
    for _ in range(10_000):
        text = noise(source)
        metrics.begin(text)
        metrics.end(text, source.choice((200, 404, 299, 999, -1)), text)
        metrics.tokens(text, prompt=1, cached=0, generated=-5)
        metrics.trail((text, "salt"))
        for count in (metrics.aborted, metrics.upstream_error, metrics.rejected, metrics.step_failed):
            count(text)
        metrics.store_failed(text)
    after = series(metrics)
    assert len(set(after) - before) < 50
    assert after['proxy_prompt_tokens_total{model="other"}'] == 10_000
    assert not [name for name in after if "known" not in name and '"' in name and "a\\" in name]


def test_the_models_that_are_labels_are_bounded_too() -> None:
    """A server with a thousand adapters is none of ours."""
    metrics = Metrics(lambda: [f"adapter-{index}" for index in range(1000)])
    for index in range(1000):
        metrics.tokens(f"adapter-{index}", prompt=1, cached=0, generated=1)
    assert len([name for name in series(metrics) if name.startswith("proxy_prompt_tokens_total")]) == 65


async def test_odd_requests_through_the_whole_proxy_add_fewer_than_fifty_series(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """As above, with a positive control: what was asked for is counted."""
    proxy, source = await start_proxy(), random.Random(3)

    async def ask(path: str, body: dict[str, object]) -> int:
        name = str(source.random())
        headers = {"X-OpenWebUI-User-Id": name, "X-OpenWebUI-Chat-Id": name, "X-OpenWebUI-User-Name": "F%C3%A1 100% é"}
        async with proxy.session.post(proxy.url + path, data=orjson.dumps(body), headers=headers) as answer:
            await answer.read()
            return answer.status

    message = {"role": "user", "content": "hi"}
    assert await ask("/v1/chat/completions", {"model": "fake", "messages": [message]}) == 200
    before = set(series(proxy.state.metrics))
    for _ in range(150):
        await ask("/v1/chat/completions", {"model": str(source.random()), "messages": [message]})
        await ask(f"/v1/{source.random()}", {})
        await ask("/v1/chat/completions", {"messages": str(source.random())})
    after = series(proxy.state.metrics)
    assert len(set(after) - before) < 50
    # 150 above and nothing else: each path had a name of its own.
    assert proxy.sample("proxy_requests_total", route="unmatched", status="404") == 150


def test_gaps_are_counted_in_bulk_in_their_buckets() -> None:
    """A whole answer at once: one call, cumulative buckets, the right sum."""
    metrics = Metrics()
    metrics.observe_gaps([0.0004, 0.0005, 0.03, 0.03, 500.0])
    found = series(metrics)
    name = "proxy_inter_token_latency_seconds"
    assert found[f'{name}_bucket{{le="0.0005"}}'] == 2
    assert found[f'{name}_bucket{{le="0.02"}}'] == 2
    assert found[f'{name}_bucket{{le="0.05"}}'] == 4
    assert found[f'{name}_bucket{{le="120.0"}}'] == 4
    assert found[f'{name}_bucket{{le="+Inf"}}'] == found[f"{name}_count"] == 5
    assert found[f"{name}_sum"] == pytest.approx(500.0609)


def test_buckets_reach_from_half_a_millisecond_to_two_minutes() -> None:
    """From the proxy's own cost to a cold prefill in a full queue."""
    assert (BUCKETS_SECONDS[0], BUCKETS_SECONDS[-1]) == (0.0005, 120.0)
    assert list(BUCKETS_SECONDS) == sorted(set(BUCKETS_SECONDS))


def test_two_apps_do_not_share_their_numbers() -> None:
    """The registry is the app's own, and no series is there only to say when another began."""
    first, second = Metrics(), Metrics()
    first.begin("/health")
    assert series(first)['proxy_requests_in_flight{route="/health"}'] == 1
    assert 'proxy_requests_in_flight{route="/health"}' not in series(second)
    assert not [name for name in series(first) if "_created" in name.replace("sessions_created_total", "")]


async def test_an_exchange_is_counted_once_with_its_route_status_and_outcome(proxy: RunningProxy) -> None:
    """In flight while it runs, counted when it ends."""
    async with proxy.post({"input": "x"}, "/v1/embeddings") as answer:
        assert answer.status == 200
    assert proxy.sample("proxy_requests_total", route="/v1/embeddings", status="200", outcome="completed") == 1
    assert proxy.sample("proxy_requests_total") == 1
    assert proxy.sample("proxy_requests_in_flight") == 0


@pytest.mark.parametrize(
    ("pattern", "known"),
    [
        (r'code="([a-z_]+)"', REJECT_CODES),
        (r'UpstreamFailure\("([a-z_]+)"', (*UPSTREAM_ERRORS, "drained")),
        (r'step_failed\("([a-z_]+)"', STEP_FAILURES),
    ],
)
def test_what_the_code_counts_has_a_label_of_its_own(pattern: str, known: tuple[str, ...]) -> None:
    """A value that lacks here would hide among the others."""
    used = {word for file in Path(proxy.__path__[0]).rglob("*.py") for word in re.findall(pattern, file.read_text())}
    assert used and used <= set(known)
