"""Places at vLLM: so many requests at once; tasks give way to chats, and tenants take turns in line."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.config.traffic import Admission as Settings
from proxy.core.reject import Reject
from proxy.metrics import Metrics

RETRY_AFTER_SECONDS = 5


class Admission:
    """Gives out the places.  All of it runs in one loop, and nothing is decided across an `await`."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._taken = 0
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the one whose turn is next first
        self.waiting = 0

    @property
    def on(self) -> bool:
        """Whether places are counted."""
        return self._settings.concurrent is not None

    @asynccontextmanager
    async def place(self, tenant: str, *, task: bool) -> AsyncIterator[None]:
        """Hold a place while the block runs; wait for one where all are taken.

        Raises Reject 503 for a task when none is free (Open WebUI shows nothing for a title that failed), for anyone
        when the line is full, and after `admission.queue_seconds`.  A waiting client that leaves is cancelled here,
        and so gives up its turn.
        """
        most = self._settings.concurrent
        if most is None:
            yield
            return
        if self._taken < most:
            self._taken += 1
        else:
            await self._wait(tenant, task=task)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str, *, task: bool) -> None:
        if task:
            raise self._refused("task")
        if self.waiting >= self._settings.queue_requests:
            raise self._refused("queue_full")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        self._count(1)
        begun = time.monotonic()
        try:
            await asyncio.wait((turn,), timeout=self._settings.queue_seconds)
        except asyncio.CancelledError:
            if turn.done():  # the place came in the same moment
                self._pass_on()
            raise
        finally:
            self._metrics.admission_waited(time.monotonic() - begun)
            if not turn.done():
                self._leave(tenant, turn)
        if not turn.done():
            raise self._refused("timeout")

    def _pass_on(self) -> None:
        """Give a place that came free to the tenant whose turn it is, else to whoever comes next."""
        tenant = next(iter(self._lines), None)
        if tenant is None:
            self._taken -= 1
            return
        line = self._lines.pop(tenant)
        turn = line.popleft()
        if line:
            self._lines[tenant] = line  # behind all others
        self._count(-1)
        turn.set_result(None)

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._lines[tenant]
        line.remove(turn)
        if not line:
            del self._lines[tenant]
        self._count(-1)

    def _count(self, by: int) -> None:
        self.waiting += by
        self._metrics.admission_waiting(self.waiting)

    def _refused(self, kind: str) -> Reject:
        self._metrics.admission_refused(kind)
        message = "The model is busy with other requests. Try again in a few seconds."
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return Reject(503, message, "server_error", code="overloaded", headers=headers)
