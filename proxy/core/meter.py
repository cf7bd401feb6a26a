"""What an answer held: times of its tokens, usage, text and tool calls, read off a copy of the relayed bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from proxy.core.sse import EventScanner

REPLY_BYTES = 4 * 1024 * 1024
# More gaps than any answer of a capped length has; the rest would only cost memory.
MAX_GAPS = 16_384
# What a call costs in memory beside its text.
_CALL_BYTES = 256


@dataclass(frozen=True, slots=True)
class Usage:
    """vLLM's own count of an exchange, in tokens."""

    prompt_tokens: int
    cached_tokens: int | None  # None where vLLM does not tell (--enable-prompt-tokens-details)
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The first choice of an answer."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    replayable: bool  # False where this is not all, or not surely what vLLM generated
    complete: bool  # a finish reason was seen


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Meter:
    """Reads one answer, as a stream (`feed`) or whole (`feed_json`).  Never raises; has no clock of its own."""

    def __init__(self) -> None:
        self._scanner = EventScanner()
        self.first_token: float | None = None  # when the first non-empty text, reasoning or tool call came
        self.gaps: list[float] = []  # seconds between events that brought tokens
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.done = False
        self.error = False
        self._last_token = 0.0
        self._seen = False
        self._odd = False
        self._plain = False
        self._size = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}

    @property
    def at_boundary(self) -> bool:
        """Whether the bytes so far end between two events."""
        return self._scanner.at_boundary

    def feed(self, chunk: bytes, now: float) -> None:
        """Look at bytes of a stream that were relayed at `now`, in seconds of any one clock."""
        for data in self._scanner.feed(chunk):
            if data == b"[DONE]":
                self.done = True
            else:
                self._event(data, now)

    def feed_json(self, body: bytes, now: float) -> None:
        """Look at a whole plain answer that was there at `now`."""
        self._plain = True
        self._event(body, now)
        self.done = True

    def reply(self) -> Reply | None:
        """Return the first choice so far; None if there was none."""
        if not self._seen:
            return None
        calls = tuple(ToolCall(call.id, call.name, "".join(call.arguments)) for call in self._calls)
        replayable = not (self._odd or self._scanner.skipped or self._size > REPLY_BYTES)
        complete = self.finish_reason is not None
        return Reply("".join(self._content), "".join(self._reasoning), calls, replayable, complete)

    def _event(self, data: bytes, now: float) -> None:
        try:
            body = orjson.loads(data)
        except ValueError:
            self._odd = True
            return
        if not isinstance(body, dict):
            self._odd = True
            return
        if body.get("error") or body.get("object") == "error":
            self.error = True
        if (usage := body.get("usage")) is not None:
            self._take_usage(usage)
        choices = body.get("choices")
        if isinstance(choices, list):
            brought = False
            for choice in choices:
                brought = self._choice(choice) or brought
            if brought:
                self._tick(now)

    def _tick(self, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
        elif len(self.gaps) < MAX_GAPS:
            self.gaps.append(now - self._last_token)
        self._last_token = now

    def _take_usage(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details")
        cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
        prompt, written = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        if prompt is not None:
            self.usage = Usage(prompt, cached, written or 0)

    def _choice(self, choice: object) -> bool:
        """Take one choice of an event or of a plain answer; return whether it brought tokens."""
        if not isinstance(choice, dict):
            self._odd = True
            return False
        part = choice.get("delta") or choice.get("message") or choice
        if not isinstance(part, dict):
            self._odd = True
            return False
        if choice.get("index", 0) != 0:
            # Only the first answer can be told apart from the others when the client tells it back.
            self._odd = True
            return any(part.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls", "text"))
        self._seen = True
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = reason
        return self._part(part)

    def _part(self, part: Mapping[str, object]) -> bool:
        text = part.get("content") or part.get("text")
        if text:
            self._keep(self._content, text)
            if len(part) == 1:
                return True  # nearly every event is this
        # vLLM renamed the field; servers in between send both with the same words.
        thought = part.get("reasoning") or part.get("reasoning_content")
        calls = part.get("tool_calls")
        if thought:
            self._keep(self._reasoning, thought)
        if calls:
            self._take_calls(calls)
        if part.get("function_call"):
            self._odd = True
        return bool(text or thought or calls)

    def _keep(self, parts: list[str], text: object) -> None:
        if not isinstance(text, str):
            self._odd = True
        elif self._fits(len(text)):
            parts.append(text)

    def _fits(self, size: int) -> bool:
        self._size += size
        return self._size <= REPLY_BYTES

    def _take_calls(self, calls: object) -> None:
        if not isinstance(calls, list):
            self._odd = True
            return
        for call in calls:
            if isinstance(call, dict) and isinstance(call.get("function") or {}, dict):
                self._take_call(call)
            else:
                self._odd = True

    def _take_call(self, delta: Mapping[str, object]) -> None:
        function = delta.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = _text(function.get("name")), _text(function.get("arguments"))
        call = self._call_of(delta.get("index"), _text(delta.get("id")), name)
        if call is None or not self._fits(len(arguments)):
            return
        if name and not call.name:
            call.name = name
        elif name and name != call.name:
            # A second name for one call: whichever it is, joining them would make a third.
            self._odd = True
        if arguments:
            call.arguments.append(arguments)

    def _call_of(self, index: object, call_id: str, name: str) -> _Call | None:
        """Return the call that a delta continues, or a new one; None if no more are kept.

        A new id begins a new call even under a used index; without an index, an id or a name does.
        """
        number = _count(index)
        if number is not None:
            known = self._by_index.get(number)
        else:
            self._odd = self._odd or not self._plain
            known = self._calls[-1] if self._calls and not (call_id or name) else None
        if known is not None and (not call_id or not known.id or known.id == call_id):
            known.id = known.id or call_id
            return known
        if known is not None or number not in (None, len(self._calls)):
            self._odd = True
        if not self._fits(_CALL_BYTES + len(call_id) + len(name)):
            return None
        call = _Call(call_id, "")
        self._calls.append(call)
        if number is not None:
            self._by_index[number] = call
        return call


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
