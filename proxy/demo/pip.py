"""Running an installer (pip, npm, venv): its output goes to a log, its failure becomes one plain sentence."""

import os
import signal
import subprocess
import zipfile
from collections import deque
from collections.abc import Callable, Sequence
from email.parser import HeaderParser
from pathlib import Path
from re import split

from proxy.demo.needs import Missing, python_name

# What pip and npm write when they reach no index.
NO_NETWORK = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ProxyError",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "ENOTFOUND",
    "EAI_AGAIN",
    "ECONNREFUSED",
    "ETIMEDOUT",
)
TAIL_LINES = 200


def run(command: Sequence[str | Path], log: Path, told: Callable[[str], None], folder: Path | None = None) -> None:
    """Run `command` to its end; `told` hears each line, and `log` gets all of them.  Raises Missing if it fails.

    The command runs in a session of its own: Ctrl-C reaches only us, and we end it.
    """
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    try:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise Missing(f"The command {Path(command[0]).name} is missing.") from error
    with process, log.open("a") as out:
        assert process.stdout is not None  # PIPE was asked for
        try:
            for line in process.stdout:
                out.write(line)
                tail.append(line.rstrip())
                told(line.rstrip())
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        raise Missing(explain(Path(command[0]).name, tail, log))


def explain(program: str, lines: Sequence[str], log: Path) -> str:
    """Say in one sentence why an installer failed, from the last lines that it wrote.  Pure."""
    text = "\n".join(lines)
    if any(sign in text for sign in NO_NETWORK):
        return f"The package index could not be reached: is there a network here? (The log is {log}.)"
    if "No space left on device" in text or "ENOSPC" in text:
        return f"The disk is full. (The log is {log}.)"
    for line in lines:
        if "No matching distribution found for " in line:
            name = line.partition("No matching distribution found for ")[2].strip()
            return f"The package index has no build of {name} for {python_name()}. (The log is {log}.)"
    last = next((line for line in reversed(lines) if line.startswith(("ERROR", "npm error", "Error"))), "")
    return f"{program} failed{': ' if last else ''}{last.strip()} (The log is {log}.)"


def requirements(wheel: Path, left_out: frozenset[str]) -> list[str]:
    """List what a wheel requires, as its metadata says it, but for its extras and the packages in `left_out`."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        # Only the headers: the text after them can be anything.
        headers = HeaderParser().parsestr(archive.read(name).decode(errors="replace"))
    wanted = [str(value) for value in headers.get_all("Requires-Dist", [])]
    return [value for value in wanted if "extra ==" not in value and _package(value) not in left_out]


def _package(wanted: str) -> str:
    """Return the package's name out of a requirement such as `torch>=2; python_version > "3"`."""
    return split(r"[^A-Za-z0-9._-]", wanted, maxsplit=1)[0].lower().replace("_", "-")
