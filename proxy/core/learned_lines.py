"""Lines of a system message that prove volatile: three values in three turns, in the same place."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proxy.core.text import digest, encoded

TURNS = 3
MOST_LINES = 512
"""A head of more lines is taken as it is: its lines are data, not a template."""


@dataclass(frozen=True, slots=True)
class Lines:
    """What is known of the lines of one session's head: their digests in the last turns, oldest first, and the learned.

    Digests have 16 bytes; `learned` are places in the head, counted from 0.
    """

    recent: tuple[tuple[bytes, ...], ...] = ()
    learned: frozenset[int] = frozenset()


def learn(known: Lines, lines: Sequence[str], seed: frozenset[int] = frozenset()) -> Lines:
    """Return what is known after a turn whose head has these lines (times of day taken out already).

    A head of another number of lines begins anew: an edit is an edit, not volatility.  The same lines once more, as a
    regenerated answer tells them, are no new turn.  `seed` are places learned in other chats of this skeleton.  All
    learned lines together stay under a third of the characters.
    """
    if len(lines) > MOST_LINES:
        return Lines()
    digests = tuple(digest(encoded(line)) for line in lines)
    if not known.recent or len(known.recent[-1]) != len(digests):
        return Lines((digests,), _under_a_third(lines, seed))
    if known.recent[-1] == digests:
        return known
    recent = (*known.recent, digests)[-TURNS:]
    changing = {
        i
        for i in range(len(digests))
        if len(recent) == TURNS and len({turn[i] for turn in recent}) == TURNS and lines[i].strip()
    }
    learned = known.learned | changing
    return Lines(recent, learned if _under_a_third(lines, frozenset(learned)) == learned else known.learned)


def _under_a_third(lines: Sequence[str], places: frozenset[int]) -> frozenset[int]:
    inside = sum(len(lines[i]) for i in places if i < len(lines))
    return places if inside * 3 < sum(map(len, lines)) and all(i < len(lines) for i in places) else frozenset()


def skeleton_of(known: Lines) -> bytes:
    """Return the digest of what stays of the head: its lines without the learned ones, their places kept."""
    last = known.recent[-1] if known.recent else ()
    return digest(*(b"" if i in known.learned else value for i, value in enumerate(last)))


def fits(skeleton: bytes, places: frozenset[int], lines: Sequence[str]) -> bool:
    """Say whether a head has this skeleton, with holes at `places`."""
    if any(i >= len(lines) for i in places):
        return False
    digests = tuple(digest(encoded(line)) for line in lines)
    return skeleton_of(replace(Lines(), recent=(digests,), learned=places)) == skeleton
