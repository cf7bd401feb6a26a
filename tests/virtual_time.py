"""An event loop whose clock stands still while anybody has something to do: waits are exact and take no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Lets the clock jump to the next timer where a real one would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; else let `timeout` seconds have gone by."""
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("everybody waits for what nobody will do")
        self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of one test; its time begins at 0."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual seconds since the beginning."""
        return self._virtual.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def soon(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run `work` beside the test, which must await what comes of it."""
    return asyncio.ensure_future(work)  # noqa: TID251  a test is the owner and the end of it


async def at(seconds: float) -> None:
    """Wait until the clock shows `seconds`."""
    await asyncio.sleep(seconds - asyncio.get_running_loop().time())
