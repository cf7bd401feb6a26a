"""A chat request as values: parsed once, every unknown field kept, the received bytes beside it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn, cast

import orjson

from proxy.core.reject import Reject

Message = Mapping[str, object]

MAX_DEPTH = 100
"""Levels of nesting taken; the same on every Python, and far above any JSON schema of a tool."""
_NESTING = frozenset({dict, list})


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The body of a generating request.

    `messages` in role order as they stand in the body (empty for /v1/completions); `rest` is every other top-level
    field, known to us or not.
    """

    messages: tuple[Message, ...]
    rest: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Received:
    """A request with the bytes it came in.

    `plain` is False for a body that only Python's json reads (a lone surrogate in an escape): no text of it is moved.
    """

    raw: bytes
    request: ChatRequest
    plain: bool = True


def bad_request(message: str, param: str | None = None, code: str | None = None) -> Reject:
    """Return a 400 in OpenAI's shape for the client to raise."""
    return Reject(400, message, param=param, code=code)


def parse_body(raw: bytes, *, max_messages: int, max_images: int, chat: bool = True) -> Received:
    """Parse the body of a chat request (`chat`) or of another generating route.

    Raises Reject 400 naming the field for anything that is no JSON object, nests deeper than `MAX_DEPTH`, holds a
    number that is not finite, or has no usable `messages`.
    """
    fields, plain = _load(raw)
    if not isinstance(fields, dict):
        raise bad_request("The request body must be a JSON object.")
    # Fewer brackets than that in the whole body: most small requests, and none of them is walked through.
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and deeper_than(fields, MAX_DEPTH):
        raise bad_request(f"The request body nests deeper than {MAX_DEPTH} levels.")
    if not chat:
        return Received(raw, ChatRequest((), fields), plain)
    messages = _messages(fields, max_messages)
    _check_images(messages, max_images)
    rest = {key: value for key, value in fields.items() if key != "messages"}
    return Received(raw, ChatRequest(messages, rest), plain)


def _load(raw: bytes) -> tuple[object, bool]:
    try:
        return orjson.loads(raw), True
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(raw.decode(), parse_constant=_not_finite, parse_float=_finite), False
    except (ValueError, RecursionError):  # ValueError: also bad UTF-8 and integers of more than 4,300 digits
        raise bad_request("The request body is not valid JSON.") from None


def _not_finite(_: str) -> NoReturn:
    raise ValueError("NaN and Infinity are not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("number out of range")
    return value


def deeper_than(value: object, levels: int) -> bool:
    """Say whether a JSON value nests deeper than `levels`; linear in its size, without recursion."""
    dicts, lists = _nested([value])
    for _ in range(levels):
        # `type` and chained iterators, for this meets every value of the body; parsers make no subclasses.
        dicts, lists = _nested(chain(chain.from_iterable(map(dict.values, dicts)), chain.from_iterable(lists)))
        if not dicts and not lists:
            return False
    return True


def _nested(values: Iterable[object]) -> tuple[list[dict[str, object]], list[list[object]]]:
    held = [value for value in values if type(value) in _NESTING]
    dicts = [value for value in held if type(value) is dict]
    return dicts, [value for value in held if type(value) is list]


def _messages(fields: Mapping[str, object], most: int) -> tuple[Message, ...]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a non-empty array of messages.", "messages")
    if len(messages) > most:
        raise bad_request(f"'messages' holds {len(messages)} messages; at most {most} are taken.", "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise bad_request(f"'messages[{i}]' must be an object.", f"messages[{i}]")
        if not isinstance(message.get("role"), str):
            raise bad_request(f"'messages[{i}].role' must be a string.", f"messages[{i}].role")
    return tuple(cast("list[Message]", messages))


def _check_images(messages: tuple[Message, ...], most: int) -> None:
    images = sum(1 for m in messages if isinstance(m.get("content"), list) for p in parts_of(m) if is_image(p))
    if images > most:
        raise bad_request(f"The request holds {images} images; at most {most} are taken.", "messages")


def parts_of(message: Message) -> list[Mapping[str, object]]:
    """Return the parts of a message's list content that are objects (none for string content)."""
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def is_image(part: Mapping[str, object]) -> bool:
    """Say whether a content part carries an image (vLLM's and OpenAI's `image_url`, vLLM's `image_embeds`)."""
    return str(part.get("type")) in {"image_url", "input_image", "image_embeds", "image_pil"}
