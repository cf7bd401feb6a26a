"""Lengths on the wire: what vLLM would clamp in silence or refuse oddly is done before it (families LL and HT)."""

from typing import Any

import pytest

from proxy.config import Key
from proxy.downstream.auth import hash_token
from tests.bodies import chat, stream
from tests.conftest import RunningProxy, StartProxy
from tests.fake_engine import Rules, Vocabulary, render
from tests.fake_replies import Raw, Reply
from tests.fake_vllm import FakeVllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT = "X-Prefix-Proxy-Max-Tokens"
WRONG = [0, -1, -2, 1.5, True, "5", [], {}]


def filled(tokens: int) -> dict[str, Any]:
    """Return a chat request whose prompt has exactly `tokens`."""
    empty = len(Vocabulary().encode(render({"messages": [{"role": "user", "content": ""}]})))
    return chat("1" * (tokens - empty))


async def ask(proxy: RunningProxy, body: dict[str, Any], path: str = CHAT) -> tuple[int, Any, str | None]:
    """Send one request; return status, body, and the limit that the proxy names."""
    async with proxy.post(body, path) as answer:
        return answer.status, await answer.json(), answer.headers.get(LIMIT)


async def known(start_proxy: StartProxy, fake: FakeVllm, size: int = 8192, **settings: Any) -> RunningProxy:
    """Start a proxy before a vLLM with `size` tokens of context; the proxy knows that when this returns."""
    fake.rules = Rules(max_model_len=size, multimodal=True)
    proxy = await start_proxy(**settings)
    await proxy.state.models.get(wait_seconds=5)
    return proxy


def sent(fake: FakeVllm, path: str = CHAT) -> dict[str, Any]:
    """Return the body of the last request that went up."""
    return fake.of(path)[-1].body


