"""The demo's chat: it is told as Open WebUI tells it, and its numbers are vLLM's."""

import asyncio
import re
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from proxy.demo import chat
from tests.fake_replies import Drop, Raw, Reply
from tests.fake_vllm import FakeVllm

START = datetime(2026, 1, 2, 10, 0, 1)


def clock(step: timedelta) -> Callable[[], datetime]:
    """Return a clock that stands at START and goes on by `step` each time it is asked."""
    times = iter(range(1000))
    return lambda: START + step * next(times)


def line(fake: FakeVllm) -> chat.Line:
    """Return where the fake answers."""
    return chat.Line(f"{fake.url}/v1", "fake", {"X-OpenWebUI-Chat-Id": "c"}, {"cache_salt": "s"})


async def test_the_history_carries_the_answers_and_each_turn_a_later_time(fake_vllm: FakeVllm) -> None:
    """
    Answers come back stripped, the clock moves by a second or more even if ours stands still.
    """
    fake_vllm.default = Reply(text="  Answer.\n")
    turns = await asyncio.to_thread(chat.play, line(fake_vllm), clock=clock(timedelta(0)))
    requests = [seen.body for seen in fake_vllm.seen]
    assert len(turns) == len(requests) == len(chat.QUESTIONS) == 6
    last = requests[-1]
    assert [message["role"] for message in last["messages"]] == ["system", *["user", "assistant"] * 5, "user"]
    assert {message["content"] for message in last["messages"] if message["role"] == "assistant"} == {"Answer."}
    assert last["stream"] is True
    assert last["cache_salt"] == "s"
    times = [re.findall(r"\d\d:\d\d:\d\d", body["messages"][0]["content"].splitlines()[0]) for body in requests]
    assert [len(found) for found in times] == [1] * 6
    assert times == sorted(times)
    assert len({found[0] for found in times}) == 6
    heads = [seen.headers["X-OpenWebUI-Chat-Id"] for seen in fake_vllm.seen]
    assert heads == ["c"] * 6


async def test_a_turn_has_the_numbers_of_usage(fake_vllm: FakeVllm) -> None:
    """
    Prompt and cached tokens are vLLM's own; the same question again is found in its cache.
    """
    messages = [{"role": "user", "content": "word " * 100}]
    first = await asyncio.to_thread(chat.ask, line(fake_vllm), messages)
    again = await asyncio.to_thread(chat.ask, line(fake_vllm), messages)
    assert first.cached_tokens == 0
    assert first.prompt_tokens == again.prompt_tokens > 100
    assert again.cached_tokens >= 96
    assert again.cached_share == again.cached_tokens / again.prompt_tokens
    assert first.answer == "All right."
    assert first.time_to_first_token_seconds > 0


async def test_an_empty_answer_is_left_out_of_the_history(fake_vllm: FakeVllm) -> None:
    """
    A small model may say nothing; the chat goes on.
    """
    fake_vllm.default = Reply(text="")
    turns = await asyncio.to_thread(chat.play, line(fake_vllm), questions=("one", "two"))
    assert [turn.answer for turn in turns] == ["", ""]
    roles = [message["role"] for message in fake_vllm.seen[-1].body["messages"]]
    assert roles == ["system", "user", "user"]


async def test_a_refusal_is_told_in_its_own_words(fake_vllm: FakeVllm) -> None:
    """
    What vLLM says of a bad request is the text of the failure.
    """
    wrong = chat.Line(f"{fake_vllm.url}/v1", "nobody", {}, {})
    with pytest.raises(chat.ChatFailed, match="status 404: The model `nobody` does not exist"):
        await asyncio.to_thread(chat.ask, wrong, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Raw([b'data: {"error":{"message":"It broke."}}\n\ndata: [DONE]\n\n']), "It broke."),
        (Raw([b"data: [DONE]\n\n"]), "no answer"),
        (Raw([b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n']), "without"),
        (Raw([b"data: "], end="cut"), "broke off|without"),
        (Drop(), "broke off"),
    ],
    ids=["error event", "nothing", "no end", "cut", "no answer"],
)
async def test_a_stream_that_fails_is_told(fake_vllm: FakeVllm, reply: Raw | Drop, words: str) -> None:
    """
    An error in the stream, or one that ends early, is a failure with a sentence.
    """
    fake_vllm.replies.append(reply)
    with pytest.raises(chat.ChatFailed, match=words):
        await asyncio.to_thread(chat.ask, line(fake_vllm), [{"role": "user", "content": "hi"}])


def test_the_system_prompt_is_about_300_words_with_the_clock_in_its_first_line() -> None:
    """
    What the demo promises to show; no other time of day stands in it.
    """
    assert 300 <= len(chat.SYSTEM_PROMPT.split()) <= 400
    assert "{now}" in chat.SYSTEM_PROMPT.splitlines()[0]
    assert re.findall(r"\d:\d", chat.SYSTEM_PROMPT) == []
