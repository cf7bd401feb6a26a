"""Comments in a silent stream, so that nothing between us and the client takes it for dead."""

import asyncio
from contextlib import suppress
from typing import Protocol

from aiohttp import web

from proxy.aio import Tasks
from proxy.core.sse import KEEP_ALIVE


class Boundary(Protocol):
    """Who knows how far a stream has come."""

    @property
    def at_boundary(self) -> bool:
        """Whether what was written ends between two events."""


class KeepAlive:
    """Watches one stream: whoever writes sets `last` and `writing`, two assignments a chunk; a timer does the rest."""

    def __init__(self, response: web.StreamResponse, gate: Boundary, tasks: Tasks, seconds: float) -> None:
        """`seconds` of silence bring a comment; 0 turns it off."""
        self._response = response
        self._gate = gate
        self._tasks = tasks
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self.last = self._loop.time()  # when something was last written
        self.writing = False  # a write waits for the client, which thus has something to read

    def start(self) -> None:
        """Begin to watch; the response's headers must be out."""
        if self._seconds > 0:
            self._timer = self._loop.call_later(self._seconds, self._look)

    def stop(self) -> None:
        """Write nothing any more."""
        for each in (self._timer, self._task):
            if each is not None:
                each.cancel()
        self._timer = None

    def _look(self) -> None:
        wait = self.last + self._seconds - self._loop.time()
        if wait <= 0:
            wait = self._seconds
            # A comment within an event would end up in its data or be read as the end of it.
            if self._gate.at_boundary and not self.writing and (self._task is None or self._task.done()):
                self._task = self._tasks.spawn(self._write(), name="keep-alive")
        self._timer = self._loop.call_later(wait, self._look)

    async def _write(self) -> None:
        # This ran later than `_look`: bytes may have come in between.
        if self._gate.at_boundary and not self.writing:
            self.last = self._loop.time()
            with suppress(ConnectionError):
                await self._response.write(KEEP_ALIVE)
