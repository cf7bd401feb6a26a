"""The last prompts of each chat as they went up, for a minute: what a task can be hung on."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from proxy.core.counting import TEMPLATE_FIELDS
from proxy.core.draft import ChatPrompt
from proxy.core.request import ChatRequest, Message
from proxy.core.text import length_of
from proxy.store.sessions import SessionKey

KEPT_SECONDS = 60.0
"""vLLM has most likely kept the prompt for so long; Open WebUI asks for tasks within a second of the answer."""

RUNNING_SECONDS = 600.0
"""An answer that takes longer is of no use to a task any more."""

BRANCHES = 4
MOST_BYTES = 64 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Held:
    """One prompt with its answer so far, and until when it is kept (monotonic seconds)."""

    key: SessionKey
    prompt: ChatPrompt
    until: float
    size: int


class Chats:
    """Prompts by session, at most four branches each, all within 64 MiB; the oldest go first."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._held: OrderedDict[int, Held] = OrderedDict()
        self._by_key: dict[SessionKey, list[Held]] = {}
        self._bytes = 0

    def begin(self, key: SessionKey, request: ChatRequest, tokens: int) -> Held:
        """Keep a prompt that goes up now; `tokens` is what is known of its length."""
        rest = {name: request.rest[name] for name in TEMPLATE_FIELDS if request.rest.get(name) is not None}
        held = Held(key, ChatPrompt(request.messages, None, rest, tokens), self._clock() + RUNNING_SECONDS, 0)
        held.size = 4 * length_of(request.messages) + 512 * len(request.messages)
        self._held[id(held)] = held
        self._bytes += held.size
        branches = self._by_key.setdefault(key, [])
        branches.append(held)
        for old in branches[:-BRANCHES]:
            self.drop(old)
        self._shed()
        return held

    def end(self, held: Held, reply: Message | None, tokens: int | None) -> None:
        """Note how the answer ended: what was said, and vLLM's count of prompt and answer; unsaid, it is forgotten."""
        if tokens is None or reply is None:
            self.drop(held)
            return
        held.prompt = replace(held.prompt, reply=reply, tokens=tokens)
        held.until = self._clock() + KEPT_SECONDS

    def of(self, key: SessionKey) -> tuple[ChatPrompt, ...]:
        """Return what is kept of a session, newest first."""
        now = self._clock()
        return tuple(held.prompt for held in reversed(self._by_key.get(key, ())) if held.until > now)

    def drop(self, held: Held) -> None:
        """Forget one."""
        if self._held.pop(id(held), None) is None:
            return
        self._bytes -= held.size
        branches = self._by_key[held.key]
        branches.remove(held)
        if not branches:
            del self._by_key[held.key]

    def _shed(self) -> None:
        now = self._clock()
        while self._held:
            oldest = next(iter(self._held.values()))
            if self._bytes <= MOST_BYTES and oldest.until > now:
                return
            self.drop(oldest)
