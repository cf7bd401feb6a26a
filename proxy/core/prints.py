"""Fingerprints of messages: which one differs, and where in its text, without keeping any of the text.

They are Python's own hashes, keyed anew in each process: they live in memory only and are never shown.
"""

from array import array
from collections.abc import Iterable

from proxy.core.request import Message
from proxy.core.text import message_digest

CHUNK_CHARACTERS = 128
MOST_CHUNKS = 64
"""A longer text has longer chunks: 256 bytes a message are the most that is kept."""

_WORD = 0xFFFF_FFFF


def print_of(message: Message) -> int:
    """Return a 64-bit fingerprint of a whole message; equal messages have equal ones."""
    content = message.get("content")
    if isinstance(content, str) and len(message) == 2 and "role" in message:
        return hash((message["role"], content))
    return hash(message_digest(message))


def prints_of(messages: Iterable[Message]) -> "array[int]":
    """Return the fingerprints of `messages`, 8 bytes each."""
    return array("q", map(print_of, messages))


def common_prints(a: "array[int]", b: "array[int]") -> int:
    """Return how many leading fingerprints are equal."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    return next(i for i in range(low, high) if a[i] != b[i])


def chunk_size(characters: int) -> int:
    """Return the characters in a chunk of a text of this length."""
    size = CHUNK_CHARACTERS
    while size * MOST_CHUNKS < characters:
        size *= 2
    return size


def chunks_in(characters: int) -> int:
    """Return how many chunks a text of this length has."""
    return -(-characters // chunk_size(characters))


def chunks_of(text: str) -> bytes:
    """Return the fingerprints of a text's chunks, 4 bytes each."""
    size = chunk_size(len(text))
    return array("I", [hash(text[i : i + size]) & _WORD for i in range(0, len(text), size)]).tobytes()


def common_in_chunks(chunks: bytes, characters: int, text: str) -> int:
    """Return how many leading characters `text` shares, in whole chunks, with the text that `chunks` were made of.

    `characters` is the length of that text.  The first difference lies within the next chunk, or at an end.
    """
    size, kept = chunk_size(characters), array("I", chunks)
    for i, value in enumerate(kept):
        piece = text[i * size : (i + 1) * size]
        if hash(piece) & _WORD != value:
            return i * size
    return min(characters, len(text))


def common_characters(a: str, b: str) -> int:
    """Return how many leading characters two texts share."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
