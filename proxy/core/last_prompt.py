"""A prompt that went up and what vLLM said of it, as a compact value: no text, a few bytes a message."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from proxy.core.prints import chunks_in, chunks_of, prints_of
from proxy.core.request import Message
from proxy.core.text import calls_of, packed, reply_key, text_of

TEMPLATE_FIELDS = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "mm_processor_kwargs")
"""Fields that a chat template renders anywhere.  `add_generation_prompt` changes the end alone and is no break."""

HEAD_ROLES = frozenset({"system", "developer"})
MESSAGE_CHARACTERS = 16
"""What a template adds to a message, in characters: weight for estimates only."""

TOOL_CHARACTERS = 400
"""A tool's share of the prompt, in characters: weight for estimates only."""

OBJECT_BYTES = 720
"""What a LastPrompt costs beside its arrays, measured with tracemalloc on CPython 3.11 and rounded up."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What goes up now.  `continues`: its last message is the beginning of the answer."""

    model: str
    salt: str
    tools: int
    tool_count: int
    fields: int
    messages: tuple[Message, ...]
    prints: "array[int]"
    continues: bool


class Said(NamedTuple):
    """What was generated after a prompt: as fingerprints.  `cut`: the answer ended early, the client may know less."""

    whole: int
    key: bytes
    characters: int
    chunks: bytes
    thought: bool
    cut: bool


class Mark(NamedTuple):
    """So many leading messages are so many tokens, as vLLM counted; after a prompt its generation prompt included."""

    messages: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class LastPrompt:
    """What was sent up last, and its answer.  The arrays run over messages; an open last message is in `said` alone."""

    model: str
    salt: str
    tools: int
    tool_count: int
    fields: int
    head: int
    roles: str
    prints: "array[int]"
    lengths: "array[int]"
    chunks: bytes
    flat_marks: "array[int]"
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    said: Said | None = None

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Return what vLLM counted of its messages, shortest first."""
        return tuple(map(Mark._make, zip(self.flat_marks[::2], self.flat_marks[1::2], strict=True)))

    @property
    def size(self) -> int:
        """About the bytes that it holds."""
        arrays = 13 * len(self.prints) + len(self.chunks) + 4 * len(self.flat_marks)
        return OBJECT_BYTES + arrays + (len(self.said.chunks) if self.said else 0)

    def chunks_at(self, index: int) -> bytes:
        """Return the fingerprints of a message's chunks."""
        begin = sum(map(chunks_in, self.lengths[:index]))
        return self.chunks[4 * begin : 4 * (begin + chunks_in(self.lengths[index]))]

    def weight(self, begin: int, end: int) -> int:
        """Return about how much of the prompt messages `begin` to `end` are, in characters."""
        tools = TOOL_CHARACTERS * self.tool_count if begin == 0 and end >= max(self.head, 1) else 0
        return sum(self.lengths[begin:end]) + MESSAGE_CHARACTERS * (end - begin) + tools


def prompt_of(
    messages: tuple[Message, ...], rest: Mapping[str, object], *, model: str, tools: bytes = b""
) -> Prompt:  # fmt: skip
    """Return what a request is to the prefix cache.  `tools` is a digest of its tools list, empty where it has none."""
    listed, salt = rest.get("tools"), rest.get("cache_salt")
    given = [(name, packed(rest[name])) for name in TEMPLATE_FIELDS if rest.get(name) is not None]
    return Prompt(
        model,
        salt if isinstance(salt, str) else "",
        hash(tools),
        len(listed) if isinstance(listed, list) else 0,
        hash(tuple(given)),
        messages,
        prints_of(messages),
        rest.get("continue_final_message") is True and messages[-1].get("role") == "assistant",
    )


def said_in(message: Message) -> int:
    """Return the fingerprint of what a reply says: its text and calls, white space and spelling included."""
    calls = []
    for call in calls_of(message):
        function = call.get("function")
        known = function if isinstance(function, dict) else {}
        calls.append((str(known.get("name")), str(known.get("arguments"))))
    return hash((text_of(message), *calls))


