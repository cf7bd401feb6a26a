"""One request of the bench, over sockets."""

import json

import pytest

from proxy.bench.client import Unusable, Way, body_of, find_model, open_session, send
from proxy.bench.scenarios import Ask
from tests.fake_replies import Call, Raw, Reply, json_error
from tests.fake_vllm import FakeVllm

ASK = Ask(0, "chat", [{"role": "user", "content": "Hello, who are you?"}])
TASK = Ask(0, "chat", ASK.messages, task="title_generation")


def way(url: str, **fields: object) -> Way:
    return Way("straight", url, None, fields)


@pytest.mark.parametrize("ask", [ASK, TASK])
async def test_an_answer_is_measured_by_our_clock_and_by_usage(fake_vllm: FakeVllm, ask: Ask) -> None:
    """A chat as a stream, a task whole."""
    fake_vllm.default = Reply(text="I am a small model.")
    here = way(fake_vllm.url, cache_salt="one")
    async with open_session() as session:
        for _ in range(2):
            body = body_of(ask, here, "fake", max_tokens=16, whole=False)
            sample, text = await send(session, here, "clock", ask, body, {"X-OpenWebUI-Chat-Id": "c"})
    assert text == "I am a small model." and not sample.failure
    seen = fake_vllm.generations[-1]
    assert (sample.prompt_tokens, sample.cached_tokens) == (len(seen.tokens or ()), seen.hit) and seen.hit > 0
    assert sample.first_token_seconds is not None and sample.first_token_seconds > 0 and sample.generated_tokens > 0
    assert seen.headers["X-OpenWebUI-Chat-Id"] == "c" and seen.body["cache_salt"] == "one"
    assert seen.body["stream"] is not bool(ask.task)


async def test_tools_and_whole_answers_are_asked_for(fake_vllm: FakeVllm) -> None:
    """A call is an answer without text; its first delta is the first token."""
    fake_vllm.default = Reply(text="", calls=[Call("tool_0", "{}")])
    ask = Ask(0, "chat", ASK.messages, tools=({"type": "function", "function": {"name": "tool_0"}},))
    body = body_of(ask, way(fake_vllm.url), "fake", max_tokens=16, whole=True)
    assert json.loads(body)["ignore_eos"] is True and json.loads(body)["tools"]
    async with open_session() as session:
        sample, text = await send(session, way(fake_vllm.url), "tools", ask, body, {})
    assert (text, sample.failure) == ("", "") and sample.first_token_seconds is not None


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (json_error(400, {"error": {"message": "no\x1b[2J parser", "type": "BadRequestError"}}), "status 400: no [2J"),
        (Raw(status=502, body=[b"<html>"]), "status 502: <html>"),
        (Raw(body=[b'data: {"choices":[]}\n\n'], end="rst"), "the connection broke"),
        (Raw(body=[b'data: {"choices":[]}\n\n']), "the answer broke off"),
        (Raw(body=[b'data: {"error":{"message":"x"}}\n\n', b"data: [DONE]\n\n"]), "the answer broke off"),
    ],
)
async def test_a_failure_is_told_in_the_sample(fake_vllm: FakeVllm, answer: Raw, told: str) -> None:
    """Printable and short, with no time of a first token."""
    fake_vllm.replies.append(answer)
    body = body_of(ASK, way(fake_vllm.url), "fake", max_tokens=16, whole=False)
    async with open_session() as session:
        sample, _ = await send(session, way(fake_vllm.url), "clock", ASK, body, {})
    assert told in sample.failure and sample.failure.isprintable() and sample.first_token_seconds is None


async def test_the_model_is_the_first_or_the_one_that_was_named(fake_vllm: FakeVllm) -> None:
    async with open_session() as session:
        found = await find_model(session, way(fake_vllm.url), None)
        assert (found.name, found.context_tokens) == ("fake", 8192)
        with pytest.raises(Unusable, match="has no model gpt"):
            await find_model(session, way(fake_vllm.url), "gpt")
        fake_vllm.api_key = "sk"
        with pytest.raises(Unusable, match="asks for a key"):
            await find_model(session, way(fake_vllm.url), None)
        fake_vllm.answers["/v1/models"] = Raw(body=[b"hello"])
        fake_vllm.api_key = None
        with pytest.raises(Unusable, match="no list of models"):
            await find_model(session, way(fake_vllm.url), None)
        await fake_vllm.stop()
        with pytest.raises(Unusable, match="Nothing answers"):
            await find_model(session, way(fake_vllm.url), None)
