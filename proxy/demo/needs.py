"""What this machine must have before vLLM can be installed and run here, checked before anything is downloaded."""

import ctypes
import importlib.util
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from proxy.demo.pins import DISK_BYTES, GIB, MEMORY_BYTES, OLDEST_GLIBC


class Missing(Exception):
    """The demo cannot run here; the text says what is missing in one plain sentence."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that decide whether vLLM runs here."""

    system: str  # "Linux", "Darwin", "Windows"
    architecture: str
    libc: str  # "glibc", or "" for musl and anything else
    libc_version: tuple[int, ...]
    cpu_flags: frozenset[str]
    has_libnuma: bool
    has_ensurepip: bool
    memory_bytes: int | None  # None: not known


def this_machine() -> Machine:
    """Look at the machine that we run on."""
    libc, version = platform.libc_ver()
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        libc=libc,
        libc_version=tuple(int(part) for part in version.split(".") if part.isdigit()),
        cpu_flags=_cpu_flags(),
        has_libnuma=_loads("libnuma.so.1"),
        has_ensurepip=importlib.util.find_spec("ensurepip") is not None,
        memory_bytes=_memory_bytes(),
    )


def lacking(machine: Machine) -> str | None:
    """Say in one sentence why vLLM cannot be installed or run on `machine`; None when it can.  Pure."""
    if machine.system != "Linux":
        return f"The demo runs vLLM on the CPU, which needs Linux; this is {machine.system or 'another system'}."
    if machine.architecture not in ("x86_64", "aarch64"):
        return f"vLLM has CPU builds for x86_64 and aarch64 processors only; this is {machine.architecture}."
    if machine.libc != "glibc":
        return "The CPU build of vLLM needs glibc, and this system has another C library (Alpine's musl?)."
    if machine.libc_version < OLDEST_GLIBC:
        have, want = (".".join(str(part) for part in version) for version in (machine.libc_version, OLDEST_GLIBC))
        return f"The CPU build of vLLM needs glibc {want} or newer; here it is {have}."
    if machine.architecture == "x86_64" and machine.cpu_flags and "avx2" not in machine.cpu_flags:
        return "vLLM needs a processor with AVX2, which this one lacks."
    if not machine.has_libnuma:
        return "vLLM needs the library libnuma.so.1, which is missing (Debian and Ubuntu: apt-get install libnuma1)."
    if not machine.has_ensurepip:
        return "Python's module ensurepip is missing (Debian and Ubuntu: apt-get install python3-venv)."
    if machine.memory_bytes is not None and machine.memory_bytes < MEMORY_BYTES:
        have, want = (f"{amount / GIB:.1f} GiB" for amount in (machine.memory_bytes, MEMORY_BYTES))
        return f"vLLM needs {want} of free memory for this model; {have} are available."
    return None


def check_machine() -> None:
    """Raise Missing when vLLM cannot run on this machine."""
    if sentence := lacking(this_machine()):
        raise Missing(sentence)


def check_disk(folder: Path, need_bytes: int = DISK_BYTES) -> None:
    """Raise Missing when the file system of `folder` (which may not exist yet) has less than `need_bytes` free."""
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < need_bytes:
        have, want = (f"{amount / GIB:.1f} GiB" for amount in (free, need_bytes))
        raise Missing(f"The demo needs {want} of disk at first; {place} has {have} free (--cache names another place).")


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _memory_bytes() -> int | None:
    """Return what can be had without swapping: the machine's, or less where a container's limit is lower."""
    amounts = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            cached = _cgroup_cache_bytes()
            amounts.append(int(limit) - used + cached)
    except (OSError, ValueError):
        pass  # not every system has these files: what is not known is not asked for
    return min(amounts, default=None)


def _cgroup_cache_bytes() -> int:
    """Return the file cache that counts as used in a container, and goes when memory is asked for."""
    lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))


def python_name() -> str:
    """Name this Python and machine as a message does."""
    return f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.system()} {platform.machine()}"
