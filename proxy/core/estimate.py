"""How many tokens a prompt has at most, without a tokenizer: bytes of its text and what a template puts around it."""

import json
from collections.abc import Iterator, Mapping, Sequence

from proxy.core.request import Message

# A chat template adds at most about this much: special tokens and a role to each message, a default system message or
# a date to the whole, an introduction to tools.  Measured on the templates of Qwen2.5, Llama 3.1 and SmolLM2.
MESSAGE_TOKENS = 24
TEMPLATE_TOKENS = 96
TOOLS_TOKENS = 512
_SLICE = 64 * 1024
_MEDIA = ("image", "audio", "video", "input_image", "input_audio", "file")


def is_media(part: object) -> bool:
    """Say whether a content part is an image or a like thing: its payload is no text, and is never tokenised."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    if isinstance(kind, str):
        return kind.startswith(_MEDIA)
    return any(name in part for name in ("image_url", "audio_url", "video_url", "image_embeds", "input_audio"))


def media_count(messages: Sequence[Message]) -> int:
    """Return how many images (and the like) the messages carry."""
    return sum(is_media(part) for m in messages if isinstance(m.get("content"), list) for part in _parts(m))


def without_media(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without images; a message that had nothing else keeps its place with an empty text."""
    out: list[Message] = []
    for message in messages:
        parts = _parts(message)
        kept = [part for part in parts if not is_media(part)]
        if len(kept) < len(parts):
            message = {**message, "content": kept or [{"type": "text", "text": ""}]}
        out.append(message)
    return out


def texts_of(messages: Sequence[Message]) -> Iterator[str]:
    """Yield every text of the messages that a template may render: content, reasoning, tool calls; no media."""
    for message in messages:
        for name, value in message.items():
            if isinstance(value, str):
                yield value
            elif name == "content" and isinstance(value, list):
                yield from (_part(part) for part in value if not is_media(part))
            elif value is not None:
                yield _spelled(value)


def upper_bound(messages: Sequence[Message], tools: object = None, *, per_image: int = 0) -> int:
    """Return more tokens than any byte-level tokenizer makes of a chat prompt: a token has at least one byte.

    `per_image` is what an image counts, in tokens.  Slow texts are measured in slices, so that a thread that does this
    lets others work.
    """
    size = TEMPLATE_TOKENS + MESSAGE_TOKENS * len(messages) + per_image * media_count(messages)
    size += sum(utf8_bytes(text) for text in texts_of(messages))
    if isinstance(tools, list) and tools:
        size += TOOLS_TOKENS + sum(utf8_bytes(_spelled(tool)) + MESSAGE_TOKENS for tool in tools)
    return size


def likely(known_tokens: int, known_bytes: int, new_bytes: int) -> float:
    """Return about how many tokens a prompt has: those of its known beginning, plus what its new bytes cost at the
    same rate.  To be told to people, never to decide by: `upper_bound` is for that.
    """
    return known_tokens * (1 + new_bytes / known_bytes) if known_bytes else float(new_bytes)


def utf8_bytes(text: str) -> int:
    """Return the bytes of a text in UTF-8; lone surrogates count as the three that replace them."""
    if text.isascii():
        return len(text)
    return sum(len(text[at : at + _SLICE].encode("utf-8", "surrogatepass")) for at in range(0, len(text), _SLICE))


def characters(messages: Sequence[Message]) -> int:
    """Return how many characters of text the messages hold: in no time, for no text is looked at."""
    return sum(len(text) for text in texts_of(messages))


def _parts(message: Message) -> list[object]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _part(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else _spelled(part)


def _spelled(value: object) -> str:
    # As templates spell JSON: with a space after each comma and colon.
    return json.dumps(value, ensure_ascii=False)
