"""Plays a scenario: all users at once, turn by turn, on one way and then on the other, which goes first in turn."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import aiohttp

from proxy.bench.client import Sample, Way, body_of, send
from proxy.bench.scenarios import KNOWLEDGE_BASE, Ask, Plot, Script, Sizes, script

_TASK_TOKENS = 32
_APART = timedelta(seconds=7)
_FIRST = Sizes(system=40, document=0, memory=0, history=0, source=0, tools=0)


@dataclass(frozen=True, slots=True)
class Part:
    """One scenario as it is to be played."""

    name: str
    users: int
    turns: int
    output_tokens: int
    sizes: Sizes


@dataclass(slots=True)
class Played:
    """What has been measured so far; it is filled while the bench runs, so that a stop loses nothing."""

    samples: list[Sample] = field(default_factory=list)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)  # by scenario and way, waiting included


@dataclass(slots=True)
class _User:
    """One user on one way: the chat's script, and what it asks next."""

    script: Script
    next: Ask | None
    headers: dict[str, str]


class Player:
    """Plays parts on two ways and keeps what was measured."""

    def __init__(self, session: aiohttp.ClientSession, ways: Sequence[Way], model: str, run: str) -> None:
        self._session = session
        self._ways = ways
        self._model = model
        self._run = run
        self.played = Played()

    async def warm_up(self) -> None:
        """Tell a short chat on each way, so that no figure holds what a server does only once (compile, probe)."""
        first = Player(self._session, self._ways, self._model, f"first-{self._run}")
        await first.play(Part("clock", 1, 2, 4, _FIRST))

    async def play(self, part: Part, *, heard: Callable[[], None] = lambda: None) -> None:
        """Play one part; `heard` is called at every answer.  It ends early when a turn failed for all."""
        users = {way.name: [self._user(part, way, number) for number in range(part.users)] for way in self._ways}
        for turn in range(part.turns):
            for way in self._ways if turn % 2 == 0 else self._ways[::-1]:
                before, begun = len(self.played.samples), time.perf_counter()
                await asyncio.gather(*(self._turn(part, way, user, turn, heard) for user in users[way.name]))
                key = (part.name, way.name)
                self.played.seconds[key] = self.played.seconds.get(key, 0.0) + time.perf_counter() - begun
                if all(sample.failure for sample in self.played.samples[before:]):
                    return

    def _user(self, part: Part, way: Way, number: int) -> _User:
        name, chat = f"user-{number}", str(uuid.uuid4())
        # Equally long on both ways, and in front of everything: neither finds what the other has left in the cache.
        lead = f"You are the assistant of desk {self._run}-{way.name[:2]}-{part.name}."
        # No two users ask in the same second.
        now = datetime.now() + number * _APART
        plot = Plot(name, chat, lead, part.turns, part.sizes, now)
        begun = script(part.name, plot)
        return _User(begun, next(begun), {"X-OpenWebUI-User-Id": f"bench-{self._run}-{name}"})

    async def _turn(self, part: Part, way: Way, user: _User, turn: int, heard: Callable[[], None]) -> None:
        message = str(uuid.uuid4())
        while (ask := user.next) is not None and ask.turn == turn:
            limit = min(_TASK_TOKENS, part.output_tokens) if ask.task else part.output_tokens
            whole = part.name == KNOWLEDGE_BASE
            body = body_of(ask, way, self._model, max_tokens=limit, whole=whole)
            headers = user.headers | {"X-OpenWebUI-Chat-Id": ask.chat, "X-OpenWebUI-Task": ask.task}
            headers["X-OpenWebUI-Message-Id"] = "" if ask.task else message
            sample, text = await send(self._session, way, part.name, ask, body, headers)
            self.played.samples.append(sample)
            heard()
            try:
                user.next = user.script.send(text)
            except StopIteration:
                user.next = None
