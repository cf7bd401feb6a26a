"""The fake vLLM is what the other tests measure against, so it is tested against what was observed of vLLM 0.32."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fake_engine import PrefixCache, Rules, Vocabulary, render
from tests.fake_replies import Call, Drop, Hang, Raw, Reply, content_event, json_error
from tests.fake_vllm import FakeVllm

StartVllm = Callable[..., Awaitable[FakeVllm]]


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the fake vLLM itself: no proxy is between."""
    async with aiohttp.ClientSession() as client:
        yield client


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """Return a chat request of one user message."""
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


async def ask(session: aiohttp.ClientSession, fake: FakeVllm, body: Any) -> tuple[int, Any]:
    """Post `body` to the chat route; return the status and the answer's JSON."""
    async with session.post(fake.url + "/v1/chat/completions", json=body) as response:
        return response.status, json.loads(await response.read())


def test_the_tokenizer_loses_no_character() -> None:
    """Decoding gives the text back, whatever is in it, and no token is shorter than a byte."""
    vocabulary = Vocabulary()
    text = "Now: 2026-01-02 10:00:01.\n\n\t 你好  🧠 _x_ <|im_end|>\u00b2 \r\n"
    tokens = vocabulary.encode(text)
    assert vocabulary.decode(tokens) == text
    assert len(tokens) <= len(text.encode())


def test_only_full_blocks_are_cached() -> None:
    """35 tokens with blocks of 16 leave 32 cached for a longer prompt."""
    cache = PrefixCache(16)
    cache.store(list(range(35)))
    assert cache.hit(list(range(50))) == 32


def test_a_full_hit_still_computes_the_last_block() -> None:
    """The last token is always computed, so a prompt of exactly three cached blocks hits two."""
    cache = PrefixCache(16)
    cache.store(list(range(48)))
    assert cache.hit(list(range(48))) == 32
    assert cache.hit(list(range(49))) == 48


def test_a_change_in_front_loses_everything_after_it() -> None:
    """The hash of a block covers its parent: one other token in block 0 leaves no hit, in block 1 one block."""
    cache = PrefixCache(16)
    tokens = list(range(100))
    cache.store(tokens)
    assert cache.hit([-1, *tokens[1:]]) == 0
    assert cache.hit([*tokens[:20], -1, *tokens[21:]]) == 16


def test_only_equal_salts_share() -> None:
    """A salt is part of the first block's hash."""
    cache = PrefixCache(16)
    cache.store(list(range(40)), "a")
    assert [cache.hit(list(range(40)), salt) for salt in ("a", "b", None)] == [32, 0, 0]


def test_the_template_renders_tools_after_the_system_text_and_arguments_as_parsed_json() -> None:
    """Qwen2.5's layout: system text, tools, turns; `{"x":1}` is rendered with a space, as vLLM parses it first."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    prompt = render(
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "U"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "R1", "tool_call_id": "c"},
                {"role": "tool", "content": "R2", "tool_call_id": "d"},
            ],
        }
    )
    assert prompt.startswith("<|im_start|>system\nS\n\n# Tools\n")
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n' in prompt
    both = "<|im_start|>user\n<tool_response>\nR1\n</tool_response>\n<tool_response>\nR2\n</tool_response><|im_end|>\n"
    assert prompt.endswith(both + "<|im_start|>assistant\n")


def test_a_continued_message_is_left_open() -> None:
    """With continue_final_message the prompt ends in the assistant's own words."""
    messages = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "Once "}]
    prompt = render({"messages": messages, "continue_final_message": True, "add_generation_prompt": False})
    assert prompt.endswith("<|im_start|>assistant\nOnce ")


