"""Rewriting end to end: what goes up over real sockets, what is remembered of answers, what a refusal leads to."""

import json
from typing import Any

import pytest

from tests.bodies import chat, eventually
from tests.conftest import RawConnect, RunningProxy, StartProxy
from tests.fake_engine import Rules
from tests.fake_faults import Seen
from tests.fake_replies import Call, Raw, Reply, content_event
from tests.fake_vllm import FakeVllm

WHO = {"X_OpenWebUI_User_Id": "u", "X_OpenWebUI_Chat_Id": "c"}


def head(second: int, words: str = "You help. ") -> dict[str, Any]:
    """Return a system message with a clock."""
    return {"role": "system", "content": f"{words}Now: 2026-01-02 10:00:{second:02} UTC. Rules: be brief."}


def user(text: str) -> dict[str, Any]:
    """Return a user message."""
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, Any]:
    """Return a reply as it is told."""
    return {"role": "assistant", "content": text}


def chats(fake: FakeVllm) -> list[Seen]:
    """Return the chat requests that went up; what the proxy itself asks of a template is not among them."""
    return fake.of("/v1/chat/completions")


def script(fake: FakeVllm, reply: Any) -> None:
    """Let the next chat request be answered so."""
    waiting = [reply]
    fake.reply_to = lambda body: waiting.pop() if "messages" in body and waiting else None


