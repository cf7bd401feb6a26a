"""The text of messages, and the digests by which two of them are called equal."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import orjson

from proxy.core.request import Message, parts_of

DIGEST_BYTES = 16


def digest(*parts: bytes) -> bytes:
    """Return a 16-byte digest of `parts`, told apart by their lengths."""
    # One call instead of two a part: this runs for every message of every request.
    framed = b"".join([b"%d:%b" % (len(part), part) for part in parts])
    return hashlib.blake2b(framed, digest_size=DIGEST_BYTES).digest()


def encoded(text: str) -> bytes:
    """Return UTF-8 bytes of any text, lone surrogates included (they come out of escapes)."""
    return text.encode("utf-8", "surrogatepass")


def packed(value: object) -> bytes:
    """Return `value` as compact JSON bytes."""
    try:
        return orjson.dumps(value)
    except TypeError:  # lone surrogates and integers beyond 64 bits
        return json.dumps(value, separators=(",", ":")).encode()


def kept(raw: bytes) -> bytes:
    """Return the same bytes in a buffer of their size: what orjson returns holds kilobytes more until it is freed."""
    return bytes(memoryview(raw))


def unpacked(raw: bytes) -> object:
    """Return the value of JSON that `packed` made."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return json.loads(raw)


def message_digest(message: Message) -> bytes:
    """Return the digest of a whole message; two are equal only where every field and character is."""
    content = message.get("content")
    if isinstance(content, str) and len(message) == 2 and "role" in message:
        role, text = encoded(str(message["role"])), encoded(content)
        framed = b"%d:%b%d:%b" % (len(role), role, len(text), text)  # digest(role, text), for nearly every message
        return hashlib.blake2b(framed, digest_size=DIGEST_BYTES).digest()
    try:
        return digest(orjson.dumps(message, option=orjson.OPT_SORT_KEYS))
    except TypeError:
        return digest(json.dumps(message, sort_keys=True).encode())


def text_of(message: Message) -> str:
    """Return the text of a message: its string content, or its text parts one after the other."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in parts_of(message) if part.get("type") == "text")


def first_text(message: Message) -> str | None:
    """Return the string content, or the text of the first text part; None where there is neither."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    for part in parts_of(message):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
    return None


def with_first_text(message: Message, text: str) -> Message:
    """Return the message with its string content, or its first text part, set to `text`; an empty part is left out."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": text}
    parts: list[object] = []
    done = False
    for part in content:
        if not done and isinstance(part, dict) and part.get("type") == "text":
            done = True
            if text:
                parts.append({**part, "text": text})
        else:
            parts.append(part)
    return {**message, "content": parts}


def calls_of(message: Message) -> list[Mapping[str, object]]:
    """Return the tool calls of an assistant message that are objects."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def same_arguments(arguments: object) -> bytes:
    """Return the key under which two spellings of tool arguments are one: equal as re-serialised JSON text.

    Open WebUI writes `{"city": "Paris"}` as `{"city":"Paris"}`; `true` is not `1`, and key order counts.
    """
    if not isinstance(arguments, str):
        return packed(arguments)
    try:
        return json.dumps(json.loads(arguments)).encode()
    except (ValueError, RecursionError):
        return encoded(arguments)


def bare(text: str) -> str:
    """Return the text of a reply as clients tell it later: without a leading think block and outer white space."""
    out = text.lstrip()
    if out.startswith("<think>") and (end := out.find("</think>")) >= 0:
        out = out[end + len("</think>") :]
    return out.strip()


def reply_key(message: Message) -> bytes:
    """Return the key under which a reply is what vLLM generated: bare text and calls, arguments by value."""
    parts = [encoded(bare(text_of(message)))]
    for call in calls_of(message):
        function = call.get("function")
        known = function if isinstance(function, dict) else {}
        parts += [encoded(str(call.get("id"))), encoded(str(known.get("name"))), same_arguments(known.get("arguments"))]
    if parts_of(message):
        parts.append(b"list")
    return digest(*parts)


def length_of(messages: Sequence[Message]) -> int:
    """Return the characters of text in `messages`."""
    return sum(len(text_of(message)) for message in messages)
