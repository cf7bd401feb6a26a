"""Volatile text of a system message, told apart from what stays: blocks at its end, times of day in its lines."""

from dataclasses import dataclass

from proxy.core.clock import Told, is_timetable, without_times
from proxy.core.draft import Block
from proxy.core.text import digest, encoded

SUMMARY = "[CONVERSATION SUMMARY]"
MEMORY = "memory_context"
NONCES = ("x-anthropic-billing-header:",)
"""How lines begin that clients write anew for each request (Claude Code's first system block)."""


@dataclass(frozen=True, slots=True)
class Parted:
    """A system text in two: what stays in the head, and the blocks that move (in the order in which they stood)."""

    head: str
    blocks: tuple[Block, ...]


def block(kind: str, text: str) -> Block:
    """Return a block with its digest."""
    return Block(kind, text, digest(encoded(kind), encoded(text)))


def part(text: str, *, tags: tuple[str, ...], leads: tuple[str, ...]) -> Parted:
    """Part a system text: known blocks by whole lines from its end, then times of day.

    In: the text as told; `tags` configured by the operator; `leads` of document templates.  Every line of the
    text is in the head or in a block; linear in time.
    """
    head, blocks = _from_the_end(text, (MEMORY, *tags), leads)
    head, times = _without_times(head)
    blocks += times
    return Parted(head, tuple(blocks))


def _from_the_end(text: str, tags: tuple[str, ...], leads: tuple[str, ...]) -> tuple[str, list[Block]]:
    blocks: list[Block] = []
    at = _line_start(text, SUMMARY)
    if at >= 0:
        blocks.append(block("summary", text[at:]))
        text = _before(text, at)
    while True:
        found = _last_block(text, tags, leads)
        if found is None:
            return text, blocks[::-1]
        kind, at = found
        blocks.append(block(kind, text[at:].strip("\n")))
        text = _before(text, at)


def _last_block(text: str, tags: tuple[str, ...], leads: tuple[str, ...]) -> tuple[str, int] | None:
    end = text.rstrip("\n")
    for tag in tags:
        if end.endswith(f"</{tag}>"):
            at = _line_start(end, f"<{tag}>")
            if at >= 0:
                return f"tag:{tag}", at
    if end.endswith("\n</context>"):
        starts = [at for lead in leads if (at := _line_start(end, lead)) >= 0]
        if starts:
            return "documents", max(starts)
    return None


def _line_start(text: str, opening: str) -> int:
    """Return where the last line begins that starts with `opening`; -1 where none does."""
    at = text.rfind("\n" + opening)
    if at >= 0:
        return at + 1
    return 0 if text.startswith(opening) else -1


def _before(text: str, at: int) -> str:
    """Return what stands before a block, without the line break that parted them."""
    return text[: max(0, at - 1)] if text[max(0, at - 1) : at] == "\n" else text[:at]


def _without_times(text: str) -> tuple[str, list[Block]]:
    """Return the text without its times, and a block for each line of them: one that stays the same is told once."""
    kept: list[str] = []
    times: list[Block] = []
    timetable = is_timetable(text)
    for line in text.split("\n"):
        if line.startswith(NONCES):
            times.append(block("clock:" + digest(encoded(line.partition(":")[0])).hex()[:8], line))
            continue
        told = Told(line, ()) if timetable else without_times(line)
        kept.append(told.line)
        if told.notes:
            kind = "clock:" + digest(encoded(told.line)).hex()[:8]
            times.append(block(kind, "\n".join(dict.fromkeys(told.notes))))
    return "\n".join(kept), times
