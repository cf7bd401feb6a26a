"""A vLLM as a child process that does not outlive us, also when we are killed."""

import asyncio
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# At SIGTERM vLLM lets answers end for as long as its --shutdown-timeout says; ours is 30.
STOP_SECONDS = 40.0
_REST_SECONDS, _KILLED_SECONDS = 5.0, 2.0
_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 200
_PR_SET_PDEATHSIG = 1


class Child:
    """One program, started again and again in a session of its own: Ctrl-C on the terminal reaches us, not it."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], log: Path | None, socket: Path | None = None
    ) -> None:
        """`socket` is the file on which it listens, which it leaves behind when it is killed."""
        self.command, self.log = tuple(command), log
        self._socket = socket
        self._environ = dict(environ)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process that runs or ran last."""
        return self._process.pid if self._process else None

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        """Start it, with a fresh log beside the last one.  Raises OSError."""
        if self._socket is not None:
            await asyncio.to_thread(self._socket.unlink, missing_ok=True)
        out = await asyncio.to_thread(_fresh, self.log) if self.log else None
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr if out is None else out,
                stderr=asyncio.subprocess.STDOUT if out is not None else None,
                start_new_session=True,
                preexec_fn=_bound(),
            )
        finally:
            if out is not None:
                os.close(out)

    async def wait(self) -> int:
        """Wait until it has ended; return its code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask it to end, wait, and see to it that nothing of it is left."""
        if self._process is None:
            return
        self.ask()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        await self.clear()

    async def clear(self) -> None:
        """End what it started and what outlived it: its workers hold the GPU's memory."""
        assert self._process is not None
        if self.code is not None:
            # What it started has noticed: vLLM's workers have shared memory to give back.
            await self._left(_REST_SECONDS)
        self.kill()
        await self._process.wait()
        await self._left(_KILLED_SECONDS)

    async def _left(self, seconds: float) -> None:
        """Wait until nothing of it is there, for at most so long."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        with suppress(ProcessLookupError):
            while loop.time() < deadline:
                os.killpg(self._process.pid, 0)
                await asyncio.sleep(0.05)

    def ask(self) -> None:
        """Ask it to end."""
        with suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it started, now."""
        with suppress(ProcessLookupError):
            if self._process is not None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def tail(self) -> Sequence[str]:
        """Return the last lines that it wrote, the oldest first; none where it writes to our own output."""
        if self.log is None:
            return ()
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()][-_TAIL_LINES:]
        return ()


def _fresh(log: Path) -> int:
    log.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        shutil.move(log, log.with_name(f"{log.name}.1"))
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)


def _bound() -> Callable[[], None] | None:
    """Return what makes a child be told to end when we are gone, however we went; only Linux knows that."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)  # loaded here: after the fork no lock may be waited for
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
