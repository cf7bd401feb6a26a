"""The proxy's core without I/O, as the shell drives it: requests in, what goes up out, answers remembered."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.core.draft import Facts, Template
from proxy.core.ledger import Ledger, Node
from proxy.core.pipeline import MOVES_TEXT, PIPELINE, Rewritten, rewrite
from proxy.core.request import ChatRequest, Message
from proxy.core.text import text_of

STEPS = frozenset(name for name, _ in PIPELINE)
LEAD = "### Task:\nRespond to the user query using the provided context, citing it.\n\n<context>\n"
MARKER = "note 0123456789"
TEMPLATES = (Template(), Template(system_in_place=True, users_in_a_row=True))


@dataclass
class Wire:
    """The pure core between a client and a vLLM, one session, driven as proxy.rewriting drives it."""

    template: Template = TEMPLATES[0]
    steps: frozenset[str] = STEPS
    explicit: bool = True
    ledger: Ledger = field(default_factory=lambda: Ledger(1 << 20))
    node: Node | None = None
    told: tuple[Message, ...] = ()
    tags: tuple[str, ...] = ()
    whitespace_only: bool = False

    def facts(self) -> Facts:
        """Return what the shell would have looked up."""
        return Facts(
            self.steps,
            self.ledger,
            self.explicit,
            template=self.template,
            marker=MARKER,
            tags=self.tags,
            whitespace_only=self.whitespace_only,
        )

    def send(self, messages: Sequence[Message], **rest: object) -> tuple[Message, ...]:
        """Rewrite a request and remember that it went up; return its messages as sent."""
        return self.rewritten(messages, **rest).request.messages

    def rewritten(self, messages: Sequence[Message], **rest: object) -> Rewritten:
        """Rewrite a request and remember that it went up."""
        done = rewrite(ChatRequest(tuple(messages), rest), self.facts())
        assert done.failed == ()
        if self.steps & MOVES_TEXT:
            self.node = self.ledger.record(done.records)
        self.told = tuple(messages)
        return done

    def answered(self, reply: Message, *, cut: bool = False, node: Node | None = None) -> None:
        """Remember what vLLM generated, to the last request or to that of `node`."""
        at = node or self.node
        if at is None:
            return
        if self.told and self.told[-1].get("role") == "assistant" and at.parent is not None:
            reply = {**reply, "content": text_of(self.told[-1]) + text_of(reply)}
            at = at.parent
        self.ledger.add_reply(at, reply, cut=cut)


def without_notes(sent: Sequence[Message]) -> list[Message]:
    """Return the messages after the head without the notes that the proxy put among them."""
    size = next((i for i, m in enumerate(sent) if m.get("role") != "system"), len(sent))
    out: list[Message] = []
    for message in sent[size:]:
        content = message.get("content")
        if message.get("role") == "system":
            continue
        if isinstance(content, list) and content and str(content[0].get("text", "")).startswith(f"[{MARKER}]\n"):
            rest = content[1:]
            only = len(rest) == 1 and rest[0].get("type") == "text"
            message = {**message, "content": rest[0]["text"] if only else rest}
        out.append(message)
    return out
