"""Which requests share one run of vLLM, and which takes the place of another: decided on values, without waiting."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from proxy.core.identity import Identity
from proxy.core.request import ChatRequest, Message

HARMLESS = frozenset({"user", "metadata"})
"""The only fields that may differ: vLLM reads neither, and SDKs write trace ids into them.  All others count, known to
us or not; `stream_options` too, since sharers get the same bytes and one that asked for usage must find it."""

AUTOCOMPLETE = "autocomplete_generation"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as far as sharing goes: `key` is the caller's name, `again` says that an SDK repeats itself."""

    who: Identity
    key: str
    model: str
    route: str
    request: ChatRequest
    idempotency: str | None = None
    again: bool = False

    @property
    def family(self) -> Hashable:
        """What must be equal before anything else is looked at; cheap, where the body may hold megabytes."""
        who = self.who
        return (who.tenant, self.key, self.model, self.route, who.chat, who.message, who.task)

    @property
    def named_chat(self) -> bool:
        """Whether this is a chat request of a conversation that somebody entitled has named."""
        return self.who.task is None and self.who.explicit and self.who.chat is not None


def joins(new: Ask, old: Ask) -> bool:
    """Say whether `new` may share the run of `old`: one proven tenant, one question, and one answer that was wanted.

    Two equal questions are two answers (the same model picked twice) unless the message id or the Idempotency-Key says
    that they are one, the answer is determined anyway, it is a task, or an SDK says that it repeats itself.
    """
    if not new.who.proven or not old.who.proven or new.family != old.family or new.idempotency != old.idempotency:
        return False
    one = new.who.task is not None or new.who.message is not None or new.idempotency is not None or new.again
    return (one or determined(new.request)) and same_request(new.request, old.request)


def determined(request: ChatRequest) -> bool:
    """Say whether the answer can only be one: temperature 0 or a seed, one choice.  Absent or null is not 0."""
    temperature, seed, n = (request.rest.get(name) for name in ("temperature", "seed", "n"))
    if n is not None and (isinstance(n, bool) or n != 1):
        return False
    return (_is_number(temperature) and temperature == 0) or (isinstance(seed, int) and not isinstance(seed, bool))


def extends(new: Ask, old: Ask) -> bool:
    """Say whether `new` is `old` with more text of the user, all else equal: it may take its place.

    More text is further user messages at the end, or the newest one continued after white space.  Only in a chat that
    was named, of one proven tenant, and never between different message ids: those are answers that a user asked for.
    """
    if not (new.who.proven and new.named_chat and old.named_chat and new.family == old.family):
        return False
    mine, other = new.request, old.request
    if not _same_rest(mine.rest, other.rest) or mine.rest.get("n") not in (None, 1):
        return False
    size = len(other.messages)
    if not size or len(mine.messages) < size or not _same_all(mine.messages[: size - 1], other.messages[: size - 1]):
        return False
    last, added = mine.messages[size - 1], mine.messages[size:]
    if any(message.get("role") != "user" for message in (other.messages[-1], *added)):
        return False
    return _continues(last, other.messages[-1]) or (bool(added) and equal(last, other.messages[-1]))


def _continues(new: Message, old: Message) -> bool:
    text, begun = new.get("content"), old.get("content")
    if not (isinstance(text, str) and isinstance(begun, str)) or not equal({**new, "content": begun}, dict(old)):
        return False
    return len(text) > len(begun) and text.startswith(begun) and text[len(begun)].isspace()


def same_request(new: ChatRequest, old: ChatRequest) -> bool:
    """Say whether two requests differ in nothing but `HARMLESS` fields and the order of fields."""
    return (
        len(new.messages) == len(old.messages)
        and _same_rest(new.rest, old.rest)
        # The newest message differs first, and what stands before it may be long.
        and _same_all(new.messages[::-1], old.messages[::-1])
    )


def _same_rest(new: Mapping[str, object], old: Mapping[str, object]) -> bool:
    names = new.keys() - HARMLESS
    return names == old.keys() - HARMLESS and all(equal(new[name], old[name]) for name in names)


def _same_all(new: tuple[Message, ...], old: tuple[Message, ...]) -> bool:
    return all(equal(mine, other) for mine, other in zip(new, old, strict=True))


def equal(a: object, b: object) -> bool:
    """Compare two JSON values: 0 is 0.0, but true is not 1, and fields within objects keep their order.

    Templates write schemas into the prompt in the order in which they came, so that another order is another prompt.
    """
    if isinstance(a, dict):
        same_names = isinstance(b, dict) and list(a) == list(b)
        return same_names and all(map(equal, a.values(), b.values() if isinstance(b, dict) else ()))
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    if _is_number(a):
        return _is_number(b) and a == b
    return type(a) is type(b) and a == b


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


M = TypeVar("M")  # a member: any value with an identity


@dataclass(eq=False)
class Group(Generic[M]):
    """Those who share one run.  `waiting`: nothing went up yet; `spoken`: something of the answer went out."""

    ask: Ask
    waiting: bool = True
    spoken: bool = False
    members: dict[M, None] = field(default_factory=dict)  # in the order in which they came

    @property
    def whole(self) -> bool:
        """Whether a newcomer can still get all of it from its start."""
        return True


G = TypeVar("G", bound="Group[Any]")


class Table(Generic[G, M]):
    """All groups whose run has not ended, and where each member is.  Nothing here waits."""

    def __init__(self) -> None:
        self._families: dict[Hashable, dict[G, None]] = {}
        self._of: dict[M, G] = {}

    def __len__(self) -> int:
        return sum(len(family) for family in self._families.values())

    def __iter__(self) -> Iterator[G]:
        return (group for family in self._families.values() for group in family)

    @property
    def members(self) -> int:
        """How many members there are in all groups."""
        return len(self._of)

    def find(self, ask: Ask) -> G | None:
        """Return the group that `ask` joins."""
        family = self._families.get(ask.family, {})
        return next((group for group in family if group.whole and joins(ask, group.ask)), None)

    def overtaken(self, ask: Ask, may: Callable[[G], bool]) -> list[G]:
        """Return the groups whose place `ask` takes, of those that `may` be taken: silent ones only."""
        family = self._families.get(ask.family, {}) if ask.named_chat else {}
        return [group for group in family if not group.spoken and may(group) and extends(ask, group.ask)]

    def add(self, group: G) -> None:
        """Let others find a new group."""
        self._families.setdefault(group.ask.family, {})[group] = None

    def board(self, group: G, member: M) -> None:
        """Make `member` one of `group`."""
        assert member not in self._of
        group.members[member] = None
        self._of[member] = group

    def group_of(self, member: M) -> G | None:
        """Return where a member is, None if nowhere (any more)."""
        return self._of.get(member)

    def leave(self, member: M) -> G | None:
        """Take a member out; return its group if that was the last one: its run must end."""
        group = self._of.pop(member, None)
        if group is None:
            return None
        del group.members[member]
        if group.members:
            return None
        return group if self.close(group) else None

    def move(self, old: G, new: G) -> list[M]:
        """Make all members of `old` members of `new`, and close `old`, whose run must end; return who moved."""
        moved: list[M] = list(old.members)
        old.members.clear()
        for member in moved:
            new.members[member] = None
            self._of[member] = new
        self.close(old)
        return moved

    def close(self, group: G) -> bool:
        """Let nobody join any more: its run has ended, or must; say whether it was open.  Its members stay."""
        family = self._families.get(group.ask.family, {})
        if group not in family:
            return False
        del family[group]
        if not family:
            del self._families[group.ask.family]
        return True
