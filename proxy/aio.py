"""Tasks have a name, an owner and an end: the only module that creates them."""

import asyncio
import logging
from collections.abc import Coroutine

log = logging.getLogger("proxy.aio")


class Tasks:
    """The background tasks of one app: kept while they run, logged if they fail, ended in the drain."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[object]] = set()

    def spawn(self, work: Coroutine[object, object, object], *, name: str) -> asyncio.Task[object]:
        """Start `work` under `name` and keep it until it ends; return its task."""
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The text of a foreign exception may quote a request: only its class goes into the log.
            log.error("task_failed", extra={"task": task.get_name(), "error": type(error).__name__})

    def __len__(self) -> int:
        return len(self._running)

    async def close(self) -> None:
        """Cancel what still runs and wait until it has ended."""
        for task in tuple(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
