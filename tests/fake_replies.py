"""What the fake vLLM is told to answer, and the events that it writes."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.fake_engine import tool_call_text

JSON = Mapping[str, object]
DONE = b"data: [DONE]\n\n"
JSON_TYPE = {"Content-Type": "application/json"}
Piece = bytes | asyncio.Event | float
Gate = int | Literal["headers", "end"]


@dataclass(frozen=True)
class Call:
    """One tool call, with its arguments spelled as the model writes them."""

    name: str
    arguments: str = "{}"
    id: str = "call_0"


@dataclass(frozen=True)
class Reply:
    """A generated answer.

    `pieces` are the content deltas (by default the tokens of `text`); `deltas`, if given, are written as they are.
    A gate holds the answer until its event is set: before the headers, before piece k (0 is the first token), or
    before the end; `gap_seconds` is waited after each piece, for what has to take time.
    """

    text: str = "All right."
    pieces: Sequence[str] | None = None
    reasoning: str = ""
    calls: Sequence[Call] = ()
    deltas: Sequence[JSON] | None = None
    finish_reason: str | None = None
    gates: Mapping[Gate, asyncio.Event] = field(default_factory=dict)
    gap_seconds: float = 0.0
    usage: JSON | None = None
    usage_null: bool = False  # other engines write "usage":null into each event when usage is asked for

    async def gate(self, gate: Gate) -> None:
        """Wait here if the test holds the answer at `gate`."""
        if gate in self.gates:
            await self.gates[gate].wait()

    def generated(self) -> str:
        """Return the text that the model wrote, as the prefix cache knows it."""
        if self.deltas is not None:
            return "".join(str(delta.get("content") or "") for delta in self.deltas)
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        text = "".join(self.pieces) if self.pieces is not None else self.text
        calls = "\n".join(tool_call_text(call.name, call.arguments) for call in self.calls)
        return thought + text + ("\n" + calls if text and calls else calls)

    def chat_deltas(self, pieces: Sequence[str]) -> list[JSON]:
        """Return the deltas after the first, empty one, as vLLM writes them, with `pieces` as the content."""
        if self.deltas is not None:
            return list(self.deltas)
        thought: list[JSON] = [{"reasoning": self.reasoning}] if self.reasoning else []
        calls: list[JSON] = []
        for index, call in enumerate(self.calls):
            start = {"id": call.id, "type": "function", "index": index, "function": {"name": call.name}}
            calls.append({"tool_calls": [start]})
            calls.append({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
        return [*thought, *({"content": piece} for piece in pieces), *calls]

    def message(self, text: str) -> JSON:
        """Return the message of a plain reply whose content is `text`."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        content = None if calls and not text else text
        return {"role": "assistant", "content": content, "reasoning": self.reasoning or None, "tool_calls": calls}


@dataclass(frozen=True)
class Raw:
    """An answer given byte for byte.

    `body` is written in these pieces (with `framing` "chunked" each is one HTTP chunk); an event in it is waited for, a
    number is slept, in seconds.  `end`: "clean"; "cut" closes without the rest of the framing; "rst" resets;
    "hang" says nothing more.  `content_length` is what a "length" framing promises (default: what is written).
    """

    body: Sequence[Piece] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream; charset=utf-8"})
    framing: Literal["chunked", "length"] = "chunked"
    content_length: int | None = None
    end: Literal["clean", "cut", "rst", "hang"] = "clean"
    before_headers: asyncio.Event | None = None


@dataclass(frozen=True)
class Hang:
    """Nothing is answered, not even headers, until the client goes."""


@dataclass(frozen=True)
class Drop:
    """The connection is closed when the request has been read, before any byte of an answer."""


Scripted = Reply | Raw | Hang | Drop


def json_error(status: int, body: object, **headers: str) -> Raw:
    """Return an answer with `status` and `body` as JSON, as vLLM sends its errors."""
    data = json.dumps(body).encode()
    fields = {**JSON_TYPE, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Raw(body=[data], status=status, headers=fields, framing="length")


def event(data: JSON) -> bytes:
    """Return one server-sent event, spelled as vLLM does: compact, UTF-8, `data: ` and two line feeds."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def content_event(text: str, finish_reason: str | None = None) -> bytes:
    """Return a small content event, for answers that a test writes byte for byte."""
    delta = {"content": text} if text else {}
    return event({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


@dataclass(frozen=True)
class Writer:
    """One answer in vLLM's words: `reply` to the request `body`, with these `usage` counts."""

    reply: Reply
    body: JSON
    chat: bool
    name: str
    model: str
    usage: JSON

    def opening(self) -> bytes:
        """Return the events that name the role; /v1/completions has none."""
        return self.delta({"role": "assistant", "content": ""}) if self.chat else b""

    def delta(self, delta: JSON) -> bytes:
        """Return the event of one delta, for each choice asked for."""
        return b"".join(self._event(index, delta, None) for index in range(self._choices()))

    def closing(self) -> bytes:
        """Return the events that end the answer; the usage event only if it was asked for."""
        ends = b"".join(self._event(index, {}, self.reply.finish_reason) for index in range(self._choices()))
        return ends + (event({**self._head(), "choices": [], "usage": self.usage}) if self._counts() else b"") + DONE

    def whole(self) -> JSON:
        """Return the plain answer."""
        text = "".join(self.reply.pieces or ())
        said: dict[str, object] = {"message": self.reply.message(text)} if self.chat else {"text": text}
        ending = {"logprobs": None, "finish_reason": self.reply.finish_reason, "stop_reason": None}
        choices = [{"index": index, **said, **ending} for index in range(self._choices())]
        return {**self._head(), "choices": choices, "usage": self.usage}

    def _event(self, index: int, delta: JSON, finish: str | None) -> bytes:
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish}
        null = {"usage": None} if self._counts() and self.reply.usage_null else {}
        return event({**self._head(), "choices": [choice], **null})

    def _choices(self) -> int:
        asked = self.body.get("n")
        return asked if isinstance(asked, int) else 1

    def _counts(self) -> bool:
        options = self.body.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    def _head(self) -> dict[str, object]:
        kind = "chat.completion" if self.chat else "text_completion"
        kind += ".chunk" if self.chat and self.body.get("stream") else ""
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.name}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.model}
