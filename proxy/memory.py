"""What is remembered of an exchange, and where: its session, what it told, what was generated."""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.config import Config
from proxy.core.draft import HEAD_ROLES, Facts
from proxy.core.identity import Identity
from proxy.core.keep_tools import tool_digests
from proxy.core.ledger import Node
from proxy.core.meter import Meter, Reply
from proxy.core.move_volatile import skeleton
from proxy.core.pipeline import MOVES_TEXT, Rewritten
from proxy.core.request import ChatRequest, Message
from proxy.core.text import digest, encoded, message_digest, text_of
from proxy.sessions import Session
from proxy.state import State

CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Memory:
    """Where an exchange is remembered: its session, what it told, the node that its answer hangs on."""

    session: Session
    chain: Sequence[bytes]
    told: tuple[Message, ...]
    node: Node | None = None


async def memory_of(state: State, who: Identity, model: str, request: ChatRequest, route: str) -> Memory | None:
    """Return the session of a chat request; tasks, several answers and bare prompts have none."""
    n = request.rest.get("n")
    if route != CHAT or who.task is not None or n not in (None, 1) or not request.messages:
        return None
    chain = () if who.chat is not None else _chain(state.config, who, model, request.messages)
    session = await state.sessions.find(who, model, chain)
    return Memory(session, chain, request.messages)


def _chain(config: Config, who: Identity, model: str, messages: tuple[Message, ...]) -> list[bytes]:
    """Return, for each message after the head, the digest of all up to it, of this tenant, model and system text."""
    size = next((i for i, m in enumerate(messages) if m.get("role") not in HEAD_ROLES), len(messages))
    at = digest(encoded(who.tenant), encoded(model), skeleton(messages[:size], config.volatile.tags))
    out = []
    for message in messages[size:]:
        at = digest(at, message_digest(message))
        out.append(at)
    return out or [at]


def remember(state: State, memory: Memory, facts: Facts, done: Rewritten) -> None:
    """Note what goes up now, before it is answered: another request of the session may come meanwhile."""

    def change() -> None:
        session = memory.session
        if facts.steps & MOVES_TEXT:
            memory.node = session.ledger.record(done.records)
        session.tools = tool_digests(done.request.rest) or session.tools
        session.turns = max(session.turns, sum(m.get("role") == "user" for m in memory.told))

    state.sessions.touch(memory.session, memory.chain, change)


def remember_answer(state: State, memory: Memory, meter: Meter | None, model: str) -> None:
    """Note what was generated, as it was generated; a failed turn, or one of which not all is known, has no reply."""
    learn(state, meter, model)
    reply = meter.reply() if meter is not None and not meter.error else None
    if reply is None or not reply.replayable or memory.node is None:
        return
    message = _message(reply, memory.told)
    if message is None:
        return
    node = memory.node
    if memory.told[-1].get("role") == "assistant" and node.parent is not None:
        node = node.parent  # a continued answer takes the place of its beginning

    def change() -> None:
        memory.session.ledger.add_reply(node, message, cut=not reply.complete)

    state.sessions.touch(memory.session, (), change)


def learn(state: State, meter: Meter | None, model: str) -> None:
    """Note a model that reasons: caps and continued answers are another matter for it."""
    reply = meter.reply() if meter is not None else None
    if reply is not None and reply.reasoning and model in state.models.known():
        state.reasoning.add(model)


def _message(reply: Reply, told: tuple[Message, ...]) -> Message | None:
    """Return the message that was generated, with what it continues in front; None where nothing was said."""
    content = reply.content
    if told[-1].get("role") == "assistant":
        content = text_of(told[-1]) + content
    if not content and not reply.tool_calls:
        return None
    message: dict[str, object] = {"role": "assistant", "content": content}
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message
