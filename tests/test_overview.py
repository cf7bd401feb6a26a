"""What the status page is told: right figures, and nothing that anybody wrote."""

import asyncio
import json
from typing import Any

from proxy.downstream.status import OVERVIEW
from proxy.overview import SHOWN_CHATS, Overview
from tests.bodies import eventually
from tests.conftest import RunningProxy, StartProxy
from tests.fake_replies import Reply
from tests.fake_vllm import FakeVllm


async def ask(proxy: RunningProxy, chat: str, messages: list[dict[str, str]]) -> None:
    """Send one streamed request of a chat."""
    headers = {"X_OpenWebUI_User_Id": "secretive-user", "X_OpenWebUI_Chat_Id": chat}
    async with proxy.post({"model": "fake", "messages": messages, "stream": True}, **headers) as response:
        await response.read()


async def told(proxy: RunningProxy) -> dict[str, Any]:
    """Return the overview of this moment."""
    return dict(await Overview(proxy.state, seconds=0.0).now())


async def test_a_chat_shows_its_reuse_and_the_cause_of_its_last_break(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Two turns that grow, then another system message, then one that grows again."""
    messages = [
        {"role": "system", "content": "You help. " * 20},
        {"role": "user", "content": "a question with many words " * 20},
    ]
    for turn in range(4):
        if turn == 2:
            messages[0] = {"role": "system", "content": "Another one. " * 20}
        await ask(proxy, "named-chat", messages)
        answer = {"role": "assistant", "content": "All right."}
        messages += [answer, {"role": "user", "content": f"and {turn} " * 20}]
    moment = await told(proxy)
    [chat] = moment["chats"]["shown"]
    assert (chat["cause"], chat["cause_ago"], chat["model"], moment["chats"]["live"]) == ("system", 1, "fake", 1)
    seen = fake_vllm.generations
    assert chat["reuse"] == round(sum(each.hit for each in seen) / sum(each.n for each in seen), 4)
    assert chat["saved_tokens"] == moment["totals"]["tokens_saved"] == sum(each.hit for each in seen)
    assert (moment["totals"]["requests"], moment["vllm"]["state"], moment["store"]) == (4, "ok", "ok")


async def test_requests_in_flight_are_listed_while_they_run(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """With route and time, whether an answer has begun, and with vLLM's own figures."""
    end = asyncio.Event()
    fake_vllm.replies.append(Reply(gates={1: end}))
    fake_vllm.gauges.kv_cache_usage = 0.5
    running = proxy.state.tasks.spawn(ask(proxy, "c", [{"role": "user", "content": "hi"}]), name="test")
    await fake_vllm.wait_for(1)
    await eventually(lambda: proxy.sample("proxy_requests_in_flight"))
    moment = await told(proxy)
    end.set()
    await running
    [shown] = moment["in_flight"]["shown"]
    assert (shown["route"], moment["in_flight"]["running"]) == ("/v1/chat/completions", 1)
    assert (moment["vllm"]["running"], moment["vllm"]["kv_cache_usage"]) == (1, 0.5)
    assert (await told(proxy))["in_flight"]["running"] == 0


async def test_nothing_that_a_user_wrote_or_is_called_by_is_in_it(proxy: RunningProxy) -> None:
    """Texts, users and chat ids stay out; ids are those of the internal routes."""
    await ask(proxy, "secretive-chat", [{"role": "user", "content": "secretive words"}])
    assert "secretive" not in json.dumps(await told(proxy))


async def test_however_many_chats_live_only_the_latest_are_shown(start_proxy: StartProxy) -> None:
    """The page stays small."""
    proxy = await start_proxy()
    for number in range(SHOWN_CHATS + 5):
        await ask(proxy, f"c{number}", [{"role": "user", "content": f"{number}"}])
    moment = await told(proxy)
    assert (len(moment["chats"]["shown"]), moment["chats"]["live"]) == (SHOWN_CHATS, SHOWN_CHATS + 5)


async def test_many_viewers_cost_one_look(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """vLLM is asked once in two seconds, however many pages are open."""
    await eventually(lambda: fake_vllm.of("/metrics"))  # the proxy asks for the block size at its start
    before = len(fake_vllm.of("/metrics"))
    await asyncio.gather(*(proxy.app[OVERVIEW].now() for _ in range(20)))
    assert len(fake_vllm.of("/metrics")) <= before + 1


async def test_a_vllm_that_is_away_is_told_as_down(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """And its figures as not known."""
    await fake_vllm.stop()
    moment = await told(proxy)
    assert (moment["vllm"]["state"], moment["vllm"]["running"]) == ("down", None)
