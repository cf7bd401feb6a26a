"""A chat before a model with a small context: the core driven as the shell drives it, with vLLM's counts as anchors."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.core.counting import Question
from proxy.core.cutting import Marks, marks
from proxy.core.draft import Cut, Facts, Lengths, Trim
from proxy.core.ledger import Ledger
from proxy.core.pipeline import Rewritten
from proxy.core.request import ChatRequest, Message
from tests.fake_engine import TOKEN, render
from tests.trimming import answered
from tests.webui import Action, Client
from tests.wire import LEAD, Wire


def tokens_of(request: ChatRequest) -> int:
    """Count a request's prompt as the fake vLLM does: Qwen2.5's layout, tools and generation prompt included."""
    return len(TOKEN.findall(render({**request.rest, "messages": list(request.messages)})))


def count_of(question: Question) -> int:
    """Answer a question of the core as the fake vLLM's /tokenize does."""
    body = {**question.rest, "messages": list(question.messages), "add_generation_prompt": question.generation}
    return len(TOKEN.findall(render(body)))


@dataclass
class Sent:
    """One request that went up: what was told, what became of it, what was asked, the cut before it."""

    told: tuple[Message, ...]
    done: Rewritten
    asked: list[Question]
    before: Cut | None
    facts: Facts
    tokens: int
    anchored: bool  # vLLM had counted a prompt that this one goes on from
    uncut: int  # tokens that it had had if the cut before it had stayed
    free: Rewritten  # what had gone up before a model without a limit


@dataclass
class TrimWire(Wire):
    """The core between a client and a vLLM with `size` tokens of context, one session."""

    size: int = 400
    reserve: int = 60
    trim: Trim = field(default_factory=Trim)
    cut: Cut | None = None
    sent: list[Sent] = field(default_factory=list)

    @property
    def marks(self) -> Marks:
        """The watermarks of its requests."""
        return marks(self.size, self.reserve, self.trim.low_share)

    def facts(self) -> Facts:
        """Return what the shell would have looked up."""
        lengths = Lengths(max_model_len=self.size)
        facts = replace(super().facts(), lengths=lengths, trim=self.trim, cut=self.cut)
        return replace(facts, steps=self.steps - {"salt", "rank"})

    def rewritten(self, messages: Sequence[Message], **rest: object) -> Rewritten:
        """Rewrite a request, remember that it went up, and vLLM's count of it."""
        request = ChatRequest(tuple(messages), {"max_tokens": self.reserve, **rest})
        facts, before = self.facts(), self.cut
        known = any(node.upto for node in self.ledger.nodes())
        done, asked = answered(request, facts, count_of)
        assert done.failed == ()
        wide = replace(facts, lengths=replace(facts.lengths, max_model_len=1 << 20))
        uncut = tokens_of(answered(request, wide, count_of)[0].request)
        free = answered(request, replace(facts, lengths=replace(facts.lengths, max_model_len=None)), count_of)[0]
        self.node = self.ledger.record(done.records)
        if done.cut is not None:
            self.cut = done.cut
        tokens = tokens_of(done.request)
        if messages[-1].get("role") != "assistant":
            self.node.upto, self.node.family = tokens, done.family
        self.told = tuple(messages)
        self.sent.append(Sent(self.told, done, asked, before, facts, tokens, known, uncut, free))
        return done


def fresh(wire: TrimWire, cut: Cut | None = None) -> Facts:
    """Return the facts of a process that knows nothing of the chat, but perhaps its stored cut."""
    return replace(wire.facts(), ledger=Ledger(1 << 20), cut=cut)


@dataclass(frozen=True)
class LongAction(Action):
    """What a user does, long messages and long tool loops included."""

    def _long(self, client: Client) -> None:
        words = " ".join(client.line("user") for _ in range(1 + 2 * self.a))
        client.messages.append({"role": "user", "content": words})
        client.ask()
        client.get(self._text(client))

    def _loop(self, client: Client) -> None:
        """One turn of many calls, some of them at once, each with a result of some length."""
        client.messages.append({"role": "user", "content": client.line("user")})
        client.ask()
        for _ in range(2 + self.b % 6):
            calls = [_call(client) for _ in range(1 + self.a % 3)]
            client.get({"role": "assistant", "content": "", "tool_calls": calls})
            for call in calls:
                client.messages.append({"role": "tool", "tool_call_id": call["id"], "content": client.line("tool")})
            client.ask()
        client.get(self._text(client))

    def _same_document(self, client: Client) -> None:
        """The same document as each time."""
        client.documents = f'{LEAD}<source id="1">{DOCUMENT}</source>\n</context>\n\n'
        self._say(client)
        client.documents = ""
        client.grows = False


DOCUMENT = "A document that stands in the chat again and again, long enough to be worth a pointer to its first place."


def _call(client: Client) -> dict[str, Any]:
    client.count += 1
    return {"id": f"call-{client.count}", "type": "function", "function": {"name": "look_up", "arguments": '{"q": 1}'}}
