"""/health says that the process lives, /ready that it can serve, /metrics is for those who may."""

import socket
from typing import Any

import pytest

from proxy.config import Key
from proxy.downstream.auth import hash_token
from tests.conftest import RunningProxy, StartProxy
from tests.fake_vllm import FakeVllm

KEYS = (Key("ui", hash_token("sk-ui"), trusted=True), Key("ops", hash_token("sk-ops"), admin=True))


async def get(proxy: RunningProxy, path: str, token: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with proxy.session.get(proxy.url + path, headers=headers) as answer:
        return answer.status, await (answer.json() if "json" in answer.content_type else answer.text())


async def test_all_is_well(proxy: RunningProxy) -> None:
    """Both answer 200 with JSON."""
    assert await get(proxy, "/health") == (200, {"status": "ok"})
    status, told = await get(proxy, "/ready")
    assert (status, told["status"], told["upstream"]) == (200, "ok", "ok")


async def test_without_vllm_it_lives_but_is_not_ready(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """An orchestrator must not kill the proxy because vLLM loads its model."""
    await fake_vllm.stop()
    proxy = await start_proxy()
    assert (await get(proxy, "/health"))[0] == 200
    status, told = await get(proxy, "/ready")
    assert (status, told["status"], told["upstream"]) == (503, "unavailable", "down")


async def test_a_readiness_check_finds_a_vllm_that_came_back(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """The model list is asked for at once, not when the next poll is due."""
    await fake_vllm.stop()
    proxy = await start_proxy()
    assert (await get(proxy, "/v1/models"))[0] == 503
    await fake_vllm.start()
    proxy.state.models._polled_at -= 2  # so long ago that a poke counts
    assert (await get(proxy, "/ready"))[0] == 200
    assert (await get(proxy, "/v1/models"))[0] == 200


async def test_a_draining_proxy_lives_is_not_ready_and_takes_no_work(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """New requests are told to come back; what runs is the drain's business."""
    proxy.state.draining = True
    assert (await get(proxy, "/health"))[0] == 200
    status, told = await get(proxy, "/ready")
    assert (status, told["status"], told["draining"]) == (503, "draining", True)
    async with proxy.post({"input": "x"}, "/v1/embeddings") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "draining")
        assert int(answer.headers["Retry-After"]) > 0
        assert answer.headers["Connection"] == "close"
    assert not fake_vllm.of("/v1/embeddings")
    assert (await get(proxy, "/metrics"))[0] == 200


async def test_metrics_are_open_on_loopback_without_keys(proxy: RunningProxy) -> None:
    """The first minute needs no configuration."""
    status, text = await get(proxy, "/metrics")
    assert status == 200 and "proxy_requests_total" in text


@pytest.mark.parametrize(
    ("settings", "token", "status"),
    [
        ({"keys": KEYS}, None, 401),
        ({"keys": KEYS}, "sk-ui", 401),
        ({"keys": KEYS}, "sk-ops", 200),
        ({"keys": KEYS[:1]}, "sk-ui", 401),
        ({"metrics__token_hash": hash_token("m")}, None, 401),
        ({"metrics__token_hash": hash_token("m")}, "m", 200),
        ({"metrics__token_hash": hash_token("m"), "keys": KEYS}, "sk-ui", 401),
        ({"metrics__token_hash": hash_token("m"), "keys": KEYS}, "m", 200),
    ],
)
async def test_a_plain_client_key_never_opens_the_metrics(
    start_proxy: StartProxy, settings: dict[str, Any], token: str | None, status: int
) -> None:
    """They tell what other users do."""
    proxy = await start_proxy(**settings)
    assert (await get(proxy, "/metrics", token))[0] == status
    # And the token of the metrics opens nothing else.
    if token == "m" and "keys" in settings:
        assert (await get(proxy, "/v1/models", token))[0] == 401


async def test_metrics_on_a_port_of_their_own_are_404_on_the_main_one(start_proxy: StartProxy) -> None:
    """Prometheus does not pass the way that users take."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    proxy = await start_proxy(metrics__port=port)
    assert (await get(proxy, "/metrics"))[0] == 404
    async with proxy.session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        assert answer.status == 200 and "proxy_in" in await answer.text()
    async with proxy.session.get(f"http://127.0.0.1:{port}/v1/models") as answer:
        assert (answer.status, answer.content_type) == (404, "application/json")


@pytest.mark.parametrize("degraded", ["no space is left", None])
async def test_a_store_without_its_file_is_degraded_but_ready(proxy: RunningProxy, degraded: str | None) -> None:
    """It serves from memory: worse, but far better than not at all."""

    class Store:
        lag_seconds = 3.5

        def __init__(self) -> None:
            self.degraded = degraded

    proxy.state.store = Store()  # type: ignore[assignment]  # only what /ready and /metrics look at
    status, told = await get(proxy, "/ready")
    assert (status, told["status"]) == (200, "degraded" if degraded else "ok")
    assert "proxy_store_lag_seconds 3.5" in (await get(proxy, "/metrics"))[1]
