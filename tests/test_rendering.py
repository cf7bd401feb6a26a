"""Prompts from /tokenize: what goes up, what comes back as text, and what counts as no answer."""

from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from proxy.core.template_cases import TOOLS, Ask, said, user
from proxy.core.template_check import Refused, Rendering
from proxy.upstream.rendering import NoAnswer, UpstreamRenderer, text_of_tokens

Answer = tuple[int, str, bytes] | None


class Told:
    """A vLLM that answers what it is told to, and keeps what it was asked."""

    def __init__(self, status: int = 200, body: Mapping[str, Any] | bytes = b"") -> None:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        self.answer: Answer = (status, "application/json", raw)
        self.asked: dict[str, Any] = {}

    async def __call__(
        self, method: str, path: str, *, body: bytes | None = None, seconds: float, limit_bytes: int
    ) -> Answer:
        """Answer, as `Upstream.fetch` does."""
        assert (method, path) == ("POST", "/tokenize") and seconds > 0 and limit_bytes > 0
        self.asked = orjson.loads(body or b"{}")
        return self.answer


FOUND = {"tokens": [7, 8, 9], "token_strs": ["<u>", "ĠHi", "ĊĊ"], "count": 3, "max_model_len": 64}


async def test_a_prompt_comes_back_as_text_and_tokens() -> None:
    """The strings of a byte-level tokenizer stand for bytes."""
    made = await UpstreamRenderer(Told(200, FOUND)).render(Ask((user("Hi"),)))
    assert made == Rendering("<u> Hi\n\n", (7, 8, 9), (0, 3, 6))
    assert isinstance(made, Rendering) and [made.token_at(place) for place in (0, 2, 3, 5, 6, 7)] == [0, 0, 1, 1, 2, 2]


async def test_what_is_asked_is_what_a_chat_request_would_render() -> None:
    """Tools, arguments of the template, continuing: each only where the case has it."""
    vllm = Told(200, FOUND)
    await UpstreamRenderer(vllm).render(Ask((user("Hi"),)))
    assert vllm.asked == {
        "messages": [user("Hi")],
        "add_generation_prompt": True,
        "continue_final_message": False,
        "return_token_strs": True,
    }
    ask = Ask((user("Hi"), said("He")), True, {"enable_thinking": False}, generation=False, continues=True)
    await UpstreamRenderer(vllm, "m").render(ask)
    assert vllm.asked["tools"] == list(TOOLS) and vllm.asked["model"] == "m"
    assert vllm.asked["chat_template_kwargs"] == {"enable_thinking": False}
    assert (vllm.asked["add_generation_prompt"], vllm.asked["continue_final_message"]) == (False, True)


@pytest.mark.parametrize("status", [400, 500])
async def test_a_template_that_refuses_is_told_from_a_server_that_does_not_answer(status: int) -> None:
    """vLLM answers either status for a fault of a template."""
    vllm = Told(status, {"error": {"message": "Roles must\nalternate.", "type": "BadRequestError"}})
    assert await UpstreamRenderer(vllm).render(Ask((user("Hi"),))) == Refused("Roles must alternate")


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, {"error": {"message": "The model `x` does not exist."}}, "404: The model `x` does not exist"),
        (404, {"detail": "Not Found"}, "404: no reason given"),
        (401, {"error": "Unauthorized"}, "401: Unauthorized"),
        (502, b"<html>", "502, which is not what vLLM does"),
        (200, b"<html>", "200, which is not what vLLM does"),
        (200, {"tokens": [1], "count": 1}, "no token strings"),
        (200, {"tokens": [1], "token_strs": ["a", "b"]}, "no token strings"),
    ],
)
async def test_an_answer_that_says_nothing_of_the_template_ends_the_check(
    status: int, body: Mapping[str, Any] | bytes, says: str
) -> None:
    """In a sentence that says what answered instead."""
    with pytest.raises(NoAnswer, match=says):
        await UpstreamRenderer(Told(status, body)).render(Ask((user("Hi"),)))


async def test_a_server_that_cannot_be_reached_ends_the_check() -> None:
    vllm = Told()
    vllm.answer = None
    with pytest.raises(NoAnswer, match="cannot be reached"):
        await UpstreamRenderer(vllm).render(Ask((user("Hi"),)))


@pytest.mark.parametrize(
    ("strings", "text", "starts"),
    [
        (["<|im_start|>", "user", "Ċ", "Z", "Ã¼", "rich"], "<|im_start|>user\nZürich", (0, 12, 16, 17, 18, 19)),
        (["ðŁ", "ĺ", "Ģ", "!"], "😀!", (0, 0, 0, 1)),  # one sign in three tokens
        (["▁Hi", "<0x0A>", "▁Z", "ü"], " Hi\n Zü", (0, 3, 4, 6)),
        (["<｜User｜>", "Hi"], "<｜User｜>Hi", (0, 8)),  # noqa: RUF001  DeepSeek's tokens have such signs
        ([], "", ()),
    ],
)
def test_the_strings_of_tokenizers_are_read_as_text(strings: list[str], text: str, starts: tuple[int, ...]) -> None:
    """Byte-level ones and those of the sentencepiece kind; added tokens stand in plain text."""
    assert text_of_tokens(strings) == (text, starts)
