"""Growing conversations, as clients tell them turn by turn: what a chat template is checked with.

Texts are plain words, so that they stand in a prompt as they are, however a template escapes.  Each case tells the
whole conversation with each turn, as clients do; `asks` says which renderings the shell has to get.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.core.request import Message

Needs = Literal["tools", "thinking", "switch"]
Kind = Literal["prompt", "open"]
"""A turn's prompt as it is sent; the same messages without the generation prompt."""
Key = tuple[str, int, Kind]


@dataclass(frozen=True, slots=True)
class Ask:
    """One rendering to get: as the body of /tokenize."""

    messages: tuple[Message, ...]
    tools: bool = False
    kwargs: Mapping[str, object] | None = None  # chat_template_kwargs
    generation: bool = True
    continues: bool = False  # continue_final_message


@dataclass(frozen=True, slots=True)
class Turn:
    """The messages as sent with this turn, and what the model then said."""

    messages: tuple[Message, ...]
    reply: Message
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation; `needs` is what a template must know for the case to say anything."""

    name: str
    says: str
    turns: tuple[Turn, ...]
    tools: bool = False
    thinking: bool | None = None  # what the switch of the template is set to
    needs: tuple[Needs, ...] = ()
    counted: bool = True  # False: what no template can mend; told, and not held against this one

    def asks(self) -> Iterator[tuple[Key, Ask]]:
        """Yield what has to be rendered."""
        switch = None if self.thinking is None else thinking_switch(self.thinking)
        for number, turn in enumerate(self.turns):
            ask = Ask(turn.messages, self.tools, switch, generation=not turn.continues, continues=turn.continues)
            yield (self.name, number, "prompt"), ask
            if number + 1 < len(self.turns):
                yield (self.name, number, "open"), Ask(turn.messages, self.tools, switch, generation=False)


def thinking_switch(on: bool) -> Mapping[str, object]:
    """Return the template's arguments that switch thinking: Qwen, GLM and others; DeepSeek and Granite."""
    return {"enable_thinking": on, "thinking": on}


def user(text: str) -> Message:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def said(text: str, thinking: str | None = None) -> Message:
    """Return a reply, its thinking under both names: /tokenize reads one, files and older servers the other."""
    fields = {} if thinking is None else {"reasoning": thinking, "reasoning_content": thinking}
    return {"role": "assistant", "content": text, **fields}


def calls(*arguments: str, text: str = "", thinking: str | None = None) -> Message:
    """Return a reply that calls the weather tool once for each text of arguments."""
    made = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": TOOL_NAME, "arguments": each}}
        for number, each in enumerate(arguments, start=1)
    ]
    return {**said(text, thinking), "tool_calls": made}


def result(text: str, number: int = 1) -> Message:
    """Return the result of a call."""
    return {"role": "tool", "tool_call_id": f"call{number:05}", "content": text}


TOOL_NAME = "look_up_weather"
TOOL_SAYS = "Look up the weather of a town"
TOOLS: tuple[Mapping[str, object], ...] = (
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": TOOL_SAYS,
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": "string"}},
                "required": ["town"],
            },
        },
    },
)
# In the spelling that models are trained on, which is that of Python's json.  Keys out of order, a letter beyond ASCII
# and a sign that HTML escapes show what a template does to them.
_ARGUMENTS = json.dumps({"town": "Zürich", "days": 2, "note": "wind < 5"}, ensure_ascii=False)
_OTHER = json.dumps({"town": "Bern", "days": 1}, ensure_ascii=False)
_COMPACT = '{"town":"Bern","days":1}'

_S: Message = {"role": "system", "content": "Answer in short sentences."}
_NOTE: Message = {"role": "system", "content": "The user has moved to Geneva."}
_ASK, _MORE, _LAST = user("Which lake is deep?"), user("And which one is wide?"), user("Which one is cold?")
_DEEP, _WIDE, _COLD = said("Lake Baikal is deep."), said("Lake Victoria is wide."), said("Lake Vostok is cold.")
_DEEP_THOUGHT = said("Lake Baikal is deep.", "The user wants depth, so compare depths.")
_WIDE_THOUGHT = said("Lake Victoria is wide.", "Now the surface counts.")
_COLD_THOUGHT = said("Lake Vostok is cold.", "Look for ice.")
_IS_IT = user("Is it windy there?")
_WINDY, _CALM = said("It is windy in that town."), said("No, it is calm.")


def grown(
    asked: Sequence[Sequence[Message]], replies: Sequence[Message], *, head: Sequence[Message] = ()
) -> tuple[Turn, ...]:
    """Return the turns of a client that only appends: what is new with each turn, and the reply to it."""
    turns: list[Turn] = []
    told = list(head)
    for new, reply in zip(asked, replies, strict=True):
        told += new
        turns.append(Turn(tuple(told), reply))
        told.append(reply)
    return tuple(turns)


