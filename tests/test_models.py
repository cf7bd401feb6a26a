"""GET /v1/models: there while vLLM is away, quick to say so when it never was there."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from yarl import URL

from tests.conftest import RunningProxy, StartProxy
from tests.fake_replies import Hang, Raw
from tests.fake_vllm import FakeVllm

PATH = "/v1/models"
LIST = b'{"data" : [ {"id":"org/model","max_model_len":4e3} ],\n "object":"list"}'


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Wait until `condition` holds; the test's own limit ends it."""
    async with asyncio.timeout(5):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.01)


async def test_the_list_is_what_vllm_sent_byte_for_byte(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Fields that we do not know, and spelling, are its own."""
    fake_vllm.answers[PATH] = Raw([LIST], headers={"Content-Type": "application/json"})
    proxy = await start_proxy()
    async with proxy.session.get(proxy.url + PATH) as answer:
        assert (answer.status, await answer.read(), answer.content_type) == (200, LIST, "application/json")
        assert "X-Prefix-Proxy-Stale" not in answer.headers


@pytest.mark.parametrize("name", ["org/model", "org%2Fmodel"])
async def test_one_model_comes_from_the_same_cache(start_proxy: StartProxy, fake_vllm: FakeVllm, name: str) -> None:
    """SDKs ask for one by its id, which has a slash more often than not."""
    fake_vllm.answers[PATH] = Raw([LIST])
    proxy = await start_proxy()
    async with proxy.session.get(f"{proxy.url}{PATH}/{name}") as answer:
        assert (answer.status, (await answer.json())["id"]) == (200, "org/model")
    assert [seen.path for seen in fake_vllm.seen if seen.path.startswith(PATH)] == [PATH]


@pytest.mark.parametrize("name", ["other", "../metrics", "%2e%2e/%2e%2e/metrics"])
async def test_a_model_that_is_not_on_the_list_is_404_without_asking_vllm(
    proxy: RunningProxy, fake_vllm: FakeVllm, name: str
) -> None:
    """Whatever stands there is compared, never forwarded."""
    async with proxy.session.get(URL(f"{proxy.url}{PATH}/{name}", encoded=True)) as answer:
        assert answer.status == 404
        assert "error" in await answer.json()
    assert {seen.path for seen in fake_vllm.seen} <= {PATH, "/metrics"}
    assert len(fake_vllm.of("/metrics")) <= 1  # the one for the block size


async def test_the_list_outlives_a_restart_and_is_marked_stale_meanwhile(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """Open WebUI shows a blank page without it."""
    proxy = await start_proxy(models__refresh_seconds=0.05)

    async def stale() -> bool:
        async with proxy.session.get(proxy.url + PATH) as answer:
            assert answer.status == 200
            assert (await answer.json())["data"][0]["id"] == "fake"
            return answer.headers.get("X-Prefix-Proxy-Stale") == "true"

    assert not await stale()
    await fake_vllm.stop()
    await until(stale)
    await fake_vllm.start()

    async def fresh() -> bool:
        return not await stale()

    await until(fresh)


async def test_a_vllm_that_hangs_costs_no_client_any_time(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """The list that is known goes out at once, while one poll waits, not one for each client."""
    proxy = await start_proxy(models__refresh_seconds=0.05)
    await until(lambda: bool(proxy.state.models.known()))
    fake_vllm.answers[PATH] = Hang()
    await asyncio.sleep(0.1)
    asked, begun = len(fake_vllm.of(PATH)), time.monotonic()
    for _ in range(20):
        async with proxy.session.get(proxy.url + PATH) as answer:
            assert answer.status == 200
    assert time.monotonic() - begun < 0.5
    assert len(fake_vllm.of(PATH)) == asked


@pytest.mark.parametrize("how", ["hangs", "refuses", "html"])
async def test_a_cold_start_without_vllm_is_503_within_two_seconds(
    start_proxy: StartProxy, fake_vllm: FakeVllm, how: str
) -> None:
    """The answer says when to try again, and vLLM is not asked once for each client."""
    if how == "refuses":
        await fake_vllm.stop()
    fake_vllm.answers[PATH] = Hang() if how == "hangs" else Raw([b"<html>"], status=502)
    proxy = await start_proxy()

    async def ask() -> None:
        async with proxy.session.get(proxy.url + PATH) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (503, "upstream_unavailable")
            assert int(answer.headers["Retry-After"]) > 0

    begun = time.monotonic()
    await asyncio.gather(*(ask() for _ in range(10)))
    assert time.monotonic() - begun < 2
    assert len(fake_vllm.of(PATH)) <= 1