@pytest.mark.parametrize(
    ("asked", "forwarded"), [(2039, 2039), (2040, 2040), (2041, 2040), (2045, 2040), (2048, 2040), (1_000_000, 2040)]
)
async def test_a_limit_above_the_room_goes_up_as_the_room(
    start_proxy: StartProxy, fake_vllm: FakeVllm, asked: int, forwarded: int
) -> None:
    """Clients set max_tokens to the size of the context (LL-01)."""
    proxy = await known(start_proxy, fake_vllm, 2048)
    body = {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": ""}], "model": "fake"}
    room = 2048 - len(Vocabulary().encode(render(body)))
    status, _, told = await ask(proxy, {**body, "max_tokens": asked - 2040 + room})
    assert (status, sent(fake_vllm)["max_tokens"]) == (200, forwarded - 2040 + room)
    assert told == (None if asked <= 2040 else str(room))


@pytest.mark.parametrize(("tokens", "status"), [(8191, 200), (8192, 400), (8378, 400)])
async def test_a_prompt_that_leaves_nothing_is_refused_by_its_own_length(
    start_proxy: StartProxy, fake_vllm: FakeVllm, tokens: int, status: int
) -> None:
    """vLLM would blame max_tokens, which nobody gave (LL-02)."""
    proxy = await known(start_proxy, fake_vllm)
    found, body, _ = await ask(proxy, filled(tokens))
    assert found == status
    if status == 200:
        assert sent(fake_vllm)["max_tokens"] == 1
        return
    error = body["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert str(tokens) in error["message"] and "8192" in error["message"] and "-" not in error["message"]
    assert fake_vllm.of(CHAT) == []


async def test_a_system_prompt_that_is_too_long_is_refused_and_never_cut(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """Dropping it in silence would change who answers (HT-14)."""
    proxy = await known(start_proxy, fake_vllm, 512)
    body = {"messages": [{"role": "system", "content": "w " * 2000}, {"role": "user", "content": "hi"}]}
    status, error, _ = await ask(proxy, body)
    assert (status, error["error"]["code"], fake_vllm.of(CHAT)) == (400, "context_length_exceeded", [])


async def test_tools_count_and_are_never_dropped(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Definitions of tools are most of an agent's prompt (HT-13)."""
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "w " * 50}} for i in range(12)]
    proxy = await known(start_proxy, fake_vllm, 512)
    status, error, _ = await ask(proxy, chat("hi", tools=tools))
    assert (status, error["error"]["code"], fake_vllm.of(CHAT)) == (400, "context_length_exceeded", [])
    assert (await ask(proxy, chat("hi", tools=tools[:1])))[0] == 200
    assert sent(fake_vllm)["tools"] == tools[:1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_expected_tokens"])
@pytest.mark.parametrize("value", WRONG, ids=str)
async def test_what_is_no_length_is_a_400_that_names_its_field(
    proxy: RunningProxy, fake_vllm: FakeVllm, path: str, field: str, value: Any
) -> None:
    """Minus one too: one choice for both routes (LL-03)."""
    status, body, _ = await ask(proxy, chat(prompt="x", **{field: value}), path)
    assert (status, body["error"]["param"]) == (400, field) and f"'{field}'" in body["error"]["message"]
    assert [seen for seen in fake_vllm.of(path) if "priority" not in seen.body] == []  # that is the proxy's own


async def test_a_number_beyond_all_numbers_is_a_400(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """1e400 is infinite to most parsers, an error to others."""
    raw = b'{"model":"fake","messages":[{"role":"user","content":"x"}],"max_tokens":1e400}'
    async with proxy.post(raw) as answer:
        assert answer.status == 400 and fake_vllm.of(CHAT) == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_null_and_absent_are_the_same(start_proxy: StartProxy, fake_vllm: FakeVllm, path: str) -> None:
    """null made vLLM fail on completions (LL-03)."""
    proxy = await known(start_proxy, fake_vllm, lengths__max_output_tokens=50)
    absent: tuple[dict[str, Any], ...] = ({}, {"max_tokens": None}, {"max_completion_tokens": None, "max_tokens": None})
    for given in absent:
        assert (await ask(proxy, chat(prompt="x", **given), path))[::2] == (200, "50")
        body = sent(fake_vllm, path)
        assert body["max_tokens"] == 50 and "max_completion_tokens" not in body


@pytest.mark.parametrize(
    ("given", "effective", "told"),
    [
        ({"max_tokens": 100, "max_completion_tokens": 50}, 50, None),
        ({"max_completion_tokens": 50}, 50, None),
        ({"max_tokens": 100, "max_completion_tokens": None}, 60, "60"),
        ({"max_tokens": 40, "max_completion_tokens": 90}, 60, "60"),
        ({"max_tokens": 60}, 60, None),
    ],
)
async def test_the_field_that_holds_carries_the_limit(
    start_proxy: StartProxy, fake_vllm: FakeVllm, given: dict[str, Any], effective: int, told: str | None
) -> None:
    """And the other cannot exceed it; a header names our limit and never the client's own (LL-05)."""
    proxy = await known(start_proxy, fake_vllm, lengths__max_output_tokens=60)
    assert (await ask(proxy, chat(**given)))[::2] == (200, told)
    body = sent(fake_vllm)
    first = body.get("max_completion_tokens") or body["max_tokens"]
    assert first == effective and all(body.get(name) is None or body[name] <= 60 for name in given)


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_that_our_limit_ended_is_counted_apart(
    start_proxy: StartProxy, fake_vllm: FakeVllm, streamed: bool
) -> None:
    """The client's own limit is its own business."""
    proxy = await known(start_proxy, fake_vllm, lengths__max_output_tokens=3)
    fake_vllm.default = Reply(text="one two three four five six")
    make = stream if streamed else chat
    asked: tuple[tuple[dict[str, Any], int], ...] = (({}, 1), ({"max_tokens": 9}, 2), ({"max_tokens": 2}, 2))
    for fields, counted in asked:
        async with proxy.post(make("x", **fields)) as answer:
            await answer.read()
            assert answer.headers.get(LIMIT) == (None if fields.get("max_tokens") == 2 else "3")
        assert proxy.sample("proxy_limited_answers_total") == counted
    fake_vllm.default = Reply(text="one")
    await ask(proxy, chat())
    assert proxy.sample("proxy_limited_answers_total") == 2


async def test_the_cap_is_the_users_before_the_keys(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Only of a user whom somebody vouches for."""
    keys = (
        Key("ui", hash_token("sk-ui"), trusted=True, max_output_tokens=70),
        Key("other", hash_token("sk-other"), max_output_tokens=80),
    )
    proxy = await known(start_proxy, fake_vllm, keys=keys, lengths__users={"vip": 500, "other": 9})
    for key, user, cap in (("ui", "vip", 500), ("ui", "u", 70), ("other", "vip", 80), ("other", "", 80)):
        async with proxy.post(chat(), Authorization=f"Bearer sk-{key}", X_OpenWebUI_User_Id=user) as answer:
            assert (answer.status, answer.headers[LIMIT]) == (200, str(cap))


async def test_a_limit_of_prompts_holds_below_the_models_own(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """A chat is cut to it, what cannot be cut is refused."""
    proxy = await known(start_proxy, fake_vllm, lengths__max_prompt_tokens=200)
    status, body, _ = await ask(proxy, filled(201))
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded") and "201" in body["error"]["message"]
    assert (await ask(proxy, filled(200)))[0] == 200
    turns = [{"role": role, "content": "1" * 30} for _ in range(9) for role in ("user", "assistant")]
    assert (await ask(proxy, {"messages": [*turns, {"role": "user", "content": "x"}]}))[0] == 200
    assert fake_vllm.of(CHAT)[-1].n <= 200


@pytest.mark.parametrize("n", [0, -1, 9, True, "2", 1.5])
async def test_n_is_held_to_its_limit(proxy: RunningProxy, fake_vllm: FakeVllm, n: Any) -> None:
    """On both routes, and by name."""
    for path in (CHAT, COMPLETIONS):
        status, body, _ = await ask(proxy, chat(prompt="x", n=n), path)
        assert (status, body["error"]["param"]) == (400, "n")
    assert fake_vllm.generations == []


@pytest.mark.parametrize(
    "body", [{"messages": []}, {"messages": None}, {}, {"messages": "hi"}, {"messages": [None]}], ids=str
)
async def test_what_is_no_list_of_messages_is_refused_by_name(
    proxy: RunningProxy, fake_vllm: FakeVllm, body: dict[str, Any]
) -> None:
    """Without a call to vLLM (HT-07)."""
    status, answer, _ = await ask(proxy, body)
    assert status == 400 and answer["error"]["param"].startswith("messages") and fake_vllm.of(CHAT) == []
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"role": "user", "content": None}, {"role": "system", "content": "only system"}]
)
async def test_odd_but_whole_messages_are_left_to_vllm(
    proxy: RunningProxy, fake_vllm: FakeVllm, message: dict[str, Any]
) -> None:
    """It decides what its template takes (HT-07)."""
    assert (await ask(proxy, {"messages": [message]}))[0] == 200
    assert sent(fake_vllm)["messages"] == [message]


async def test_a_picture_is_not_counted_as_text(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Its bytes would be far above the context, and none of them is text (LL-07)."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 900_000}}
    message = {"role": "user", "content": [{"type": "text", "text": "what is it"}, picture]}
    proxy = await known(start_proxy, fake_vllm)
    assert (await ask(proxy, {"model": "fake", "messages": [message]}))[0] == 200
    assert sent(fake_vllm)["messages"] == [message]
    assert all(len(seen.raw) < 10_000 for seen in fake_vllm.of("/tokenize"))


RESPONSES = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://10.0.0.1/x"}]}]}
FILE = {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "file:///etc/passwd"}]}]}
MESSAGES = {
    "max_tokens": 5,
    "messages": [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://evil.example/x"}}]}
    ],
}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", RESPONSES, "input[0].content[0].image_url"),
        ("/v1/responses", FILE, "input[0].content[0].file_url"),
        ("/v1/messages", MESSAGES, "messages[0].content[0].source"),
        ("/v1/responses", {"previous_response_id": "resp_1", "input": "x"}, "previous_response_id"),
        ("/v1/responses", {"input": "x", "max_output_tokens": -1}, "max_output_tokens"),
        ("/v1/messages", {"messages": [{}] * 4097, "max_tokens": 5}, "messages"),
    ],
)
async def test_the_other_routes_hold_to_the_same_rules(
    proxy: RunningProxy, fake_vllm: FakeVllm, path: str, body: dict[str, Any], param: str
) -> None:
    """vLLM would fetch from there all the same (SC-10)."""
    status, answer, _ = await ask(proxy, body, path)
    assert (status, answer["error"]["param"], fake_vllm.of(path)) == (400, param, [])


async def test_other_routes_pass_what_is_no_media_source(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Arguments and schemas of tools may speak of any URL."""
    fake_vllm.answers["/v1/messages"] = Raw([b"{}"], headers={"Content-Type": "application/json"})
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {"image_url": "http://10.0.0.1/x"}}
    tool = {"name": "look", "input_schema": {"properties": {"image_url": {"url": "http://10.0.0.1/x"}}}}
    picture = {"type": "image", "source": {"type": "base64", "data": "AA=="}}
    body = {"messages": [{"role": "assistant", "content": [call]}, {"role": "user", "content": [picture]}]}
    assert (await ask(proxy, {**body, "tools": [tool], "max_tokens": 5}, "/v1/messages"))[0] == 200