def inline(reply: Message) -> Message:
    """Return a reply with its thinking in the content, as a server without a reasoning parser gives it."""
    return said(f"<think>\n{reply['reasoning']}\n</think>\n\n{reply['content']}")


def _loop(first: Message, second: Message, answer: Message, last: Message) -> tuple[Turn, ...]:
    """Return a tool loop of two calls one after the other, an answer, and another question."""
    new = ([_IS_IT], [result("wind of 40")], [result("wind of 10")], [_MORE])
    return grown(new, (first, second, answer, last))


_PLAIN = ([_ASK], [_MORE], [_LAST])
_REPLIES = (_DEEP, _WIDE, _COLD)
_THOUGHTS = (_DEEP_THOUGHT, _WIDE_THOUGHT, _COLD_THOUGHT)
_CUT, _REST = "Lake Baikal", " is deep."

CASES: tuple[Case, ...] = (
    Case("plain", "a chat of three turns", grown(_PLAIN, _REPLIES)),
    Case("system", "the same with a system message", grown(_PLAIN, _REPLIES, head=[_S])),
    Case("white space", "a reply that ends in white space", grown(_PLAIN, (said("Lake Baikal. \n"), _WIDE, _COLD))),
    Case("users in a row", "two user messages in a row", grown(([_ASK], [_MORE, _LAST], [_IS_IT]), _REPLIES)),
    Case("system later", "a system message in the middle", grown(([_ASK], [_NOTE, _MORE], [_LAST]), _REPLIES)),
    Case("two systems", "the same after a first one", grown(([_ASK], [_NOTE, _MORE], [_LAST]), _REPLIES, head=[_S])),
    Case(
        "continue",
        "a reply that is continued (continue_final_message)",
        (
            Turn((_ASK,), said(_CUT)),
            Turn((_ASK, said(_CUT)), said(_REST), continues=True),
            Turn((_ASK, said(_CUT + _REST), _MORE), _WIDE),
        ),
    ),
    Case("tools", "tools that nobody calls", grown(_PLAIN, _REPLIES, head=[_S]), tools=True, needs=("tools",)),
    Case("tools alone", "the same without a system message", grown(_PLAIN, _REPLIES), tools=True, needs=("tools",)),
    Case(
        "tool loop",
        "calls, results, and a question after them",
        _loop(calls(_ARGUMENTS), calls(_OTHER), _WINDY, _CALM),
        tools=True,
        needs=("tools",),
    ),
    Case(
        "two calls",
        "two calls at once",
        grown(
            ([_IS_IT], [result("wind of 40"), result("wind of 10", 2)], [_MORE]),
            (calls(_ARGUMENTS, _OTHER), _WINDY, _WIDE),
        ),
        tools=True,
        needs=("tools",),
    ),
    Case("thinking", "thinking in a field of its own", grown(_PLAIN, _THOUGHTS), needs=("thinking",)),
    Case("thinking inline", "thinking in the content", grown(_PLAIN, tuple(inline(each) for each in _THOUGHTS))),
    Case(
        "thinking loop",
        "thinking before calls",
        _loop(
            calls(_ARGUMENTS, thinking="Ask for Zurich first."),
            calls(_OTHER, thinking="Bern is next."),
            said("It is windy.", "Forty is much."),
            _WIDE_THOUGHT,
        ),
        tools=True,
        needs=("tools", "thinking"),
    ),
    Case("thinking off", "thinking switched off", grown(_PLAIN, _REPLIES), thinking=False, needs=("switch",)),
    Case(
        "loop, thinking off",
        "a tool loop with thinking switched off",
        _loop(calls(_ARGUMENTS), calls(_OTHER), _WINDY, _CALM),
        tools=True,
        thinking=False,
        needs=("tools", "switch"),
    ),
    Case(
        "compact arguments",
        "arguments spelled without spaces; vLLM parses them before any template",
        _loop(calls(_COMPACT), calls(_OTHER), _WINDY, _CALM),
        tools=True,
        needs=("tools",),
        counted=False,
    ),
)

# What is asked to find out what a template knows at all; without a system message, which some refuse.
PROBES: Mapping[str, Ask] = {
    "bare": Ask((_ASK,)),
    "tools": Ask((_ASK,), tools=True),
    "on": Ask((_ASK,), kwargs=thinking_switch(True)),
    "off": Ask((_ASK,), kwargs=thinking_switch(False)),
    "thought": Ask((_ASK, _DEEP_THOUGHT), generation=False),
    "thought in a loop": Ask((_ASK, calls(_OTHER, thinking="Ask for Bern."), result("wind of 10"))),
}
PROBED_THOUGHTS = ("The user wants depth", "Ask for Bern.")
