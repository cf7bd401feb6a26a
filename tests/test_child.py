"""A child program does not outlive us, and nothing of it is left."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from proxy.child import Child

# Starts another process, says which, and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("started", child.pid, flush=True)
time.sleep(60)
"""
OWNER = """
import asyncio, os, sys
from proxy.child import Child

async def main():
    child = Child([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), None)
    await child.start()
    print(child.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def gone(pid: int) -> bool:
    """Say whether there is no such process, or only what is left of one that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def until(happened: object, seconds: float = 20.0) -> None:
    """Wait until a condition holds."""
    assert callable(happened)
    async with asyncio.timeout(seconds):
        while True:
            if happened():
                return
            await asyncio.sleep(0.02)


async def test_what_it_wrote_last_is_kept_and_the_log_of_the_last_run_too(tmp_path: Path) -> None:
    """Each start has a fresh log; the one before lies beside it."""
    log = tmp_path / "logs" / "vllm.log"
    child = Child([sys.executable, "-c", "print('one\\n\\ntwo'); raise SystemExit(3)"], dict(os.environ), log)
    await child.start()
    assert await child.wait() == 3 and child.code == 3
    assert await asyncio.to_thread(child.tail) == ["one", "two"]
    await child.start()
    await child.wait()
    assert log.with_name("vllm.log.1").read_text() == "one\n\ntwo\n"


async def test_stopping_ends_what_it_started_too(tmp_path: Path) -> None:
    """Workers hold the GPU's memory: none may be left when the next start begins."""
    child = Child([sys.executable, "-c", PARENT], dict(os.environ), tmp_path / "log")
    await child.start()
    log = tmp_path / "log"
    await until(lambda: log.exists() and "\n" in log.read_text())
    worker = int(log.read_text().split()[1])
    assert not gone(worker)
    await child.stop()
    assert child.code == -signal.SIGTERM and gone(worker)


async def test_a_socket_that_was_left_behind_is_removed_before_a_start(tmp_path: Path) -> None:
    """vLLM refuses to listen where a file is."""
    socket = tmp_path / "vllm.sock"
    socket.touch()
    child = Child([sys.executable, "-c", ""], dict(os.environ), tmp_path / "log", socket)
    await child.start()
    assert not socket.exists()
    await child.wait()


def test_it_ends_when_we_are_killed() -> None:
    """Also by a signal that nobody can handle."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    asyncio.run(until(lambda: gone(pid)))
