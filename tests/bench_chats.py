"""The chats that the benchmark has: as Open WebUI tells them, growing by a turn, with a clock in the system prompt."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fake_replies import DONE, Raw, Reply, content_event

EVENTS = 1000
PACED_EVENTS, PACED_SECONDS = 20, 0.1
WORDS = "The quick brown fox jumps over the lazy dog and thinks about it. "
SYSTEM = "You are a helpful assistant.\nNow: 2026-01-02 10:{:02}:{:02} UTC. Answer briefly.\nBe kind and precise.\n"
_ASKED = re.compile(r"Question (\d+) for (\d+) characters")


def _text(size: int) -> str:
    return (WORDS * (size // len(WORDS) + 1))[:size]


def tools(count: int = 36) -> list[dict[str, Any]]:
    """Return function tools, about 340 bytes each."""
    query = {"type": "string", "description": "What to look for"}
    fields = {"query": query, "limit": {"type": "integer", "default": 10}}
    parameters = {"type": "object", "properties": fields, "required": ["query"]}
    told = "It looks for the {}th thing and returns what it found, as JSON."
    return [
        {"type": "function", "function": {"name": f"tool_{i}", "description": told.format(i), "parameters": parameters}}
        for i in range(count)
    ]


TOOLS = tools()


@dataclass(frozen=True)
class Size:
    """A chat's size: characters of a question and of an answer; the turns that are told first and those measured."""

    name: str
    question: int
    answer: int
    known: int
    measured: int


# On average 40 messages and 25 KB, 400 messages and 400 KB; the tools are in both.
SMALL = Size("25 KB", 100, 400, 10, 20)
LARGE = Size("400 KB", 300, 1600, 185, 30)


def turns(size: Size) -> Iterator[bytes]:
    """Yield the body of each turn of one chat; each holds the answers to those before, as the fake vLLM gives them."""
    history: list[dict[str, str]] = []
    for turn in range(size.known + size.measured):
        question = f"Question {turn} for {size.answer} characters? {_text(size.question)}"
        history.append({"role": "user", "content": question})
        system = {"role": "system", "content": SYSTEM.format(turn // 60 % 60, turn % 60)}
        body = {"model": "fake", "stream": True, "messages": [system, *history], "tools": TOOLS}
        yield json.dumps(body).encode()
        history.append({"role": "assistant", "content": _answer(turn, size.answer)})


def _answer(turn: int, size: int) -> str:
    return f"Answer {turn}. {_text(size)}"


def answer(body: Mapping[str, Any]) -> Raw | Reply:
    """Answer as the fake vLLM: many events, paced ones, what `turns` tells of the next turn, or one word."""
    if body.get("user") == "events":
        return Raw(body=[content_event(f" word{position}") for position in range(EVENTS)] + [DONE])
    if body.get("user") == "paced":
        return Reply(pieces=[" word"] * PACED_EVENTS, gap_seconds=PACED_SECONDS)
    asked = _ASKED.search(json.dumps(body.get("messages", [])[-1:]))
    return Reply(pieces=[_answer(int(asked[1]), int(asked[2])) if asked else "Yes."])