async def test_the_next_turn_finds_prompt_and_answer_cached(
    fake_vllm: FakeVllm, session: aiohttp.ClientSession
) -> None:
    """Generated tokens are stored too, so turn 2 hits all full blocks of turn 1's prompt and answer."""
    answer = "one two three four five six seven eight nine ten eleven twelve"
    fake_vllm.default = Reply(text=answer)
    _, first = await ask(session, fake_vllm, chat())
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    history = [*chat()["messages"], {"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    _, second = await ask(session, fake_vllm, {"messages": history})
    told = fake_vllm.seen[0].n + len(fake_vllm.vocabulary.encode(answer))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == told // 16 * 16


async def test_a_stream_has_usage_only_when_asked(fake_vllm: FakeVllm, session: aiohttp.ClientSession) -> None:
    """The role comes with the first token, then the deltas, the finish, [DONE]; usage if include_usage is set."""
    fake_vllm.default = Reply(text="a b", calls=[Call("f", '{"x": 1}')], reasoning="hm")
    texts = []
    for options in (None, {"include_usage": True}):
        body = chat(stream=True, stream_options=options)
        async with session.post(fake_vllm.url + "/v1/chat/completions", json=body) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            texts.append(await response.text())
    events = [json.loads(line[6:]) for line in texts[1].split("\n\n")[:-2]]
    assert [("usage" in event, event["choices"] == []) for event in events][-1] == (True, True)
    assert "usage" not in texts[0]
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[:4] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "hm"},
        {"content": "a"},
        {"content": " b"},
    ]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (chat(max_tokens=0), 400, "max_tokens must be at least 1, got 0"),
        (chat(max_tokens=9000), 400, "max_tokens=9000 cannot be greater than max_model_len=8192"),
        (chat("x " * 9000), 400, "maximum context length is 8192 tokens"),
        (chat(model="gpt-4o"), 404, "The model `gpt-4o` does not exist"),
        (chat(cache_salt=""), 400, "cache_salt"),
        (chat(cache_salt="a/b"), 400, "cache_salt"),
        (chat(cache_salt="x" * 129), 400, "cache_salt"),
        (chat(cache_salt=5), 400, "cache_salt"),
        (chat(stream_options={"include_usage": True}), 400, "Stream options"),
        ({"messages": []}, 400, "empty conversation"),
        (chat(continue_final_message=True), 400, "continue_final_message"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_it_refuses_what_vllm_refuses(
    fake_vllm: FakeVllm, session: aiohttp.ClientSession, body: Any, status: int, words: str
) -> None:
    """Status, envelope and the words of the message are vLLM's."""
    got, answer = await ask(session, fake_vllm, body)
    assert (got, answer["error"]["code"]) == (status, status)
    assert words in answer["error"]["message"]


async def test_an_answer_is_cut_at_max_tokens(fake_vllm: FakeVllm, session: aiohttp.ClientSession) -> None:
    """Two tokens are asked for: two come, and the finish reason says length."""
    fake_vllm.default = Reply(text="one two three")
    _, answer = await ask(session, fake_vllm, chat(max_tokens=2))
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one two", "length")


async def test_a_template_may_refuse_a_late_system_message_or_two_user_messages(
    start_vllm: StartVllm, session: aiohttp.ClientSession
) -> None:
    """Some models' templates raise; vLLM answers 400 then."""
    fake = await start_vllm(rules=Rules(template_refuses_late_system=True, template_refuses_user_twice=True))
    user = {"role": "user", "content": "x"}
    for messages in ([user, {"role": "system", "content": "s"}, user], [user, user]):
        assert (await ask(session, fake, {"messages": messages}))[0] == 400


async def test_its_key_guards_only_v1(start_vllm: StartVllm, session: aiohttp.ClientSession) -> None:
    """vLLM's 401 is a string, and /tokenize and /metrics answer anyone."""
    fake = await start_vllm(api_key="k")
    assert await ask(session, fake, chat()) == (401, {"error": "Unauthorized"})
    async with session.post(fake.url + "/tokenize", json={"prompt": "a b"}) as response:
        counted = await response.json()
    assert counted["count"] == 2
    async with session.post(fake.url + "/detokenize", json={"tokens": counted["tokens"]}) as response:
        assert await response.json() == {"prompt": "a b"}
    async with session.get(fake.url + "/metrics") as response:
        assert 'vllm:cache_config_info{block_size="16"' in await response.text()


async def test_a_client_that_leaves_is_noticed_at_once(fake_vllm: FakeVllm, session: aiohttp.ClientSession) -> None:
    """The time of the abort is kept and no generation lives on."""
    fake_vllm.default = Reply(gates={1: asyncio.Event()})
    async with session.post(fake_vllm.url + "/v1/chat/completions", json=chat(stream=True)) as response:
        await response.content.readany()
        assert fake_vllm.live == 1
        response.close()
    async with asyncio.timeout(1):
        await fake_vllm.seen[0].closed.wait()
    assert fake_vllm.seen[0].aborted_at is not None
    assert fake_vllm.live == 0


@pytest.mark.parametrize(
    "fault",
    [
        Drop(),
        Raw(body=[content_event("a")], end="cut"),
        Raw(body=[content_event("a")], end="rst"),
        Raw(body=[b'{"id":'], framing="length", content_length=500, end="cut"),
    ],
    ids=["drop", "cut", "reset", "short"],
)
async def test_it_breaks_off_as_told(fake_vllm: FakeVllm, session: aiohttp.ClientSession, fault: Any) -> None:
    """A client sees an error, never an answer that looks whole, and the fake does not take it for an abort."""
    fake_vllm.replies.append(fault)
    with pytest.raises(aiohttp.ClientError):
        async with session.post(fake_vllm.url + "/v1/chat/completions", json=chat()) as response:
            await response.read()
    assert fake_vllm.seen[0].aborted_at is None


async def test_it_answers_any_bytes_and_status(fake_vllm: FakeVllm, session: aiohttp.ClientSession) -> None:
    """A scripted answer is written as it is, for the generating routes and for any other path."""
    fake_vllm.replies.append(json_error(429, {"error": {"message": "busy"}}, retry_after="7"))
    async with session.post(fake_vllm.url + "/v1/chat/completions", json=chat()) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "7")
    fake_vllm.answers["/v1/models"] = Hang()
    with pytest.raises(TimeoutError):
        await session.get(fake_vllm.url + "/v1/models", timeout=aiohttp.ClientTimeout(total=0.05))


