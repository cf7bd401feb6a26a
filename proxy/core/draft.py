"""What the steps work on: a request taken apart into its head and its messages, and what the shell looked up for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from proxy.core.learned_lines import Lines
from proxy.core.ledger import Ledger, Node, Record
from proxy.core.notes import in_front
from proxy.core.request import ChatRequest, Message
from proxy.core.text import first_text, packed, text_of

HEAD_ROLES = ("system", "developer")
PART = "part"
"""The role, in the ledger only, of a note that goes out as a text part."""

GAP_TEXT = "(Earlier parts of this conversation are left out here, because it outgrew the model's context.)"

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
    words of `message`.  `blocks` are the volatile texts that its note, or its own end, tells: (kind, digest), an
    empty digest for a revoked one.  `midloop` is a block that the client put in front of a message that had gone up
    without it; `move_midloop` places it.  `packed` is what `node` holds, where note and message are exactly that.
    """

    told: Message
    seen: bytes
    message: Message
    node: Node | None = None
    note: Message | None = None
    blocks: tuple[tuple[str, bytes], ...] = ()
    short: bool = False
    midloop: str = ""
    packed: bytes | None = None

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
class Cut:
    """Where a history begins: at the turn of the message at `turn` (its digest as told is `seen`).

    Of that turn, what stands between its user message and `inner` is left out too.  Places count every message after
    the head.
    """

    turn: int
    seen: bytes
    inner: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A request on its way through the steps: head (leading system messages), entries, every other field, the trail.

    `gone` are the places of entries that a cut leaves out; `gap` marks the first of them.  `restored` is the draft
    before any text moved, from which a cut begins anew.  `counted` is what is known of the prompt's tokens: vLLM's
    count where `exact`, else a sure upper bound.  `tools` is the digest of the list of tools, `family` that of all that
    two prompts must share to be compared; None where nobody needed them yet.
    """

    head: tuple[Message, ...]
    entries: tuple[Entry, ...]
    rest: Mapping[str, object]
    trail: tuple[str, ...] = ()
    lines: Lines | None = None
    gone: frozenset[int] = frozenset()
    gap: Message | None = None
    cut: Cut | None = None
    restored: "Draft | None" = None
    counted: int | None = None
    exact: bool = False
    tools: bytes | None = None
    family: bytes | None = None

    def request(self) -> ChatRequest:
        """Return the request as it would go out now."""
        sent = tuple(message for wire in self.wired().values() for message in wire)
        return ChatRequest(self.head + sent, self.rest)

    def wired(self) -> dict[int, tuple[Message, ...]]:
        """Return what goes out in the place of each entry that does, with the mark of the gap."""
        out = {i: entry.wire() for i, entry in enumerate(self.entries) if i not in self.gone}
        place = self.gap_place()
        if place is not None and self.gap is not None:
            out[place] = _marked(out[place], self.gap)
        return out

    def gap_place(self) -> int | None:
        """Return the place of the entry that the mark of the gap stands in front of; a part only goes to a user's."""
        if self.gap is None or self.cut is None or not self.gone:
            return None
        whole_turns = min(self.gone) < self.cut.turn
        return self.cut.turn if whole_turns or self.gap.get("role") == PART else self.cut.inner

    def kept(self) -> list[Entry]:
        """Return the entries that go out."""
        return [entry for i, entry in enumerate(self.entries) if i not in self.gone]

    def with_entry(self, index: int, entry: Entry) -> "Draft":
        """Return the draft with one entry replaced."""
        return replace(self, entries=(*self.entries[:index], entry, *self.entries[index + 1 :]))


def _marked(wire: tuple[Message, ...], gap: Message) -> tuple[Message, ...]:
    return (gap, *wire) if gap.get("role") != PART else (*wire[:-1], in_front(wire[-1], text_of(gap)))


@dataclass(frozen=True, slots=True)
class Trim:
    """How a history is cut: the low watermark as a share of the high one, turns that stay, the sentence for the gap."""

    low_share: float = 0.6
    pinned_turns: int = 0
    gap_text: str | None = GAP_TEXT


@dataclass(frozen=True, slots=True)
class Template:
    """What the served template, and vLLM itself, were seen to take; unknown is what all of them take."""

    system_in_place: bool = False
    users_in_a_row: bool = False
    thinking_in_history: bool = False


@dataclass(frozen=True, slots=True)
class Lengths:
    """The limits of this request, in tokens; None: unknown or not limited.

    `fields` name what carries a limit on this route, in the order in which vLLM takes them: on the chat route
    max_completion_tokens wins where both are given.  A default is given in the last.
    """

    cap: int | None = None
    default_output: int | None = None
    max_model_len: int | None = None
    max_prompt: int | None = None
    fields: tuple[str, ...] = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What vLLM has of a chat: the messages of its last prompt as they went up, the reply once it has ended.

    `rest` are the fields that its template rendered; `tokens` those of both, vLLM's own count.
    """

    messages: tuple[Message, ...]
    reply: Message | None
    rest: Mapping[str, object]
    tokens: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the shell looked up for this turn: the core's only view of the world.

    `explicit`: the chat was named by somebody who may; only then come documents and memory back.  `marker`: a word
    that only the proxy can know, an HMAC of the session.  `lines`: what is known of the lines of the head in this
    chat (None: nothing is learned); `patterns`: skeletons and places learned in other chats of the tenant.  `counts`:
    what was counted of this request's parts, in tokens; `rough`: which of that are not the model's own counts but upper
    bounds.
    """

    steps: frozenset[str]
    ledger: Ledger
    explicit: bool = False
    task: bool = False
    takes_priority: bool = False
    tools: tuple[bytes, ...] = ()
    tool_list: bytes = b""
    tools_order: str = "session"
    template: Template = Template()
    lengths: Lengths = Lengths()
    salt: str | None = None
    tags: tuple[str, ...] = ()
    leads: tuple[str, ...] = DOCUMENT_LEADS
    marker: str = "note"
    reasons: bool = False
    lines: Lines | None = None
    patterns: tuple[tuple[bytes, frozenset[int]], ...] = ()
    whitespace_only: bool = False
    thinking: bool = False
    trim: Trim = Trim()
    cut: Cut | None = None
    task_name: str = ""
    chats: tuple[ChatPrompt, ...] = ()
    counts: Mapping[bytes, int] = field(default_factory=dict)
    rough: frozenset[bytes] = frozenset()
    image_tokens: int = 1536


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
        role = entry.role
        whole = role == "user" and begins_with_block(entry.told, leads)
        keeps = same and whole
        sent = _sent(entry, whole) if keeps or not same else None
        out.append(Record(role, entry.seen, entry.node, sent, keeps, entry.blocks, i < last, entry.short))
    return tuple(out)


def _sent(entry: Entry, whole: bool) -> bytes:
    # A step that changes an entry takes its node away.
    if entry.node is not None and entry.packed is not None:
        return entry.packed
    if entry.message is entry.told and not whole:
        # The client tells it again: a picture is not kept beside a time of day.
        return packed([entry.note, None])
    return packed(list(entry.sent()))
