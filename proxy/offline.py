"""What recorded requests share with the one before them in their chat: as the client told it, and after the rewriting.

Nothing is asked of vLLM, so tokens are estimates: a quarter of the characters.  What was generated is taken to be what
the client tells in the next turn.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import orjson

from proxy.config import Config
from proxy.core.draft import DOCUMENT_LEADS, Facts, Template
from proxy.core.identity import Claims, Identity, identify
from proxy.core.keep_tools import list_digest, tool_digests
from proxy.core.last_prompt import TOOL_CHARACTERS, LastPrompt, Prompt, answered, prompt_of, said_of
from proxy.core.learned_lines import Lines
from proxy.core.ledger import Ledger, Node
from proxy.core.pipeline import MOVES_TEXT, PIPELINE, rewrite
from proxy.core.prefix import TOKENS_PER_CHARACTER, Prediction, predict
from proxy.core.reject import Reject
from proxy.core.request import ChatRequest, Message, parse_body
from proxy.core.text import length_of, packed, text_of
from proxy.memory import CHAT, chain_of

_LIMIT = 1_000_000  # what was recorded was taken already
_STEPS = (MOVES_TEXT | {"continue_final"}) & {name for name, _ in PIPELINE}


@dataclass(frozen=True, slots=True)
class Line:
    """A recorded chat request.  `at` in seconds; `real` holds what vLLM said of it, where that was recorded."""

    number: int
    at: float
    headers: Mapping[str, str]
    request: ChatRequest
    real: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """A prompt's tokens, an estimate, and what it shares with the last one of its chat, where it was `compared`."""

    prompt_tokens: int
    found: Prediction | None
    compared: bool


@dataclass(frozen=True, slots=True)
class Explained:
    """A request in two forms.  `chat` counts the chats of the file from 1; a task is compared with nothing."""

    line: Line
    chat: int
    turn: int
    task: str | None
    received: Shared
    rewritten: Shared | None
    trail: tuple[str, ...] = ()


def lines_of(raw: Iterable[bytes]) -> Iterator[Line | None]:
    """Yield the chat requests of a file, None for each line or request that cannot be read."""
    for number, line in enumerate(raw, 1):
        if line.strip():
            yield from _line(number, line)


def _line(number: int, raw: bytes) -> Iterator[Line | None]:
    try:
        told = orjson.loads(raw)
        if told["path"].partition("?")[0] != CHAT or told["method"] != "POST":
            return
        headers = {str(name).lower(): str(value) for name, value in told["headers"]}
        request = parse_body(str(told["body"]).encode(), max_messages=_LIMIT, max_images=_LIMIT).request
        at, usage, n = told.get("t"), told.get("usage"), told.get("n")
        yield Line(
            n if isinstance(n, int) else number,
            float(at) if isinstance(at, int | float) else 0.0,
            headers,
            request,
            usage if isinstance(usage, dict) else None,
        )
    except (ValueError, TypeError, KeyError, AttributeError, Reject):
        yield None


class _Kept(NamedTuple):
    prompt: LastPrompt
    messages: tuple[Message, ...]


@dataclass(slots=True)
class _Chat:
    number: int
    ledger: Ledger
    at: float = 0.0
    tools: tuple[bytes, ...] = ()
    tool_list: bytes = b""
    lines: Lines = field(default_factory=Lines)
    received: _Kept | None = None
    sent: _Kept | None = None
    node: Node | None = None  # of its last request
    told: int = 0  # messages in that


