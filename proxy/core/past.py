"""What a session keeps for its explanations: the last prompts of its branches, what became of its last exchanges."""

from dataclasses import dataclass
from struct import Struct
from sys import intern
from typing import NamedTuple

import orjson

from proxy.core.last_prompt import LastPrompt
from proxy.core.prefix import CAUSES, SHORTFALLS

MOST_PROMPTS = 3
"""Branches of a chat (the same model picked twice, the arrows between answers) that are told apart."""

MOST_EXCHANGES = 20

_ROW = Struct("<d2H6I3B")
_NONE = 0xFFFF_FFFF
_CAUSES, _SHORTFALLS = ("", *CAUSES), ("", *SHORTFALLS)


class Outcome(NamedTuple):
    """What became of an exchange: figures in tokens (None: not known), causes, steps, the place as plain values.

    `at` in wall seconds; `predicted_messages` and the tokens after it are None where there was nothing to compare with.
    """

    at: float
    messages: int
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    predicted_messages: int | None
    predicted_tokens: int | None
    sure_tokens: int | None
    block_tokens: int
    block_assumed: bool
    cause: str
    shortfall: str
    trail: tuple[str, ...]
    place: tuple[object, ...] | None


@dataclass(slots=True, eq=False)
class Past:
    """In memory only, and bounded; ten thousand sessions keep one.  `lost_reply`: the last fell short at its reply."""

    prompts: tuple[LastPrompt, ...] = ()
    rows: bytes = b""
    notes: tuple[str, ...] = ()
    lost_reply: bool = False

    @property
    def size(self) -> int:
        """About the bytes that it holds."""
        return 160 + sum(prompt.size for prompt in self.prompts) + len(self.rows) + sum(8 + len(n) for n in self.notes)

    def add_prompt(self, prompt: LastPrompt, instead_of: LastPrompt | None) -> None:
        """Keep a prompt that was answered, in place of the one that it goes on from."""
        kept = [each for each in self.prompts if each is not instead_of]
        self.prompts = (*kept, prompt)[-MOST_PROMPTS:]

    def add_outcome(self, outcome: Outcome) -> None:
        """Keep what became of an exchange: numbers packed; trails are few, so equal ones are one text."""
        note = orjson.dumps((outcome.trail, outcome.place)).decode()
        self.notes = (*self.notes, intern(note) if outcome.place is None else note)[-MOST_EXCHANGES:]
        tokens = (_NONE if value is None else min(value, _NONE - 1) for value in outcome[2:8])
        row = _ROW.pack(
            outcome.at,
            min(outcome.messages, 0xFFFF),
            min(outcome.block_tokens, 0xFFFF),
            *tokens,
            outcome.block_assumed,
            _CAUSES.index(outcome.cause),
            _SHORTFALLS.index(outcome.shortfall),
        )
        self.rows = (self.rows + row)[-MOST_EXCHANGES * _ROW.size :]

    def outcomes(self) -> list[Outcome]:
        """Return what became of the last exchanges, oldest first."""
        out = []
        for note, row in zip(self.notes, _ROW.iter_unpack(self.rows), strict=True):
            at, messages, block, *tokens, assumed, cause, shortfall = row
            trail, place = orjson.loads(note)
            figures = [None if value == _NONE else value for value in tokens]
            causes = _CAUSES[cause], _SHORTFALLS[shortfall]
            told = (at, messages, *figures, block, bool(assumed), *causes, tuple(trail), place and tuple(place))
            out.append(Outcome._make(told))
        return out
