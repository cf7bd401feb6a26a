"""Rates on the wire: who is counted as whom, what an answer costs, on every route that vLLM answers."""

import asyncio
from typing import Any

import pytest

from proxy.config import Key
from proxy.core.meter import Meter
from proxy.downstream.auth import hash_token
from proxy.downstream.entering import computed_tokens
from proxy.downstream.passthrough import PATHS
from tests.bodies import chat, stream
from tests.conftest import RunningProxy, StartProxy
from tests.fake_replies import Reply
from tests.fake_vllm import FakeVllm


def key(**fields: Any) -> tuple[Key, ...]:
    """Return one trusted key, sk-a, with these limits."""
    return (Key("a", hash_token("sk-a"), trusted=True, **fields),)


async def ask(
    proxy: RunningProxy, user: str = "", path: str = "/v1/chat/completions", **fields: Any
) -> tuple[int, Any]:
    """Send one request as `user`; return status and body."""
    named = {"X_OpenWebUI_User_Id": user} if user else {}
    async with proxy.post(chat(**fields), path, Authorization="Bearer sk-a", **named) as answer:
        return answer.status, await answer.json()


async def test_a_key_has_its_rate_whatever_the_route(start_proxy: StartProxy) -> None:
    """One bucket for all of them."""
    proxy = await start_proxy(keys=key(requests_per_minute=2 + len(PATHS)))
    for path in ("/v1/chat/completions", "/v1/completions", *PATHS):
        status, _ = await ask(proxy, path=path, prompt="x", input="x")
        assert status != 429, path
    async with proxy.post(chat(), Authorization="Bearer sk-a") as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["type"], error["code"]) == (429, "requests", "rate_limit_exceeded")
        assert int(answer.headers["Retry-After"]) >= 1
    assert proxy.sample("proxy_rate_limited_total", scope="key", what="requests") == 1
    async with proxy.session.get(proxy.url + "/v1/models", headers={"Authorization": "Bearer sk-a"}) as answer:
        assert answer.status == 200


async def test_each_user_has_a_rate_of_its_own(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """And nobody's refused request reaches vLLM."""
    proxy = await start_proxy(keys=key(), rates__tenant_requests_per_minute=2)
    statuses = [(await ask(proxy, user))[0] for user in ("u", "u", "u", "v", "v", "v")]
    assert statuses == [200, 200, 429, 200, 200, 429]
    assert len(fake_vllm.of("/v1/chat/completions")) == 4
    assert proxy.sample("proxy_rate_limited_total", scope="tenant", what="requests") == 2


async def test_so_many_requests_of_a_user_at_once(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """The place is free when the answer has ended."""
    gate = asyncio.Event()
    fake_vllm.reply_to = lambda body: Reply(gates={0: gate}) if "messages" in body else None
    proxy = await start_proxy(rates__tenant_concurrent=1)
    async with proxy.post(stream()) as first:
        assert (await ask(proxy))[0] == 429
        gate.set()
        await first.read()
    assert (await ask(proxy))[0] == 200


async def test_tokens_count_as_computed_and_not_as_sent(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Who uses the cache well may ask more."""
    usage = {"prompt_tokens": 1000, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 960}}
    fake_vllm.default = Reply(usage=usage)
    proxy = await start_proxy(keys=key(tokens_per_minute=90))
    assert [(await ask(proxy))[0] for _ in range(3)] == [200, 200, 429]
    _, body = await ask(proxy)
    assert body["error"]["type"] == "tokens"


def test_an_answer_that_was_cut_costs_what_came_of_it() -> None:
    """Leaving early is not free."""
    meter = Meter()
    assert computed_tokens(meter) == 0
    for i in range(5):
        meter.feed(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n', float(i))
    assert computed_tokens(meter) == 5


@pytest.mark.parametrize("profile", ["off", "balanced"])
async def test_without_limits_nobody_is_counted(start_proxy: StartProxy, profile: str) -> None:
    """The default."""
    proxy = await start_proxy(profile=profile)
    assert [(await ask(proxy))[0] for _ in range(20)] == [200] * 20
