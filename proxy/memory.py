"""What is remembered of an exchange, and where: its session, what it told, what was generated."""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.chats import Held
from proxy.core.draft import HEAD_ROLES, Cut, Facts
from proxy.core.identity import Identity
from proxy.core.keep_tools import tool_digests
from proxy.core.learned_lines import Lines, skeleton_of
from proxy.core.ledger import Node
from proxy.core.meter import Meter, Reply
from proxy.core.move_volatile import skeleton
from proxy.core.pipeline import NEEDS_PROMPT, Rewritten
from proxy.core.request import ChatRequest, Message
from proxy.core.text import digest, encoded, length_of, message_digest, text_of
from proxy.explaining import Expected, expect, settle
from proxy.sessions import Session
from proxy.state import State

CHAT = "/v1/chat/completions"
MOST_CHARACTERS_A_TOKEN = 24
"""No text of words has longer tokens on average; runs of blanks, which have, are the rare case that is counted anew."""


@dataclass(slots=True)
class Memory:
    """Where an exchange is remembered: its session, what it told, the node that its answer hangs on."""

    session: Session
    chain: Sequence[bytes]
    told: tuple[Message, ...]
    node: Node | None = None
    expected: Expected | None = None
    family: bytes = b""
    prompt: Held | None = None
    characters: int = 0


async def memory_of(state: State, who: Identity, model: str, request: ChatRequest, route: str) -> Memory | None:
    """Return the session of a chat request; tasks, several answers and bare prompts have none."""
    n = request.rest.get("n")
    if route != CHAT or who.task is not None or n not in (None, 1) or not request.messages:
        return None
    chain = () if who.chat is not None else chain_of(state.config.volatile.tags, who, model, request.messages)
    session = await state.sessions.find(who, model, chain)
    return Memory(session, chain, request.messages)


def chain_of(tags: tuple[str, ...], who: Identity, model: str, messages: tuple[Message, ...]) -> list[bytes]:
    """Return, for each message after the head, the digest of all up to it, of this tenant, model and system text."""
    size = next((i for i, m in enumerate(messages) if m.get("role") not in HEAD_ROLES), len(messages))
    at = digest(encoded(who.tenant), encoded(model), skeleton(messages[:size], tags))
    out = []
    for message in messages[size:]:
        at = digest(at, message_digest(message))
        out.append(at)
    return out or [at]


def remember(state: State, memory: Memory, facts: Facts, done: Rewritten) -> None:
    """Note what goes up now, before it is answered: another request of the session may come meanwhile."""

    def change() -> None:
        session = memory.session
        if facts.steps & NEEDS_PROMPT:
            memory.node = session.ledger.record(done.records)
            memory.family, memory.characters = done.family, length_of(done.request.messages)
        if _moves(session.cut_at, facts.cut, done.cut):
            before = session.cut_at.inner - 1 if session.cut_at is not None else 0
            state.metrics.trimmed(done.left_out - before)
            session.cut_at = done.cut
        if done.lines is not None:
            _learn_lines(state, session, done.lines)
        if done.tools and done.tools != session.tool_list:
            session.tools, session.tool_list = tool_digests(done.request.rest) or session.tools, done.tools
        session.turns = max(session.turns, sum(m.get("role") == "user" for m in memory.told))

    state.sessions.touch(memory.session, memory.chain, change)
    if memory.told[-1].get("role") != "assistant":  # of a continued answer the beginning is not the whole
        memory.prompt = state.chats.begin(memory.session.key, done.request, done.counted or 0)
    listed = memory.session.tool_list if done.request.rest.get("tools") else b""
    memory.expected = expect(state, memory.session, done.request, done.trail, listed)


def _moves(now: Cut | None, then: Cut | None, made: Cut | None) -> bool:
    """Say whether a cut is a new one.  Of two requests at once the later cut stays; a branch has its own."""
    if made is None or made == now:
        return False
    return now is None or now == then or (made.turn, made.inner) >= (now.turn, now.inner)


def _learn_lines(state: State, session: Session, lines: Lines) -> None:
    if lines.learned and lines.learned != session.lines.learned and state.config.profile == "max":
        state.learning.note(session.key.tenant, skeleton_of(lines), lines.learned)
    session.lines = lines


def remember_answer(state: State, memory: Memory, meter: Meter | None, model: str) -> None:
    """Note what was generated, as it was generated; a failed turn, or one of which not all is known, has no reply."""
    learn(state, meter, model)
    reply = meter.reply() if meter is not None and not meter.error else None
    message = _message(reply, memory.told) if reply is not None and reply.replayable else None

    def change() -> None:
        _anchor(memory, meter)
        if memory.node is not None and reply is not None and message is not None:
            node = memory.node
            if memory.told[-1].get("role") == "assistant" and node.parent is not None:
                node = node.parent  # a continued answer takes the place of its beginning
            memory.session.ledger.add_reply(node, message, cut=not reply.complete)
        if memory.expected is not None:
            settle(state, memory.session, memory.expected, meter, message)

    state.sessions.touch(memory.session, (), change)
    if memory.prompt is not None:
        usage = meter.usage if meter is not None else None
        tokens = usage.prompt_tokens + usage.completion_tokens if usage is not None else None
        state.chats.end(memory.prompt, message, tokens)


def _anchor(memory: Memory, meter: Meter | None) -> None:
    """Keep vLLM's own count of the prompt that ended here: later prompts are counted from it.

    A figure that cannot be true is none: a stand-in that always says 5 must not let a chat outgrow its context.
    """
    continued = memory.told[-1].get("role") == "assistant"  # its prompt ends without the generation prompt
    usage = meter.usage if meter is not None else None
    if usage is None or memory.node is None or not memory.family or continued:
        return
    if usage.prompt_tokens * MOST_CHARACTERS_A_TOKEN >= memory.characters:
        memory.node.upto, memory.node.family = usage.prompt_tokens, memory.family


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
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message
