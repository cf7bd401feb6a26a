"""Runs a real vLLM, and our proxy before it, as child processes: started, waited for, stopped, never left behind."""

import os
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from proxy.demo.recipe import Environment

HOST = "127.0.0.1"
READY_SECONDS = 300  # 35 to 60 on two quiet cores; the first start of all compiles Python files besides
STOP_SECONDS = 20  # vLLM is gone in 3 to 5
REST_SECONDS = 5  # for what outlives the process that started it
POLL_SECONDS = 0.2

VLLM_SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: 23,000 tokens of SmolLM2
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # else a machine of one core has none left for the model
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

# bfloat16 is what the weights are stored in, but CPUs without AVX-512 have no fast kernel for it: three times slower.
VLLM_FLAGS = (
    "--dtype", "float32",
    "--enforce-eager",  # no compilation: a quick start is worth more here than tokens per second
    "--block-size", "32",  # the CPU's default of 128 would hide most of a short chat's reuse
    "--max-num-seqs", "32",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",  # else usage does not say what was cached
    "--generation-config", "vllm",
    # Open WebUI sends its own tools with every chat, which vLLM refuses without these two.
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
)  # fmt: skip


class ServerFailed(Exception):
    """A child process ended before it was ready, or never became ready; the text says why, in one sentence."""


def free_port() -> int:
    """Return a loopback port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Say whether we could listen on this loopback port now."""
    with socket.socket() as probe:
        # As servers do it: a port whose last connections are still closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


class Child:
    """A server in a process of its own, in a session of its own: Ctrl-C reaches us, and we stop it in order."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        environ: Mapping[str, str],
        ready_path: str,
        stop_signal: signal.Signals,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.log = log
        self.url = f"http://{HOST}:{port}"
        self._environ = dict(environ)
        self._ready_path = ready_path
        self._stop_signal = stop_signal
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; it is not ready yet."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Say whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return self._process.pid if self._process is not None else None

    def wait_ready(self, *, waiting: Callable[[], None] = lambda: None, limit_seconds: float = READY_SECONDS) -> float:
        """Wait until the server answers 200; return the seconds that took.  Raises ServerFailed."""
        begun = time.monotonic()
        while not self._answers():
            if not self.running:
                raise ServerFailed(f"{self.name} ended while it started: {self.last_error()} (The log is {self.log}.)")
            if time.monotonic() - begun > limit_seconds:
                raise ServerFailed(f"{self.name} was not ready after {limit_seconds:.0f} s. (The log is {self.log}.)")
            waiting()
            time.sleep(POLL_SECONDS)
        return time.monotonic() - begun

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self._ready_path}", timeout=2) as response:
                return bool(response.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def last_error(self) -> str:
        """Return the last line of the log that tells an error, else its last line."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return (errors or lines or ["it wrote nothing"])[-1][:300]

    def stop(self) -> None:
        """Ask the process to end and wait for it; after STOP_SECONDS end it, and in any case all that it started."""
        if self._process is None:
            return
        if self.running:
            self._process.send_signal(self._stop_signal)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
                self._wait_for_the_rest()
        finally:
            with suppress(ProcessLookupError):  # the usual case: nothing of it is left
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _wait_for_the_rest(self) -> None:
        """Let what the process started end by itself: vLLM's workers have shared memory to give back."""
        assert self._process is not None
        deadline = time.monotonic() + REST_SECONDS
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)


def vllm(
    environment: Environment, *, log: Path, model: str = "smollm2", port: int | None = None, flags: Sequence[str] = ()
) -> Child:
    """Describe a real vLLM on the CPU that serves one of recipe.MODELS under that name; start it with `with`."""
    port = port or free_port()
    folder = str(environment.model(model))
    # As a module, not by its script: the script names the folder that the environment was made in.
    command = [
        str(environment.python),
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        folder,
        "--served-model-name",
        model,
    ]
    command += ["--host", HOST, "--port", str(port), *VLLM_FLAGS, *flags]
    if model == "qwen2tiny":
        command += ["--load-format", "dummy"]  # it has no weights: random ones are made at the start
    binaries = environment.python.parent
    path = f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"
    environ = {**_inherited(), **VLLM_SETTINGS, "PATH": path, "LD_PRELOAD": _preloaded(binaries.parent)}
    return Child("vLLM", command, port=port, log=log, environ=environ, ready_path="/health", stop_signal=signal.SIGINT)


def proxy(upstream: str, *, log: Path, port: int | None = None, profile: str = "balanced") -> Child:
    """Describe our proxy before `upstream`, as `prefix-proxy serve` starts it; start it with `with`."""
    port = port or free_port()
    # -P and this path: whatever folder we are started in, the child runs the same package as we do.
    command = [
        sys.executable,
        "-P",
        "-m",
        "proxy",
        "serve",
        "--upstream",
        upstream,
        "--host",
        HOST,
        "--port",
        str(port),
    ]
    # Ctrl-C means now: a stream that runs then is ended soon.
    command += ["--database", ":memory:", "--profile", profile, "--drain-seconds", "2"]
    environ = {**_inherited(), "PYTHONPATH": str(Path(__file__).parents[2])}
    return Child(
        "The proxy", command, port=port, log=log, environ=environ, ready_path="/ready", stop_signal=signal.SIGTERM
    )


def _inherited() -> dict[str, str]:
    """Return our environment without what is meant for another proxy, vLLM or Python (a key would lock us out)."""
    foreign = ("PREFIX_PROXY_", "VLLM_", "PYTHONPATH", "PYTHONHOME")
    return {key: value for key, value in os.environ.items() if not key.startswith(foreign)}


def _preloaded(venv: Path) -> str:
    """Return what to preload: a faster allocator where the system has it, and the OpenMP that torch was built with."""
    folders = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64")
    allocators = [path for folder in folders if (path := Path(folder, "libtcmalloc_minimal.so.4")).exists()]
    return ":".join(str(path) for path in [*allocators[:1], *venv.glob("lib/libiomp5.so")])
