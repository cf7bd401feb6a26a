"""Why a vLLM ended, from its exit code and the last lines it wrote, and how long to wait before the next start."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

CAUSES = ("gpu_memory", "host_memory", "killed", "address", "flags", "model", "crashed", "engine", "stopped", "other")
# A server that ran this long had started well: what ended it is no fault of its start.
STEADY_SECONDS = 600.0
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 60.0
_SHOWN_CHARACTERS = 240


@dataclass(frozen=True, slots=True)
class Ending:
    """How a server ended: one of CAUSES, in a sentence, and what to do about it."""

    cause: str
    says: str
    mend: str
    told: str = ""  # its own last word on it

    @property
    def sentence(self) -> str:
        """All of it for people."""
        told = f" It wrote: {self.told}" if self.told else ""
        return f"{self.says}{told} {self.mend}".strip()


# In the order in which they are looked for: a cause before what follows from it.
_LINES: tuple[tuple[str, str, str, str], ...] = (
    ("gpu_memory",
     r"OutOfMemoryError|out of memory|No available memory for the cache|memory for the cache blocks|"
     r"KV cache is needed|Free memory on device|No available block",
     "The GPU's memory does not suffice.",
     "Lower --max-model-len, or end what else uses the GPU; `prefix-proxy plan` says what fits."),
    ("host_memory", r"MemoryError|Cannot allocate memory|oom-kill|std::bad_alloc",
     "The machine's memory does not suffice.", "Take a smaller model or a larger machine."),
    ("address", r"Address already in use|address already in use",
     "Its address is taken.", "End the other vLLM."),
    ("flags", r"unrecognized arguments|error: argument|the following arguments are required|error: ambiguous option",
     "It does not take its flags.", "`prefix-proxy doctor --flags` says which are wrong."),
    ("model",
     r"Repository Not Found|RepositoryNotFoundError|does not appear to have a file|is not a local folder|"
     r"Can't load the configuration|GatedRepoError|LocalEntryNotFoundError|not a valid model identifier|"
     r"Invalid repository ID|couldn't connect to",
     "It cannot get the model.", "Check the name, and that the machine may download it or has it already."),
    ("engine", r"EngineDeadError|EngineCore.*(?:died|failed|fatal)|Engine core initialization failed",
     "Its engine died.", "The lines before that in its log say why."),
)  # fmt: skip
_ERROR = re.compile(r"(?:\w*Error|error)\b.{0,3}:|Exception:")


def ending_of(code: int, lines: Sequence[str]) -> Ending:
    """Say why a process ended: `code` as Python gives it (minus the signal), `lines` the last that it wrote."""
    if code in (0, -15, -2, 143, 130):
        return Ending("stopped", "Somebody stopped it.", "")
    for cause, pattern, says, mend in _LINES:
        found = next((line for line in reversed(lines) if re.search(pattern, line)), None)
        if found is not None:
            return Ending(cause, says, mend, _shown(found))
    if code in (-9, 137):
        mend = "Where nobody did, the system was out of memory: its log (dmesg) tells."
        return Ending("killed", "It was killed.", mend)
    told = next((line for line in reversed(lines) if _ERROR.search(line)), lines[-1] if lines else "")
    if code < 0 or code in (134, 139):
        return Ending("crashed", f"It crashed (signal {-code if code < 0 else code - 128}).", "", _shown(told))
    return Ending("other", f"It ended with code {code}.", "", _shown(told))


def _shown(line: str) -> str:
    """Return a line for a terminal: no control signs, not endless."""
    return "".join(sign if sign.isprintable() else "?" for sign in line.strip())[-_SHOWN_CHARACTERS:]


def pause_seconds(failures: int) -> float:
    """Return how long to wait before the next start, after so many ends in a row (from 1 on): doubled each time."""
    return float(min(_MOST_SECONDS, _FIRST_SECONDS * 2 ** min(failures - 1, 16)))