def thinks(message: Message) -> bool:
    """Say whether a reply is told with its reasoning, in a field or in its text."""
    return bool(message.get("reasoning_content") or message.get("reasoning")) or text_of(message).lstrip().startswith(
        "<think>"
    )


def said_of(reply: Message, *, cut: bool) -> Said:
    """Return the fingerprints of a generated reply; `cut`: its stream ended early."""
    text = text_of(reply)
    return Said(said_in(reply), reply_key(reply), len(text), chunks_of(text), thinks(reply), cut)


def answered(
    prompt: Prompt,
    before: LastPrompt | None,
    shared: int,
    *,
    tokens: tuple[int, int] | None,
    reply: Message | None,
    cut: bool = False,
) -> LastPrompt:
    """Return what is kept of a prompt once it is answered.

    `before` is the prompt that it was compared with, `shared` the whole messages that they share: their fingerprints
    and counts are taken over.  `tokens` are vLLM's prompt and completion tokens, None where no usage came; `reply` is
    the generated message, with what it continues in front.
    """
    closed = len(prompt.messages) - prompt.continues
    same = before is not None and before.tools == prompt.tools and before.fields == prompt.fields
    kept = before if same else None
    keep = min(shared, len(kept.prints), closed) if kept is not None else 0
    lengths, chunks = _measured(prompt.messages[:closed], kept, keep)
    roles = "".join(_letter(message) for message in prompt.messages[:closed])
    return LastPrompt(
        prompt.model,
        prompt.salt,
        prompt.tools,
        prompt.tool_count,
        prompt.fields,
        len(roles) - len(roles.lstrip("s")),
        roles,
        prompt.prints[:closed],
        lengths,
        chunks,
        array("I", [number for mark in _marks(prompt, kept, keep, tokens) for number in mark]),
        tokens[0] if tokens is not None else None,
        tokens[1] if tokens is not None else 0,
        said_of(reply, cut=cut) if reply is not None else None,
    )


def _measured(messages: tuple[Message, ...], kept: LastPrompt | None, keep: int) -> tuple["array[int]", bytes]:
    """Return lengths and chunks of messages; those of the first `keep` are known."""
    lengths, chunks = array("I"), b""
    if kept is not None and keep:
        lengths = kept.lengths[:keep]
        chunks = kept.chunks[: 4 * sum(map(chunks_in, lengths))]
    texts = [text_of(message) for message in messages[keep:]]
    lengths.extend(map(len, texts))
    return lengths, chunks + b"".join(map(chunks_of, texts))


def _letter(message: Message) -> str:
    role = str(message.get("role"))
    return "s" if role in HEAD_ROLES else role[:1] if role in ("user", "assistant", "tool") else "?"


def _marks(
    prompt: Prompt, kept: LastPrompt | None, keep: int, tokens: tuple[int, int] | None
) -> tuple[Mark, ...]:  # fmt: skip
    """Counts stay true while the messages before them do; one with a generation prompt only where an answer follows."""
    closed = len(prompt.messages) - prompt.continues
    marks: list[Mark] = []
    if kept is not None:
        marks = [m for m in kept.marks if m.messages <= keep and m.messages < closed and _holds(m, prompt)]
        said = kept.said
        if keep == len(kept.prints) < closed and kept.prompt_tokens is not None and said is not None and not said.cut:
            told = prompt.messages[keep]
            if said_in(told) == said.whole and thinks(told) == said.thought:
                marks.append(Mark(keep + 1, kept.prompt_tokens + kept.completion_tokens))
    if tokens is not None and not prompt.continues:
        marks.append(Mark(closed, tokens[0]))
    return tuple(marks)


def _holds(mark: Mark, prompt: Prompt) -> bool:
    return ends_a_reply(mark, prompt.messages) or prompt.messages[mark.messages].get("role") == "assistant"


def ends_a_reply(mark: Mark, messages: tuple[Message, ...]) -> bool:
    """Say whether a count reaches to the end of a reply, and so holds no generation prompt."""
    return messages[mark.messages - 1].get("role") == "assistant"
