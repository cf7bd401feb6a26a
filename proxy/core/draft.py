"""What the steps work on: a request taken apart into its head and its messages, and what the shell looked up for it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from proxy.core.ledger import Ledger, Node, Record
from proxy.core.notes import in_front
from proxy.core.request import ChatRequest, Message
from proxy.core.text import first_text, packed, text_of

HEAD_ROLES = ("system", "developer")
PART = "part"
"""The role, in the ledger only, of a note that goes out as a text part."""

DOCUMENT_LEADS = ("### Task:\nRespond to the user query using the provided context",)
"""How Open WebUI 0.12 begins a user message that carries documents (facts observed on the wire)."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of volatile text: its kind, its text, its digest."""

    kind: str
    text: str
    digest: bytes


class Entry(NamedTuple):
    """One message after the head: as told, where the ledger knows it, and as it goes out.

    `note` is what goes in front of it: a system message, or, under the role `PART`, a text part of its own before the
    words of `message`.  `blocks` are the volatile texts that its note, or its own end,
    tells: (kind, digest), an empty digest for a revoked one.  `midloop` is a block that the client put in front of a
    message that had gone up without it; `move_midloop` places it.
    """

    told: Message
    seen: bytes
    message: Message
    node: Node | None = None
    note: Message | None = None
    blocks: tuple[tuple[str, bytes], ...] = ()
    short: bool = False
    midloop: str = ""

    @property
    def role(self) -> str:
        """The role of the message."""
        return str(self.told.get("role"))

    def sent(self) -> tuple[Message, ...]:
        """Return its note and message apart, as the ledger keeps them."""
        return (self.message,) if self.note is None else (self.note, self.message)

    def wire(self) -> tuple[Message, ...]:
        """Return the messages that go out in its place."""
        if self.note is None or self.note.get("role") != PART:
            return self.sent()
        return (in_front(self.message, text_of(self.note)),)


@dataclass(frozen=True, slots=True)
class Draft:
    """A request on its way through the steps: head (leading system messages), entries, every other field, the trail."""

    head: tuple[Message, ...]
    entries: tuple[Entry, ...]
    rest: Mapping[str, object]
    trail: tuple[str, ...] = ()

    def request(self) -> ChatRequest:
        """Return the request as it would go out now."""
        return ChatRequest(self.head + tuple(m for entry in self.entries for m in entry.wire()), self.rest)

    def with_entry(self, index: int, entry: Entry) -> "Draft":
        """Return the draft with one entry replaced."""
        return replace(self, entries=(*self.entries[:index], entry, *self.entries[index + 1 :]))


@dataclass(frozen=True, slots=True)
class Template:
    """What the served chat template was seen to accept; unknown is what every template takes."""

    system_in_place: bool = False
    users_in_a_row: bool = False


@dataclass(frozen=True, slots=True)
class Lengths:
    """The limits of this request, in tokens; None: unknown or not limited.

    `fields` name what carries a limit on this route, in the order in which vLLM takes them: on the chat route
    max_completion_tokens wins where both are given.  A default is given in the last.
    """

    cap: int | None = None
    default_output: int | None = None
    max_model_len: int | None = None
    fields: tuple[str, ...] = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the shell looked up for this turn: the core's only view of the world.

    `explicit`: the chat was named by somebody who may; only then come documents and memory back.  `marker`: a word that
    only the proxy can know, an HMAC of the session.
    """

    steps: frozenset[str]
    ledger: Ledger
    explicit: bool = False
    task: bool = False
    tools: tuple[bytes, ...] = ()
    tools_order: str = "session"
    template: Template = Template()
    lengths: Lengths = Lengths()
    salt: str | None = None
    tags: tuple[str, ...] = ()
    leads: tuple[str, ...] = DOCUMENT_LEADS
    marker: str = "note"
    reasons: bool = False
    learned: frozenset[bytes] = frozenset()
    whitespace_only: bool = False


def begins_with_block(message: Message, leads: tuple[str, ...]) -> bool:
    """Say whether a user message opens as machine-made blocks do; its text is then kept, for the block may vanish."""
    text = first_text(message) or ""
    return text.startswith((*leads, "<context>", "<source", "<attached_files>"))


def records_of(draft: Draft, leads: tuple[str, ...]) -> tuple[Record, ...]:
    """Return what the ledger is to remember of a draft that goes up."""
    last = len(draft.entries) - 1
    out = []
    for i, entry in enumerate(draft.entries):
        same = entry.note is None and entry.message is entry.told
        keeps = same and entry.role == "user" and begins_with_block(entry.told, leads)
        sent = packed(list(entry.sent())) if keeps or not same else None
        out.append(Record(entry.role, entry.seen, entry.node, sent, keeps, entry.blocks, i < last, entry.short))
    return tuple(out)
