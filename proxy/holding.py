"""Tasks wait while their chat's answer runs, so that they do not slow it and find its prompt in vLLM's cache."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from proxy.coalesce_metrics import CoalesceMetrics
from proxy.config.coalesce import Coalesce
from proxy.core.identity import Identity
from proxy.core.waiting import Chat, is_held, waits_until

MOST_CHATS = 4096
"""Chats remembered after their answer; the title of a forgotten one only waits in vain for it to begin."""

_Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Held:
    """How a task's wait ended: after `seconds`; `answered` if an answer of its chat has ended and none runs."""

    seconds: float = 0.0
    answered: bool = False


@dataclass(slots=True)
class Answering:
    """One answer of a chat; set `called_tools` before it ends if the client will come back with their results."""

    called_tools: bool = False


class Holding:
    """Knows which chats are being answered.  Chats are told apart by tenant and chat id; only named ones count."""

    def __init__(self, settings: Coalesce, metrics: CoalesceMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._chats: OrderedDict[_Name, Chat] = OrderedDict()
        self._waiting: dict[_Name, set[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        """How many tasks wait now."""
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def answering(self, who: Identity) -> Iterator[Answering]:
        """Keep the tasks of this chat waiting while the block runs; a task's own run keeps nobody."""
        answer = Answering()
        if who.task is not None or not who.explicit or who.chat is None or self._settings.hold_seconds <= 0:
            yield answer
            return
        name = who.tenant, who.chat
        chat = self._chats.setdefault(name, Chat())
        self._chats.move_to_end(name)
        chat.running += 1
        self._news(name)
        try:
            yield answer
        finally:
            chat.running -= 1
            chat.ended, chat.ended_at = True, (now := asyncio.get_running_loop().time())
            chat.more_until = now + self._settings.task_head_seconds if answer.called_tools else 0.0
            self._news(name)
            self._forget()

    async def hold(self, who: Identity) -> Held:
        """Wait as long as a task of this chat has to; return at once for anything else."""
        if not is_held(who) or self._settings.hold_seconds <= 0 or who.chat is None or who.task is None:
            return Held()
        loop, name = asyncio.get_running_loop(), (who.tenant, who.chat)
        arrived = loop.time()
        try:
            while (until := self._until(name, who.task, arrived, loop.time())) is not None:
                await self._wait(name, until)
        finally:
            self._metrics.held(loop.time() - arrived)
        chat = self._chats.get(name)
        return Held(loop.time() - arrived, chat is not None and chat.ended and not chat.running)

    def _until(self, name: _Name, task: str, arrived: float, now: float) -> float | None:
        hold, head = self._settings.hold_seconds, self._settings.task_head_seconds
        return waits_until(self._chats.get(name), task, arrived, now, hold=hold, head=head)

    async def _wait(self, name: _Name, until: float) -> None:
        """Wait for news of a chat, or for a time."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(name, set())
        waiting.add(news)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await news
        finally:
            waiting.discard(news)
            if not waiting and self._waiting.get(name) is waiting:
                del self._waiting[name]

    def _news(self, name: _Name) -> None:
        for news in self._waiting.get(name, ()):
            if not news.done():
                news.set_result(None)

    def _forget(self) -> None:
        while len(self._chats) > MOST_CHATS:
            oldest = next((name for name, chat in self._chats.items() if not chat.running), None)
            if oldest is None:
                return
            del self._chats[oldest]
