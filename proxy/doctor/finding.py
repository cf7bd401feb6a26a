"""What a check found, in words for people and with a state for programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WELL, TO_MEND, NOT_CHECKED = 0, 1, 2

State = Literal["well", "mend", "note", "failed"]
"""As it should be; to be mended; worth knowing, or not to be seen from outside; could not be checked."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what is so, why that matters, and the exact flag or setting that mends it."""

    part: Literal["vLLM", "flags", "Open WebUI"]
    check: str
    state: State
    says: str
    why: str = ""
    mend: str = ""


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if something is to be mended, else 2 if something could not be checked, else 0."""
    states = {each.state for each in findings}
    if "mend" in states:
        return TO_MEND
    return NOT_CHECKED if "failed" in states or not findings else WELL


def printable(text: str, most: int = 300) -> str:
    """Return what a server said with nothing in it that steers a terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)[:most]
