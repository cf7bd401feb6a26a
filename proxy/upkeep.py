"""Keeps a vLLM running behind the proxy: waits until it is ready, and starts it again when it ends."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from aiohttp import web

from proxy.child import Child
from proxy.core.endings import STEADY_SECONDS, Ending, ending_of, pause_seconds
from proxy.metrics import Metrics
from proxy.state import STATE, State
from proxy.upstream.vllm import Fetch

_POLL_SECONDS = 0.2
_ASK_SECONDS = 2.0
log = logging.getLogger("proxy.upkeep")


class Keeper:
    """One child, and what is done when it ends."""

    def __init__(self, child: Child, tell: Callable[[str], None]) -> None:
        """`tell` is given sentences for people."""
        self.child, self._tell = child, tell

    async def wait_ready(self, fetch: Fetch, waiting: Callable[[], None] = lambda: None) -> Ending | None:
        """Wait until it answers; return how it ended where it ended first."""
        while True:
            answer = await fetch("GET", "/health", seconds=_ASK_SECONDS, limit_bytes=65536)
            if answer is not None and answer[0] == 200:
                return None
            if (code := self.child.code) is not None:
                return ending_of(code, await asyncio.to_thread(self.child.tail))
            waiting()
            await asyncio.sleep(_POLL_SECONDS)

    async def beside(self, app: web.Application) -> AsyncIterator[None]:
        """Keep it running for as long as the app does; stop it after the app's last answer."""
        state = app[STATE]
        keeping = state.tasks.spawn(self._keep(state), name="keeper")
        yield
        keeping.cancel()
        await asyncio.wait({keeping})
        await self.child.stop()

    async def _keep(self, state: State) -> None:
        loop = asyncio.get_running_loop()
        begun, failures = loop.time(), 0
        while True:
            code = await self.child.wait()
            ending = ending_of(code, await asyncio.to_thread(self.child.tail))
            failures = 1 if loop.time() - begun > STEADY_SECONDS else failures + 1
            pause = pause_seconds(failures)
            self._ended(state.metrics, ending, code, pause)
            await self.child.clear()
            await asyncio.sleep(pause)
            begun = loop.time()
            # What cannot even be started (its program was moved) is tried again with the others.
            with suppress(OSError):
                await self.child.start()
            if await self.wait_ready(state.upstream.fetch) is None:
                state.models.poke()
                seconds = loop.time() - begun
                log.info("vllm_ready", extra={"seconds": round(seconds, 1)})
                self._tell(f"vLLM is back, after {seconds:.0f} s.")

    def _ended(self, metrics: Metrics, ending: Ending, code: int, pause: float) -> None:
        metrics.restarts.ended(ending.cause)
        # Its last words stay out of the log: they may quote a request.
        fields = {"cause": ending.cause, "exit_code": code, "again_in_seconds": pause}
        log.error("vllm_ended", extra=fields)
        self._tell(f"vLLM ended: {ending.says} {ending.mend} It is started again in {pause:.0f} s.".replace("  ", " "))
