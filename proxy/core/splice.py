"""Put changes into the received bytes, so that all else stays byte for byte: number spelling, escapes, key order."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from proxy.core.request import ChatRequest, Message, Received

_SPACE = re.compile(r"[ \t\n\r]*")
_GAP = re.compile(r"[ \t\n\r]*,?[ \t\n\r]*")
_scan = json.JSONDecoder().raw_decode  # C code: a value and where it ends, from a place in a text


@dataclass(frozen=True, slots=True)
class Field:
    """Where a top-level field stands in the text (offsets in characters)."""

    key: str
    start: int
    value_start: int
    end: int
    items: tuple[tuple[int, int], ...] = ()  # of an array of messages: where each begins and ends


def splice(received: Received, request: ChatRequest) -> bytes:
    """Return the received bytes with the differences of `request` put in.

    A field or message that is the same object as in `received` keeps its bytes; a changed one is written anew as
    compact JSON; a new field goes first.  Of a field that stands twice and changed, one copy is left (case SC-01).
    """
    told = received.request
    new = {k: v for k, v in request.rest.items() if k not in told.rest}
    changed = {k: v for k, v in request.rest.items() if k in told.rest and told.rest[k] is not v}
    gone = {k for k in told.rest if k not in request.rest}
    same_messages = _same(told.messages, request.messages)
    if not changed and not gone and same_messages:
        return _with_new(received.raw, new)
    text = received.raw.decode()
    out = _replaced(text, received, request, changed, gone, same_messages)
    return _with_new(out.encode(), new)


def _same(told: tuple[Message, ...], sent: tuple[Message, ...]) -> bool:
    return told is sent or (len(told) == len(sent) and all(a is b for a, b in zip(told, sent, strict=True)))


def _with_new(raw: bytes, new: Mapping[str, object]) -> bytes:
    if not new:
        return raw
    at = raw.index(b"{") + 1
    added = b",".join(_json(key) + b":" + _json(value) for key, value in new.items())
    empty = raw[at:].lstrip(b" \t\r\n")[:1] == b"}"
    return raw[:at] + added + (b"" if empty else b",") + raw[at:]


def _json(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate, or an integer beyond 64 bits: Python's json writes both as they were meant
        return json.dumps(value, separators=(",", ":")).encode()


def _replaced(
    text: str,
    received: Received,
    request: ChatRequest,
    changed: Mapping[str, object],
    gone: set[str],
    same_messages: bool,
) -> str:
    fields: list[Field] = []
    tail = "}"
    for field in fields_of(text):
        fields.append(field)
        if field.key == "messages" and not changed and not gone and _is_last(text, field.end):
            tail = text[field.end :]
            break
    last = {field.key: i for i, field in enumerate(fields)}  # the last copy is the one that every parser takes
    kept: list[str] = []
    for i, field in enumerate(fields):
        if field.key in gone or (field.key in changed and last[field.key] != i):
            continue
        if field.key in changed:
            kept.append(text[field.start : field.value_start] + _json(changed[field.key]).decode())
        elif field.key == "messages" and not same_messages and last["messages"] == i:
            kept.append(text[field.start : field.value_start] + _messages(text, field.items, received, request))
        else:
            kept.append(text[field.start : field.end])
    return "{" + ",".join(kept) + tail


def _is_last(text: str, end: int) -> bool:
    """Say whether surely no field after `end` is named "messages", in any spelling: tools need no scanning then."""
    return not any(text.find(spelled, end) >= 0 for spelled in ('"messages"', "\\u006", "\\u007"))


def _messages(text: str, spans: tuple[tuple[int, int], ...], received: Received, request: ChatRequest) -> str:
    place = {id(message): i for i, message in enumerate(received.request.messages)}
    out = []
    for message in request.messages:
        i = place.get(id(message))
        out.append(_json(message).decode() if i is None else text[spans[i][0] : spans[i][1]])
    return "[" + ",".join(out) + "]"


def fields_of(text: str) -> Iterable[Field]:
    """Yield the top-level fields of a JSON object, which must be valid, in their order."""
    at = _skip(text, _skip(text, 0) + 1)
    while text[at] != "}":
        start = at
        key, at = _scan(text, at)
        value_start = _skip(text, _skip(text, at) + 1)
        items: tuple[tuple[int, int], ...] = ()
        if key == "messages" and text[value_start] == "[":  # scanned once: it is most of the body
            items = tuple(items_of(text, value_start))
            end = _skip(text, items[-1][1] if items else value_start + 1) + 1
        else:
            _, end = _scan(text, value_start)
        yield Field(key, start, value_start, end, items)
        at = _after_gap(text, end)


def items_of(text: str, start: int) -> Iterable[tuple[int, int]]:
    """Yield where each item of the JSON array that opens at `start` begins and ends (characters)."""
    at = _skip(text, start + 1)
    while text[at] != "]":
        _, end = _scan(text, at)
        yield at, end
        at = _after_gap(text, end)


def _after_gap(text: str, at: int) -> int:
    match = _GAP.match(text, at)
    return match.end() if match else at


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
