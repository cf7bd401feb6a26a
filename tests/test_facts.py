"""What the shell looks up for a request, as it shows in what goes up: caps, salts, steps, priorities."""

import asyncio
import json
from typing import Any

import pytest

from proxy.config import Key
from proxy.core.rank import TASK_PRIORITY
from proxy.downstream.auth import hash_token
from tests.conftest import RunningProxy, StartProxy
from tests.fake_replies import Reply, json_error
from tests.fake_vllm import FakeVllm
from tests.flights import answer, runs, who
from tests.told import QUERY, TAGS, TITLE, model, sent, system, user

KEYS = (Key("ui", hash_token("sk-ui"), trusted=True), Key("app", hash_token("sk-app"), max_output_tokens=70))
UI, APP = {"Authorization": "Bearer sk-ui"}, {"Authorization": "Bearer sk-app"}
CLOCK = "You help. Now: 2026-01-02 10:00:01 UTC."


async def started(start_proxy: StartProxy, **settings: Any) -> RunningProxy:
    """Start a proxy that knows vLLM's models when this returns."""
    proxy = await start_proxy(**settings)
    await proxy.state.models.get(wait_seconds=5)
    return proxy


async def test_a_model_that_reasons_has_no_cap_but_its_own_or_the_keys(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """Its thoughts count as output; what names the model or the caller holds all the same."""
    fake_vllm.default = Reply("Yes.", reasoning="Well now.")
    lengths: dict[str, Any] = {"lengths__max_output_tokens": 100}
    proxy = await started(start_proxy, keys=KEYS, **lengths)
    assert (await sent(proxy, fake_vllm, [user("hi")], of=UI))["max_tokens"] == 100
    assert "max_tokens" not in await sent(proxy, fake_vllm, [user("hi")], of=UI)
    assert (await sent(proxy, fake_vllm, [user("hi")], of=APP))["max_tokens"] == 70
    named = await started(start_proxy, lengths__models={"fake": 60}, **lengths)
    assert [(await sent(named, fake_vllm, [user("hi")]))["max_tokens"] for _ in range(2)] == [60, 60]


async def test_a_named_model_has_its_cap_unless_the_caller_has_one(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """User before key before model before all."""
    lengths: dict[str, Any] = {
        "lengths__max_output_tokens": 100,
        "lengths__models": {"fake": 60},
        "lengths__users": {"vip": 500},
    }
    proxy = await started(start_proxy, keys=KEYS, **lengths)
    cases = (({**UI, **who("vip")}, 500), ({**UI, **who("u1")}, 60), ({**APP, **who("vip")}, 70), (APP, 70))
    assert [(await sent(proxy, fake_vllm, [user("hi")], of=of))["max_tokens"] for of, _ in cases] == [
        cap for _, cap in cases
    ]


async def test_a_task_has_the_salt_of_its_chat(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Else it could not go on with the chat's cached prompt; another chat has another salt."""
    proxy = await started(start_proxy, salt__isolation="session")
    first = (await sent(proxy, fake_vllm, [user("hi")]))["cache_salt"]
    of_chat = [await sent(proxy, fake_vllm, [user("task")], of=who(chat="c", task=task)) for task in (TITLE, QUERY)]
    assert [body["cache_salt"] for body in of_chat] == [first, first]
    others = (who(chat="d"), who("u2", chat="c"), who(chat="d", task=TAGS), who(task=TAGS))
    salts = [(await sent(proxy, fake_vllm, [user("hi")], of=of))["cache_salt"] for of in others]
    assert first not in salts and salts[0] == salts[2] and len(set(salts)) == 3


async def test_a_second_key_turns_salts_on(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """With one key there is nobody to keep apart; a client's own salt never goes up."""
    one = await started(start_proxy, keys=KEYS[:1])
    assert "cache_salt" not in await sent(one, fake_vllm, [user("hi")], of=UI, cache_salt="mine")
    two = await started(start_proxy, keys=KEYS)
    ui, app = [(await sent(two, fake_vllm, [user("hi")], of=of, cache_salt="mine"))["cache_salt"] for of in (UI, APP)]
    assert "mine" not in (ui, app) and ui != app


async def test_without_a_session_no_text_moves(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """A task and a request for several answers go as they came; limits and salt hold there too."""
    told = [system(CLOCK), user("hi")]
    assert (await sent(proxy, fake_vllm, told, of=who(chat="c", task=QUERY)))["messages"] == told
    assert (await sent(proxy, fake_vllm, told, n=2))["messages"] == told
    assert (await sent(proxy, fake_vllm, told))["messages"] != told


async def test_a_task_of_a_chat_that_nobody_named_knows_no_prompt(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """What is found by content may be another's."""
    paste = "\n".join(f"line {n}" for n in range(200))
    await sent(proxy, fake_vllm, [user(paste)], of=who())
    quoted = user(f"Tags.\n<chat_history>\nUSER: {paste}\nASSISTANT: All right.\n</chat_history>")
    assert (await sent(proxy, fake_vllm, [quoted], of=who(task=TAGS)))["messages"] == [quoted]


async def test_tasks_go_later_and_chats_never(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Lower goes first; what a trusted client sets itself stays."""
    await proxy.state.models.get(wait_seconds=5)
    assert "priority" not in await sent(proxy, fake_vllm, [user("hi")])
    task = who(chat="c", task=TAGS)
    assert (await sent(proxy, fake_vllm, [user("Tags.")], of=task))["priority"] == TASK_PRIORITY
    assert (await sent(proxy, fake_vllm, [user("Tags.")], of=task, priority=3))["priority"] == 3
    assert "priority" not in await sent(proxy, fake_vllm, [user("on")])


async def test_a_priority_of_a_stranger_never_goes_up(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Nor do fields that name other servers; under a trusted key the operator sets the former."""
    proxy = await started(start_proxy, keys=KEYS)
    fields = {"priority": -5, "kv_transfer_params": {"remote_host": "x"}}
    assert not fields.keys() & (await sent(proxy, fake_vllm, [user("hi")], of=APP, **fields)).keys()
    assert (await sent(proxy, fake_vllm, [user("hi")], of=UI, **fields)).keys() & fields.keys() == {"priority"}


@pytest.mark.parametrize("hung", [False, True], ids=["as sent", "on its chat"])
async def test_a_vllm_that_refuses_priorities_gets_none_again(
    proxy: RunningProxy, fake_vllm: FakeVllm, hung: bool
) -> None:
    """One 400, then the task as received; text goes on moving."""
    await proxy.state.models.get(wait_seconds=5)
    refused = json_error(400, {"error": {"message": "no priorities", "type": "BadRequestError", "code": 400}})
    fake_vllm.reply_to = lambda body: refused if "priority" in body else None
    paste = "\n".join(f"line {n}" for n in range(200 if hung else 1))
    await sent(proxy, fake_vllm, [system(CLOCK), user(paste)])
    task = user(f"Tags.\n<chat_history>\nUSER: {paste}\nASSISTANT: All right.\n</chat_history>")
    of = who(chat="c", task=TAGS)
    assert "priority" not in await sent(proxy, fake_vllm, [task], of=of)
    assert len(runs(fake_vllm)) == 3
    again = await sent(proxy, fake_vllm, [task], of=of, temperature=0.5)
    assert len(runs(fake_vllm)) == 4
    assert "priority" not in again and (len(again["messages"]) > 1) is hung
    later = [system(CLOCK.replace("10:00:01", "10:07:01")), user(paste), model("All right."), user("on")]
    assert "10:07" not in (await sent(proxy, fake_vllm, later))["messages"][0]["content"]


async def test_the_first_model_is_meant_where_none_is_named(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """As vLLM does it: its cap holds, and the chat goes on whether it is named or not."""
    proxy = await started(start_proxy, lengths__models={"fake": 60})
    body: dict[str, Any] = {"messages": [system(CLOCK), user("hi")]}
    status, _ = await answer(proxy, body, **who(chat="c"))
    assert status == 200 and runs(fake_vllm)[-1].body["max_tokens"] == 60
    first = runs(fake_vllm)[-1].body["messages"]
    told = [system(CLOCK.replace("10:00:01", "10:07:01")), user("hi"), model("All right."), user("on")]
    assert (await sent(proxy, fake_vllm, told))["messages"][: len(first)] == first


async def test_a_body_that_is_read_in_two_ways_is_not_moved(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """A lone surrogate cannot be written again: the messages go as they came, byte for byte."""
    messages = rb'"messages":[{"role":"system","content":"Now: 10:00:01 \ud800"},{"role":"user","content":"hi"}]'
    async with asyncio.timeout(5):
        async with proxy.post(b'{"model":"fake",' + messages + b"}", **who(chat="c")) as response:
            await response.read()
    assert messages in runs(fake_vllm)[-1].raw
    assert json.loads(runs(fake_vllm)[-1].raw)["max_tokens"]