async def send(proxy: RunningProxy, fake: FakeVllm, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """Send a chat of user u; return the body that went up."""
    names = {name: fields.pop(name) for name in list(fields) if name.startswith(("X_", "Authorization"))}
    body = {"model": "fake", "messages": messages, "stream": True, **fields}
    async with proxy.post(body, **{**WHO, **names}) as response:
        assert response.status == 200, await response.text()
        await response.read()
    await eventually(lambda: not proxy.sample("proxy_requests_in_flight"))
    return dict(json.loads(chats(fake)[-1].raw))


async def test_later_turns_are_cached_although_the_clock_runs(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """All but the last block of what was computed is hit (PC-01)."""
    told: list[Any] = []
    before = 0
    for turn in range(4):
        told.append(user(f"question {turn} " * 30))
        fake_vllm.default = Reply(text=f"  answer {turn} " * 20 + "\n")
        await send(proxy, fake_vllm, [head(turn, "Rule. " * 200), *told])
        seen = chats(fake_vllm)[-1]
        assert turn == 0 or seen.hit >= before - 2 * fake_vllm.block_size
        before = seen.n
        told.append(model(f"answer {turn} " * 20 and (f"  answer {turn} " * 20 + "\n").strip()))


async def test_a_tool_call_goes_as_it_was_spelled(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The client re-serialises the arguments; vLLM computed the others."""
    script(fake_vllm, Reply(text="", calls=[Call("weather", '{"city": "Paris", "n": 1.0}', "call_7")]))
    await send(proxy, fake_vllm, [user("hi")])
    call = {
        "id": "call_7",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Paris","n":1.0}'},
    }
    told = [user("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    sent = await send(proxy, fake_vllm, [*told, {"role": "tool", "tool_call_id": "call_7", "content": "sunny"}])
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris", "n": 1.0}'


async def test_a_template_that_refuses_our_text_costs_one_try(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """The request goes once more as received, and no text moves for that model from then on."""
    proxy = await start_proxy()
    refuse = {"error": {"message": "no parts", "type": "BadRequestError", "param": None, "code": 400}}

    def answer(body: dict[str, Any]) -> Any:
        odd = any(not isinstance(m["content"], str) or m["role"] == "system" for m in body.get("messages", ())[1:])
        return Raw([json.dumps(refuse).encode()], 400, {"Content-Type": "application/json"}, "length") if odd else None

    fake_vllm.reply_to = answer
    told = [head(1), user("hi")]
    assert (await send(proxy, fake_vllm, told))["messages"] == told
    assert len(chats(fake_vllm)) == 2
    told = [head(2), user("hi"), model("All right."), user("on")]
    assert (await send(proxy, fake_vllm, told))["messages"] == told
    assert len(chats(fake_vllm)) == 3


async def test_a_400_of_the_clients_own_is_told_as_it_is(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """vLLM refuses what was received too: its answer goes down, text keeps moving."""
    bad = chat("hi", cache_salt_of="x", response_format=None)
    bad["messages"] = [head(1), user("hi")]
    async with proxy.post({**bad, "max_tokens": 5, "stream_options": {"a": 1}}, **WHO) as response:
        assert response.status == 400
    sent = await send(proxy, fake_vllm, [head(2), user("hi")])
    assert sent["messages"][0]["content"] == "You help. Now: 2026-01-02. Rules: be brief."


async def test_profile_off_changes_no_byte(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Nor adds one."""
    proxy = await start_proxy(profile="off")
    raw = b'{"stream":true, "messages":[{"role":"system","content":"now 10:30"},'
    raw += b'{"role":"user","content":"\\u00e9"}],"top_p":0.10}'
    async with proxy.post(raw) as response:
        await response.read()
    assert chats(fake_vllm)[-1].raw == raw


async def test_a_body_with_a_lone_surrogate_goes_up_as_it_came(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """orjson cannot read it; limits hold all the same."""
    raw = b'{"messages":[{"role":"system","content":"now 10:30"},{"role":"user","content":"\\ud800"}],"max_tokens":5}'
    async with proxy.post(raw) as response:
        await response.read()
    assert chats(fake_vllm)[-1].raw == raw


@pytest.mark.parametrize(
    "header", ["X-OpenWebUI-User-Id", "X-OpenWebUI-Chat-Id", "X-OpenWebUI-User-Jwt", "X-OpenWebUI-Task"]
)
@pytest.mark.parametrize("isolation", ["tenant", "session"])
async def test_any_bytes_in_an_identity_header_are_served(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, header: str, isolation: str
) -> None:
    """What is no UTF-8 reaches us as lone surrogates."""
    proxy = await start_proxy(salt__isolation=isolation, identity__jwt_secret="s" * 32)
    client = await raw_connect(proxy.port)
    await client.post(json.dumps(chat("hi")).encode(), head=f"{header}: \x80\xff\r\nConnection: close\r\n")
    assert (await client.head()).startswith(b"HTTP/1.1 200")


async def test_tasks_and_several_answers_leave_no_session(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """They are no conversation."""
    await send(proxy, fake_vllm, [user("hi")], X_OpenWebUI_Task="title_generation")
    await send(proxy, fake_vllm, [user("hi")], n=2)
    assert proxy.state.sessions.list() == []
    await send(proxy, fake_vllm, [user("hi")])
    assert len(proxy.state.sessions.list()) == 1


async def test_a_continued_answer_is_remembered_as_one(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """What was told and what came, and its prompt ends in the words as they are."""
    script(fake_vllm, Reply(text="The Nile"))
    first = await send(proxy, fake_vllm, [head(1), user("hi")])
    script(fake_vllm, Reply(text=" is long. "))
    second = await send(proxy, fake_vllm, [head(9), user("hi"), model("The Nile")])
    assert (second["continue_final_message"], second["add_generation_prompt"]) == (True, False)
    assert second["messages"] == [*first["messages"], model("The Nile")]
    third = await send(proxy, fake_vllm, [head(20), user("hi"), model("The Nile is long."), user("on")])
    assert third["messages"][: len(second["messages"])] == [*first["messages"], model("The Nile is long. ")]


async def test_a_reply_that_broke_off_is_matched_by_its_beginning(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The client saw less; the notes of the turns before it stand."""
    first = [content_event("The Nile is"), content_event(" long and")]
    script(fake_vllm, Raw(first, end="cut"))
    one = await send(proxy, fake_vllm, [head(1), user("hi")])
    two = await send(proxy, fake_vllm, [head(5), user("hi"), model("The Nile is"), user("go on")])
    assert two["messages"][: len(one["messages"])] == one["messages"]
    assert two["messages"][len(one["messages"])] == model("The Nile is")


async def test_a_failed_turn_has_no_reply(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Two user messages in a row next; both stay."""
    script(fake_vllm, Raw([b'data: {"error":{"message":"x","code":500}}\n\ndata: [DONE]\n\n']))
    one = await send(proxy, fake_vllm, [head(1), user("hi")])
    two = await send(proxy, fake_vllm, [head(5), user("hi"), user("again")])
    assert two["messages"][: len(one["messages"])] == one["messages"]


async def test_the_tools_keep_the_order_of_the_session(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """A permutation of the last list."""
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("z", "a", "m")]
    await send(proxy, fake_vllm, [user("hi")], tools=tools)
    assert (await send(proxy, fake_vllm, [user("hi")], tools=tools[::-1]))["tools"] == tools
    other = await send(proxy, fake_vllm, [user("hi")], tools=tools[::-1], X_OpenWebUI_Chat_Id="d")
    assert other["tools"] == tools[::-1]


async def test_the_usage_that_we_asked_for_is_not_the_clients(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Asked upstream, taken out below; a client that asks gets it."""
    body = {"model": "fake", "messages": [user("hi")], "stream": True}
    async with proxy.post(body) as response:
        assert b'"usage"' not in await response.read()
    assert json.loads(chats(fake_vllm)[-1].raw)["stream_options"] == {"include_usage": True}
    async with proxy.post({**body, "stream_options": {"include_usage": True}}) as response:
        assert b'"usage"' in await response.read()


async def test_the_trail_names_the_steps_that_changed_something(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """A plain request has none but what it needs."""
    async with proxy.post({"messages": [head(1), user("hi")]}, **WHO) as response:
        assert "move_volatile" in response.headers["X-Prefix-Proxy-Trail"].split(",")
    async with proxy.post({"messages": [user("hi")], "max_tokens": 5}, **WHO) as response:
        assert "X-Prefix-Proxy-Trail" not in response.headers


async def test_the_bytes_of_the_table_are_those_of_its_sessions(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """After answers, refusals and fallbacks: a count that drifts would shed sessions for nothing."""
    fake_vllm.rules = Rules(template_refuses_late_system=True)
    proxy = await start_proxy()
    for second in range(3):
        await send(proxy, fake_vllm, [head(second), user("hi" * 100 * second)], X_OpenWebUI_Chat_Id=str(second))
    proxy.state.templates.refuse("fake")
    await send(proxy, fake_vllm, [head(9), user("hi")])
    sessions = proxy.state.sessions
    assert sessions._bytes == sum(info.size_bytes for info in sessions.list())
