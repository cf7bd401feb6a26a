"""One conversation told in two ways: as Open WebUI tells it, and as a client tells it that only ever appends."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

# Open WebUI's lead sentence, and in our words about as many instructions as it gives.
INSTRUCTIONS = """\
### Task:
Respond to the user query using the provided context, incorporating inline citations in the format [id] where a source
has an id.

### Guidelines:
- Say so when you do not know the answer, and ask when the query can be read in two ways.
- Answer in the language of the query; keep to the context where it speaks, and say when it does not.
- Cite nothing that has no id, and write no XML.

### Output:
A direct answer to the query.
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user asks, and what Open WebUI adds: the time, memory, a document, a tool that the model calls first."""

    question: str
    now: str = ""
    memory: str = ""
    document: str = ""
    tool: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back in one turn: the messages of its tool rounds and its reply, as they were generated."""

    rounds: tuple[Message, ...] = ()
    reply: str = ""


Teller = Callable[[str, Sequence[Turn], Sequence[Answer], Sequence[Message]], list[Message]]
"""System text, turns so far, answers to all but the last, rounds of the last: to the messages of one request."""


def open_webui(
    system: str, turns: Sequence[Turn], answers: Sequence[Answer], rounds: Sequence[Message]
) -> list[Message]:
    """Tell the chat as Open WebUI does.

    The system message holds the time and the memory of this moment.  A document stands before the newest question
    only, while an `<attached_files>` element stays where it was attached.  Replies are stripped and arguments spelled
    anew.  In a tool loop the instructions to cite stand before the question until the turn is over.
    """
    last = turns[-1]
    text = _with_memory(system.replace("{now}", last.now), last.memory)
    out: list[Message] = [{"role": "system", "content": text}] if text else []
    for turn, answer in zip(turns, answers, strict=False):
        out.append(_user(_asked(turn, turns[0])))
        out += _respelled(answer.rounds)
        if answer.reply.strip():
            out.append({"role": "assistant", "content": answer.reply.strip()})
    block = _context(last.document) if last.document else _citing(last) if rounds else ""
    return [*out, _user(block + _asked(last, turns[0])), *_respelled(rounds)]


def append_only(
    system: str, turns: Sequence[Turn], answers: Sequence[Answer], rounds: Sequence[Message]
) -> list[Message]:
    """Tell the same text at the end of what was told before, and nothing of it twice.

    Notes of a new time or memory stand before the question, the instructions to cite after the first tool's result.
    """
    first = turns[0]
    text = _with_memory(system.replace("{now}", first.now), first.memory)
    out: list[Message] = [{"role": "system", "content": text}] if text else []
    before = first
    for number, turn in enumerate(turns):
        news = [turn.now] if turn.now and turn.now != before.now else []
        news += [_memory(turn.memory)] if turn.memory != before.memory else []
        out += [{"role": "system", "content": "\n".join(news)}] if news else []
        new_document = turn.document and (turn is first or turn.document != before.document)
        out.append(_user(_context(turn.document) + _asked(turn, first) if new_document else turn.question))
        own = answers[number] if number < len(answers) else Answer(tuple(rounds))
        out += _cited(own.rounds, turn) if turn is first else own.rounds
        if own.reply:
            out.append({"role": "assistant", "content": own.reply})
        before = turn
    return out


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _memory(memory: str) -> str:
    return f"<memory_context>\n{memory}\n</memory_context>"


def _with_memory(system: str, memory: str) -> str:
    return f"{system}\n{_memory(memory)}" if memory else system


def _context(document: str, name: str = "handbook.txt") -> str:
    source = f'<source id="1" name="{name}" resource-type="file">{document}</source>'
    return f"{INSTRUCTIONS}\n<context>\n{source}\n</context>\n\n"


def _citing(turn: Turn) -> str:
    """Return what a citing tool makes Open WebUI put before the question: instructions, and a source without text."""
    return _context("", turn.tool) if turn.tool else ""


def _asked(turn: Turn, first: Turn) -> str:
    """Return the question; the message that the file was attached to says so, then and ever after."""
    if turn is not first or not turn.document:
        return turn.question
    file = '<file type="file" id="5d0c" url="5d0c" content_type="text/plain" name="handbook.txt"/>'
    return f"<attached_files>\n{file}\n</attached_files>\n\n{turn.question}"


def _respelled(rounds: Sequence[Message]) -> list[Message]:
    """Return tool rounds as Open WebUI keeps them: arguments as compact JSON."""
    return [{**message, "tool_calls": [_compact(call) for call in message["tool_calls"]]}
            if "tool_calls" in message else message for message in rounds]  # fmt: skip


def _compact(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False, separators=(",", ":"))
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _cited(rounds: Sequence[Message], turn: Turn) -> list[Message]:
    """Return tool rounds as generated, the instructions to cite at the end of the last result."""
    out = list(rounds)
    if out and turn.tool:
        out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{_citing(turn).rstrip()}"}
    return out
