"""The text of the last prompts, for a short while: what an explanation needs to say where two texts part."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import monotonic

from proxy.core.last_prompt import LastPrompt
from proxy.core.request import Message
from proxy.core.text import length_of

KEPT_SECONDS = 120.0
MOST_BYTES = 8 * 1024 * 1024
_MESSAGE_BYTES = 400  # an object of two fields, beside its text


class LastTexts:
    """Messages by the prompt that they are, each for at most 120 s, all within 8 MiB; the oldest go first."""

    def __init__(
        self, *, seconds: float = KEPT_SECONDS, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = monotonic
    ) -> None:
        self._seconds, self._most_bytes, self._clock = seconds, most_bytes, clock
        self._held: OrderedDict[LastPrompt, tuple[float, int, tuple[Message, ...]]] = OrderedDict()
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, prompt: LastPrompt, messages: Sequence[Message]) -> None:
        """Keep the messages of a prompt, its answer last."""
        # Up to four bytes a character: a text with one emoji in it is held so.
        size = 4 * length_of(messages) + _MESSAGE_BYTES * len(messages)
        self.drop(prompt)
        self._held[prompt] = (self._clock() + self._seconds, size, tuple(messages))
        self._bytes += size
        while self._bytes > self._most_bytes:
            self.drop(next(iter(self._held)))
        self._wait()

    def get(self, prompt: LastPrompt | None) -> tuple[Message, ...] | None:
        """Return the messages of a prompt, None if they are not kept any more."""
        held = self._held.get(prompt) if prompt is not None else None
        return held[2] if held is not None and held[0] > self._clock() else None

    def drop(self, prompt: LastPrompt | None) -> None:
        """Forget the messages of a prompt."""
        held = self._held.pop(prompt, None) if prompt is not None else None
        if held is not None:
            self._bytes -= held[1]

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()
        self._bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        """Text goes when its time is over, also where nobody asks."""
        if self._timer is None and self._held:
            deadline = next(iter(self._held.values()))[0]
            self._timer = asyncio.get_running_loop().call_later(max(deadline - self._clock(), 0.01), self._purge)

    def _purge(self) -> None:
        self._timer = None
        now = self._clock()
        while self._held and next(iter(self._held.values()))[0] <= now:
            self.drop(next(iter(self._held)))
        self._wait()
