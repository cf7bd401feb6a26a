"""A tokenizer of our own, from a `tokenizer.json`: for when vLLM will not count.  Needs the package `tokenizers`."""

import asyncio
import importlib
import logging
from collections.abc import Sequence
from typing import Any

from proxy.core.estimate import MESSAGE_TOKENS, media_count, texts_of
from proxy.core.request import Message

log = logging.getLogger("proxy.tokens")

# About what a template adds to a message, and to a whole prompt: only vLLM knows exactly.
AROUND_MESSAGE = 8
AROUND_PROMPT = 48
# At a few MB a second, more would take a thread for too long.
LOCAL_BYTES = 4 * 1024 * 1024
_PIECE = 128 * 1024  # characters encoded in one go


class LocalTokens:
    """Counts in a thread.  The file is read at first use; an unusable one is logged once and no more tried."""

    def __init__(self, file: str | None) -> None:
        """`file`: a tokenizer.json as models bring it, or None for none."""
        self._file = file
        self._lock = asyncio.Lock()
        self._tokenizer: Any = None

    async def count(self, messages: Sequence[Message], tools: object, *, per_image: int) -> int | None:
        """Return about how many tokens a chat prompt has; None without a tokenizer, or for a text above 4 MiB."""
        if self._file is None:
            return None
        return await asyncio.to_thread(self._count, messages, tools, per_image)

    def _count(self, messages: Sequence[Message], tools: object, per_image: int) -> int | None:
        tokenizer = self._load()
        texts = list(texts_of(messages))
        listed = tools if isinstance(tools, list) else []
        texts += texts_of([{"tool": tool} for tool in listed])
        if tokenizer is None or sum(map(len, texts)) > LOCAL_BYTES:
            return None
        pieces = [text[at : at + _PIECE] for text in texts for at in range(0, len(text), _PIECE)]
        # A batch is encoded without the interpreter's lock, a single text with it.
        encoded = tokenizer.encode_batch(pieces, add_special_tokens=False)
        around = AROUND_PROMPT + AROUND_MESSAGE * len(messages) + MESSAGE_TOKENS * len(listed)
        return sum(len(one.ids) for one in encoded) + around + per_image * media_count(messages)

    def _load(self) -> Any:
        if self._tokenizer is None and self._file is not None:
            try:
                self._tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(self._file)
            except Exception as error:  # the package raises bare Exception for a file that it cannot read
                log.error("local_tokenizer_unusable", extra={"error": type(error).__name__})
                self._file = None
        return self._tokenizer
