"""Whole conversations as Open WebUI tells them, before a real vLLM with Qwen2.5's own tokenizer and template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import aiohttp
import pytest

from proxy.demo import server
from tests.e2e.conftest import StartProxyBefore
from tests.e2e.telling import Answer, Message, Teller, Turn, append_only, open_webui

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),  # the first test may also make the environment
    pytest.mark.parametrize("vllm", ["qwen2tiny"], indirect=True, scope="session"),
]

LEAST_SHARE = 0.9
"""What the proxy must reach of the reuse that a client gets which only appends."""

PARAGRAPH = (
    "Chapter {n}. The harbour of quay {n} was dredged in 19{n:02}, took {m} ships a year and was led by master {m}. "
    "Its cranes lift {n} tons, its gate opens with the tide, and a pilot comes on board two miles before the mole. "
)
HANDBOOK = "\n\n".join(PARAGRAPH.format(n=n, m=7 * n) for n in range(10, 40))
RULES = "You are the help desk of a harbour. " + " ".join(PARAGRAPH.format(n=n, m=3 * n) for n in range(50, 58))
QUESTIONS = (
    "Which quay has the oldest gate?",
    "How many ships came to quay 21?",
    "Who led it, and for how long?",
    "When does the pilot come on board?",
    "Is there a crane for thirty tons?",
    "And who pays for the dredging?",
)
MEMORIES = (
    "- likes tea",
    "- likes tea",
    "- likes tea\n- has a boat",
    "- likes tea\n- has a boat",
    "- a boat",
    "- a boat",
)
# Random weights write rubbish: a grammar makes it words, with the white space around them that models often write.
WORDS = r" [A-Z][a-z]{2,8}( [a-z]{2,8}){6}\.\n\n"
CITIES = ["Hamburg", "Lisbon", "Oslo", "Rotterdam", "Genoa", "Marseille"]


def function(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as a request declares it."""
    text = f"The tool {name}: it looks up what the harbour office knows, today and in the last five years."
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}, "days": {"type": "integer", "enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [function("get_tide", PLACE), *(function(f"get_{word}", {"type": "object", "properties": {}})
         for word in ("time", "berths", "ships", "pilots", "weather", "notes"))]  # fmt: skip


@dataclass
class Play:
    """A conversation under way: where it is told, by whom, and what each request took from vLLM's cache."""

    session: aiohttp.ClientSession
    url: str
    tell: Teller
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    trail: set[str] = field(default_factory=set)

    @property
    def share(self) -> float:
        """The cached share of all prompts after the first turn."""
        return self.cached_tokens / self.prompt_tokens

    async def run(self, system: str, turns: Sequence[Turn]) -> None:
        """Tell all turns; count those after the first."""
        answers: list[Answer] = []
        for number, turn in enumerate(turns):
            rounds: list[Message] = []
            told = turns[: number + 1]
            if turn.tool:
                choice = {"type": "function", "function": {"name": turn.tool}}
                call = await self._ask(self.tell(system, told, answers, ()), number, tool_choice=choice)
                rounds = [
                    call,
                    {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": result(number)},
                ]
            reply = await self._ask(self.tell(system, told, answers, rounds), number)
            answers.append(Answer(tuple(rounds), reply["content"]))

    async def _ask(self, messages: Sequence[Message], number: int, **fields: Any) -> Message:
        body = {
            "stream": True,
            "model": "qwen2tiny",
            "stream_options": {"include_usage": True},
            "max_tokens": 64,
            "temperature": 0,
            "messages": messages,
            "tools": TOOLS,
            **(fields or {"structured_outputs": {"regex": WORDS}}),
            **self.extra,
        }
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=self.headers) as response:
            raw = await response.read()
            assert response.status == 200, raw
        self.trail |= set(response.headers.get("X-Prefix-Proxy-Trail", "").split(",")) - {""}
        message, usage = joined(raw)
        if number:
            self.prompt_tokens += usage["prompt_tokens"]
            self.cached_tokens += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return message


def joined(raw: bytes) -> tuple[Message, dict[str, Any]]:
    """Return the message that a stream holds, as it was generated, and its usage."""
    lines = [line[6:] for line in raw.splitlines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    content = ""
    calls: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    for event in map(json.loads, lines[:-1]):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            calls += choice["delta"].get("tool_calls") or []
    message: Message = {"role": "assistant", "content": content}
    if calls:
        spelled = "".join(call["function"].get("arguments") or "" for call in calls)
        named = {"name": calls[0]["function"]["name"], "arguments": spelled}
        message["tool_calls"] = [{"id": calls[0]["id"], "type": "function", "function": named}]
    return message, usage


def result(number: int) -> str:
    """Return what the tool says in this turn."""
    return json.dumps({"tide": f"{number}.4 m", "next": f"0{number}:30", "note": PARAGRAPH.format(n=number, m=number)})


TOLD: dict[str, tuple[str, list[Turn]]] = {
    "document": ("", [Turn(question, document=HANDBOOK) for question in QUESTIONS]),
    "memory": (RULES, [Turn(q, memory=f"[User Memory]\n{m}") for q, m in zip(QUESTIONS, MEMORIES, strict=True)]),
    "tools": (RULES, [Turn(question, tool="get_tide") for question in QUESTIONS]),
    "clock": (
        f"The current date and time is {{now}}.\n{RULES}",
        [Turn(question, now=f"2026-03-04 10:0{i}:1{i}") for i, question in enumerate(QUESTIONS)],
    ),
}


# What the same requests get without the proxy is at most this share of it: the tests' power to fail.
STRAIGHT = {"document": 0.5, "memory": 0.9, "tools": 0.95, "clock": 0.1}
TRAIL = {
    "document": {"restore_history", "dedupe_context"},
    "memory": {"restore_history", "move_volatile"},
    "tools": {"restore_history", "move_midloop"},
    "clock": {"restore_history", "move_volatile"},
}


@pytest.mark.parametrize("kind", TOLD)
async def test_a_conversation_of_open_webui_reuses_what_one_that_only_appends_does(
    start_proxy_before: StartProxyBefore, vllm: server.Child, kind: str
) -> None:
    """
    Over turns 2 to 6 the proxy's cached tokens, and their share, are at least 0.9 of the append-only client's.
    """
    proxy = await start_proxy_before()
    headers = {"X-OpenWebUI-User-Id": "u1", "X-OpenWebUI-Chat-Id": str(uuid4())}
    through = Play(proxy.session, proxy.url, open_webui, headers=headers)
    append = Play(proxy.session, vllm.url, append_only, {"cache_salt": f"append {kind}"})
    straight = Play(proxy.session, vllm.url, open_webui, {"cache_salt": f"straight {kind}"})
    for name, play in (("through", through), ("append", append), ("straight", straight)):
        await play.run(*TOLD[kind])
        print(f"{kind}, {name}: {play.cached_tokens} of {play.prompt_tokens} tokens cached")
    assert through.cached_tokens >= LEAST_SHARE * append.cached_tokens
    assert through.share >= LEAST_SHARE * append.share
    assert through.trail >= TRAIL[kind]
    assert straight.share <= STRAIGHT[kind] * through.share