async def test_it_comes_back_on_its_port(fake_vllm: FakeVllm, session: aiohttp.ClientSession) -> None:
    """Stopped it refuses connections; started again it is where it was."""
    url = fake_vllm.url
    await fake_vllm.stop()
    with pytest.raises(aiohttp.ClientConnectorError):
        await session.get(url + "/health")
    await fake_vllm.start()
    async with session.get(url + "/health") as response:
        assert response.status == 200


async def test_it_listens_on_a_unix_socket(start_vllm: StartVllm, tmp_path: Path) -> None:
    """As `vllm serve --uds`."""
    await start_vllm(unix_path=tmp_path / "vllm.sock")
    connector = aiohttp.UnixConnector(str(tmp_path / "vllm.sock"))
    async with aiohttp.ClientSession(connector=connector) as client, client.get("http://vllm/version") as response:
        assert await response.json() == {"version": "0.32.0"}


async def test_dangerous_routes_exist_only_in_development_mode(
    fake_vllm: FakeVllm, start_vllm: StartVllm, session: aiohttp.ClientSession
) -> None:
    """/reset_prefix_cache drops the cache under VLLM_SERVER_DEV_MODE=1 and is a 404 else."""
    async with session.post(fake_vllm.url + "/reset_prefix_cache") as response:
        assert (response.status, await response.json()) == (404, {"detail": "Not Found"})
    fake = await start_vllm(dev_mode=True)
    await ask(session, fake, chat("word " * 50))
    async with session.post(fake.url + "/reset_prefix_cache") as response:
        assert response.status == 200
    await ask(session, fake, chat("word " * 50))
    assert [seen.hit for seen in fake.generations] == [0, 0]
