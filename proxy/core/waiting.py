"""How long tasks wait for their chat's answer, and autocompletions for the next key press: rules over times.

Times are seconds of any one clock that never goes back.
"""

from dataclasses import dataclass

from proxy.core.coalesce import AUTOCOMPLETE
from proxy.core.identity import Identity

HELD = frozenset({"title_generation", "tags_generation", "follow_up_generation", "emoji_generation"})
"""Tasks that nobody waits for.  What is acted on before the answer (queries, tools, merges) never waits for it."""
FIRST = "title_generation"
"""The one task that Open WebUI sends before the chat request that it is about."""
MOST_TYPING = 4096
"""Tenants whose last autocompletion is remembered."""
MOST_WINDOWS = 8
"""So many merge windows a request waits at most, however many pieces follow."""


@dataclass(slots=True)
class Chat:
    """What is known of one chat's answers."""

    running: int = 0
    ended: bool = False  # one has ended
    ended_at: float = float("-inf")  # the last one
    more_until: float = 0.0  # the last one called tools: until then the next round is expected


def waits_until(chat: Chat | None, task: str, arrived: float, now: float, *, hold: float, head: float) -> float | None:
    """Return until when a task waits for news of its chat, None if it goes now.

    While an answer runs, `hold` seconds from its arrival; a title whose chat was not answered within the last `hold`
    seconds waits `head` seconds for it to begin; between the rounds of a tool loop until the next one is overdue.
    """
    limit = arrived + hold
    if now >= limit:
        return None
    if chat is not None and chat.running:
        return limit
    fresh = chat is not None and chat.ended and chat.ended_at >= arrived - hold
    begins = arrived + head if task == FIRST and not fresh else 0.0
    expected = max(begins, chat.more_until if chat is not None and chat.ended else 0.0)
    return min(expected, limit) if now < expected else None


def is_held(who: Identity) -> bool:
    """Say whether a request is a task that waits for its chat."""
    return who.task in HELD and who.explicit and who.chat is not None


@dataclass(slots=True)
class Typing:
    """When a tenant last asked for an autocompletion."""

    last: float = float("-inf")

    def begins(self, now: float, window: float) -> float:
        """Note one more; return when it goes: the first at once, followers when the keys were still for `window`."""
        quiet, self.last = now - self.last >= window, now
        return now if quiet or window <= 0 else now + window


def is_typing(who: Identity) -> bool:
    """Say whether a request is an autocompletion of a known user."""
    return who.proven and who.task == AUTOCOMPLETE
