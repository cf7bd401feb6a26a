"""What Open WebUI does with a chat, one generator a scenario: it yields what is asked and is sent the answer's text."""

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from proxy.bench.texts import prose, question, tool_list

Message = Mapping[str, object]
KNOWLEDGE_BASE = "knowledge-base"
_PAUSE = timedelta(seconds=41)  # between turns, so that the clock always shows another second
_POOL = 12  # documents that all users' questions draw from
_DRAWN = 3
_QUOTED = 1000  # characters of a message in a task
# The lead sentence that marks Open WebUI's own template; the rest in our words, and about as long.
_INSTRUCTIONS = """\
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
_TASKS = {
    "title_generation": "Generate a concise title summarizing the chat history.",
    "tags_generation": "Generate 1-3 broad tags categorizing the main themes of the chat history.",
    "follow_up_generation": "Predict 3-5 useful messages this user might send next in this chat.",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long the texts are, in tokens, and how many tools there are."""

    system: int
    document: int
    memory: int
    history: int
    source: int  # of a knowledge base: three go with each question
    tools: int

    def within(self, context_tokens: int | None, *, output_tokens: int, turns: int) -> "Sizes":
        """Return what leaves room for the turns in a context of that length, where it is known."""
        if context_tokens is None:
            return self
        room = max(64, context_tokens * 3 // 4 - self.system - turns * (output_tokens + 80))
        return Sizes(
            min(self.system, context_tokens // 8),
            # Each turn's block may stand again where nothing takes it out.
            min(self.document, room // 3),
            self.memory,
            min(self.history, room),
            min(self.source, room // 6),
            min(self.tools, max(2, room // 400)),
        )


SIZES: Mapping[str, Sizes] = {
    "small": Sizes(250, 500, 60, 1500, 300, 6),
    "normal": Sizes(400, 3000, 150, 12_000, 300, 36),
    "large": Sizes(800, 12_000, 300, 40_000, 300, 36),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of Open WebUI: to which turn and chat it belongs, and whether it is a task."""

    turn: int
    chat: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] = ()
    task: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """What one user's chat is made from; `lead` opens the system prompt and keeps the two ways apart in the cache."""

    user: str
    chat: str
    lead: str
    turns: int
    sizes: Sizes
    begun: datetime


Script = Generator[Ask, str, None]


@dataclass(frozen=True, slots=True)
class _Ways:
    """What a scenario has beside a system prompt and questions."""

    clock: bool = False
    memory: bool = False
    document: bool = False
    tools: bool = False
    tasks: bool = False
    opening: float = 0  # the part of Sizes.history that has been said before


def requests_of(name: str, turns: int) -> int:
    """Return how many requests one user's chat makes on one way."""
    ways = _SCENARIOS.get(name)
    if ways is None:
        return turns
    return turns * (1 + ways.tools + ways.tasks) + 2 * ways.tasks


def script(name: str, plot: Plot) -> Script:
    """Begin one user's chat of scenario `name`; the history holds what it is sent, stripped as Open WebUI does."""
    return _knowledge_base(plot) if name == KNOWLEDGE_BASE else _chat(plot, _SCENARIOS[name])


def _chat(plot: Plot, ways: _Ways) -> Script:
    history: list[Message] = _opening(plot, ways.opening)
    tools = tool_list("tools", plot.sizes.tools) if ways.tools else ()
    for turn in range(plot.turns):
        system = _system(plot, turn, ways)
        asked = question(f"{plot.user} {turn}")
        if ways.document and turn == 0:
            asked = f"{_ATTACHED}{asked}"
        block = _context([prose(f"document {plot.user}", plot.sizes.document)]) if ways.document else ""
        answer = yield Ask(turn, plot.chat, [system, *history, _user(block + asked)], tools)
        rounds: list[Message] = []
        if ways.tools:
            rounds = _rounds(plot, turn)
            # A tool that cites makes Open WebUI put its instructions, with an empty source, before the question.
            told = [system, *history, _user(_context([""]) + asked), *rounds]
            answer = yield Ask(turn, plot.chat, told, tools)
        history += [_user(asked), *rounds, *_assistant(answer)]
        if ways.tasks:
            for task in _TASKS if turn == 0 else ("follow_up_generation",):
                yield Ask(turn, plot.chat, [_task(task, history)], task=task)


def _knowledge_base(plot: Plot) -> Script:
    """Ask each question in a chat of its own, with sources that other users' questions find, too."""
    for turn in range(plot.turns):
        first = hash_of(f"{plot.user} {turn}") % _POOL
        sources = [prose(f"source {(first + step) % _POOL}", plot.sizes.source) for step in range(_DRAWN)]
        asked = _context(sources) + question(f"{plot.user} {turn}")
        yield Ask(turn, f"{plot.chat}-{turn}", [_system(plot, turn, _Ways(clock=True)), _user(asked)])


def hash_of(text: str) -> int:
    """Return a number that is the same for the same text in every process."""
    return sum((position + 1) * ord(sign) for position, sign in enumerate(text))


def _system(plot: Plot, turn: int, ways: _Ways) -> Message:
    lead = plot.lead
    if ways.clock:
        lead += f" The current date and time is {(plot.begun + turn * _PAUSE).strftime('%Y-%m-%d %H:%M:%S')}."
    text = f"{lead}\n\n{prose('system', plot.sizes.system)}"
    if ways.memory:
        remembered = prose(f"memory {plot.user} {turn}", plot.sizes.memory)
        text += f"\n<memory_context>\n[User Memory]\n{remembered}\n</memory_context>"
    return {"role": "system", "content": text}


_ATTACHED = (
    '<attached_files>\n<file type="file" url="5d0c" content_type="text/plain" name="handbook.txt"/>\n'
    "</attached_files>\n\n"
)


def _context(sources: Sequence[str]) -> str:
    told = "\n".join(
        f'<source id="{number}" name="handbook.txt">{source}</source>' for number, source in enumerate(sources, start=1)
    )
    return f"{_INSTRUCTIONS}\n<context>\n{told}\n</context>\n\n"


def _opening(plot: Plot, share: float) -> list[Message]:
    """Return a history of some length: this chat has been going on for a while."""
    each = 400
    out: list[Message] = []
    for number in range(int(plot.sizes.history * share) // each):
        out += [_user(question(f"{plot.user} opening {number}"))]
        out += [{"role": "assistant", "content": prose(f"{plot.user} answer {number}", each - 25)}]
    return out


def _rounds(plot: Plot, turn: int) -> list[Message]:
    """Return a call and its result.  It is scripted: whether a model calls a tool by itself is not what is measured."""
    call_id = f"call_{plot.chat[:8]}{turn}"
    function = {"name": "tool_0", "arguments": json.dumps({"argument_0": f"page {turn}"}, separators=(",", ":"))}
    call = {"id": call_id, "type": "function", "function": function}
    result = prose(f"result {plot.user} {turn}", 200)
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]


def _task(task: str, history: Sequence[Message]) -> Message:
    told = "\n".join(f"{str(each['role']).upper()}: {_quoted(str(each['content']))}" for each in history[-4:])
    return _user(
        f"### Task:\n{_TASKS[task]}\n\n### Guidelines:\n- Write in the language of the chat.\n\n### Output:\nJSON.\n\n"
        f"### Chat History:\n<chat_history>\n{told}\n</chat_history>"
    )


def _quoted(text: str) -> str:
    """Return a message as tasks quote it: a long one without its middle."""
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED // 2]}...{text[-_QUOTED // 2 :]}"


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(answer: str) -> list[Message]:
    text = answer.strip()
    return [{"role": "assistant", "content": text}] if text else []


_SCENARIOS: Mapping[str, _Ways] = {
    "clock": _Ways(clock=True),
    "document": _Ways(document=True),
    "memory": _Ways(memory=True, opening=0.5),
    "tools": _Ways(tools=True),
    "tasks": _Ways(tasks=True, opening=0.5),
    "long": _Ways(clock=True, opening=1),
}
SCENARIOS = (*_SCENARIOS, KNOWLEDGE_BASE)