class Offline:
    """Plays recorded requests through the rewriting, in their order."""

    def __init__(self, config: Config, block_tokens: int) -> None:
        self._config, self._block = config, block_tokens
        self._chats: dict[tuple[str, str, str], _Chat] = {}
        self._names: dict[bytes, str] = {}
        self._numbers: dict[tuple[str, str], int] = {}

    def explain(self, line: Line) -> Explained:
        """Return what one request shares with the last one of its chat and model."""
        who = self._who(line)
        request, model = line.request, str(line.request.rest.get("model", ""))
        turn = sum(message.get("role") == "user" for message in request.messages)
        listed = list_digest(request.rest)
        told = prompt_of(request.messages, request.rest, model=model, tools=listed)
        if who.task is not None:
            return Explained(line, 0, turn, who.task, Shared(_estimated(told), None, compared=False), None)
        chat, other = self._chat(line, who, model)
        received, chat.received = self._compare(chat.received, told, other=other)
        if self._config.profile == "off":
            return Explained(line, chat.number, turn, None, received, None)
        self._answer(chat, request)
        done = rewrite(request, self._facts(chat, who))
        chat.node, chat.told = chat.ledger.record(done.records), len(request.messages)
        chat.lines = done.lines or chat.lines
        chat.tools, chat.tool_list = tool_digests(request.rest) or chat.tools, listed or chat.tool_list
        up = prompt_of(done.request.messages, done.request.rest, model=model, tools=list_digest(done.request.rest))
        rewritten, chat.sent = self._compare(chat.sent, up, other=other)
        return Explained(line, chat.number, turn, None, received, rewritten, done.trail)

    def _answer(self, chat: _Chat, request: ChatRequest) -> None:
        """What the chat tells after its last request is what was generated then."""
        reply = request.messages[chat.told] if 0 < chat.told < len(request.messages) else None
        if chat.node is not None and reply is not None and reply.get("role") == "assistant":
            chat.ledger.add_reply(chat.node, reply)

    def _who(self, line: Line) -> Identity:
        names, headers = self._config.identity, line.headers
        given = (names.user_header, names.chat_header, names.message_header, names.task_header)
        user, chat, message, task = (headers.get(name.lower(), "") for name in given)
        return identify(Claims("", True, True, user=user, chat=chat, message=message, task=task), line.request)

    def _chat(self, line: Line, who: Identity, model: str) -> tuple[_Chat, bool]:
        """Return the chat of a request, and whether it was told to another model only."""
        name = who.chat if who.chat is not None else self._by_content(line, who, model)
        chat = self._chats.get((who.tenant, name, model))
        other = chat is None and (who.tenant, name) in self._numbers
        number = self._numbers.setdefault((who.tenant, name), len(self._numbers) + 1)
        if chat is None or (chat.at and line.at - chat.at > self._config.sessions.ttl_seconds):
            chat = self._chats[who.tenant, name, model] = _Chat(number, Ledger(self._config.sessions.max_bytes_each))
        chat.at = line.at
        return chat, other

    def _by_content(self, line: Line, who: Identity, model: str) -> str:
        """A chat without a name is the one whose messages it goes on from, else one that began with the same words."""
        messages = line.request.messages
        chain = chain_of(self._config.volatile.tags, who, model, messages)
        first = next((text_of(m) for m in messages if m.get("role") == "user"), "")
        begun = f"{who.tenant}\0{model}\0{first}".encode("utf-8", "surrogatepass")
        name = next((self._names[each] for each in reversed(chain) if each in self._names), None)
        name = name or self._names.get(begun) or f"content {len(self._names)}"
        self._names[chain[-1]] = self._names[begun] = name
        return name

    def _facts(self, chat: _Chat, who: Identity) -> Facts:
        config = self._config
        return Facts(
            steps=frozenset(step for step in _STEPS if config.step_on(step)),
            ledger=chat.ledger,
            explicit=who.explicit,
            tools=chat.tools,
            tool_list=chat.tool_list,
            tools_order=config.tools.order,
            template=Template(system_in_place=True, users_in_a_row=True),
            tags=config.volatile.tags,
            leads=(*DOCUMENT_LEADS, *config.history.document_leads),
            lines=chat.lines if who.explicit else None,
            whitespace_only=config.profile == "safe",
        )

    def _compare(self, before: _Kept | None, now: Prompt, *, other: bool) -> tuple[Shared, _Kept]:
        """Return what `now` shares with the prompt before it, and what the next one is to be compared with."""
        tokens = _estimated(now)
        kept = _Kept(answered(now, None, 0, tokens=(tokens, 0), reply=None), now.messages)
        if before is None:
            found = predict(None, now, self._block)
            return Shared(tokens, replace(found, cause="model") if other else found, compared=False), kept
        last, messages = before
        if len(messages) < len(now.messages) and now.messages[len(messages)].get("role") == "assistant":
            reply = now.messages[len(messages)]
            last = replace(last, said=said_of(reply, cut=False), completion_tokens=_characters([reply]) // 4 + 1)
        return Shared(tokens, predict(last, now, self._block, texts=messages), compared=True), kept


def _characters(messages: Sequence[Message]) -> int:
    """Return the characters of messages: their text, and what stands in their calls."""
    return length_of(messages) + sum(len(packed(m["tool_calls"])) for m in messages if m.get("tool_calls"))


def _estimated(prompt: Prompt) -> int:
    return int((_characters(prompt.messages) + TOOL_CHARACTERS * prompt.tool_count) * TOKENS_PER_CHARACTER)
