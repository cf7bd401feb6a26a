"""Token counts of the parts of a prompt: what is known, and what must be asked.

A chat template renders message after message, so counts add up at the borders between turns: what a stretch of messages
costs is the difference of two small prompts, never the whole one.  Only the shell can ask vLLM; the core says what.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proxy.core.request import Message
from proxy.core.text import digest, message_digest, packed

_X: Message = {"role": "user", "content": "x"}
_Y: Message = {"role": "assistant", "content": "y"}
TEMPLATE_FIELDS = ("chat_template_kwargs", "tools", "tool_choice")
"""Fields of a request, beside its messages, that the template renders."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt whose tokens must be counted.  `rest`: tools and template fields; `generation`: with its prompt."""

    key: bytes
    messages: tuple[Message, ...]
    rest: Mapping[str, object]
    generation: bool


class Uncounted(Exception):
    """A step cannot decide before these are counted.  No failure: the shell counts and runs the pipeline again."""

    def __init__(self, questions: Sequence[Question]) -> None:
        super().__init__(f"{len(questions)} prompts to count")
        self.questions = tuple(questions)


@dataclass(slots=True)
class Counter:
    """What is known of a request's token counts; collects what is not.  `rough` counts are sure upper bounds only."""

    known: Mapping[bytes, int]
    rough: frozenset[bytes] = frozenset()
    missing: dict[bytes, Question] = field(default_factory=dict)
    _prints: dict[int, tuple[Message, bytes]] = field(default_factory=dict)

    def prompt(
        self, messages: Sequence[Message], rest: Mapping[str, object] | None = None, *, generation: bool = False
    ) -> int | None:
        """Return the tokens of a whole prompt, None (and remembered as missing) where nobody counted them yet."""
        return self.known.get(self._key(messages, rest or {}, generation))

    def _key(self, messages: Sequence[Message], rest: Mapping[str, object], generation: bool) -> bytes:
        fields = {name: rest[name] for name in TEMPLATE_FIELDS if rest.get(name) is not None}
        key = digest(packed(fields), b"%d" % generation, *map(self._print, messages))
        if key not in self.known:
            self.missing[key] = Question(key, tuple(messages), fields, generation)
        return key

    def _print(self, message: Message) -> bytes:
        """Return a message's digest, made once however many prompts it is in: it may be megabytes long."""
        known = self._prints.get(id(message))
        if known is None:
            known = self._prints[id(message)] = message, message_digest(message)  # held, so that its id stays its own
        return known[1]

    def stretch(self, messages: Sequence[Message], before: Sequence[Message] = ()) -> int | None:
        """Return what `messages` add to a prompt; `before` is the turn that they go on with, if they begin in one."""
        if not messages:
            return 0
        first = messages[0].get("role")
        context: Sequence[Message] = (_X,) if first == "assistant" else (*before,) if first == "tool" else (_X, _Y)
        context = context or (_X, _Y)
        return self._less(self._key([*context, *messages], {}, False), self._key(context, {}, False))

    def _less(self, whole: bytes, part: bytes) -> int | None:
        """Return a difference that is never too low: a rough part is only taken from a rough whole."""
        if whole not in self.known or part not in self.known:
            return None
        taken = 0 if part in self.rough and whole not in self.rough else self.known[part]
        return max(self.known[whole] - taken, 0)

    def base(self, head: Sequence[Message], rest: Mapping[str, object]) -> int | None:
        """Return what stands around the messages: the head, the tools, the generation prompt."""
        whole, two = self._key([*head, _X], rest, True), self._key((_X, _Y, _X), {}, False)
        one = self._key((_X, _Y), {}, False)
        if not {whole, two, one} <= self.known.keys():
            return None
        # `_X` alone costs what the second one adds.
        taken = 0 if {two, one} & self.rough else self.known[two] - self.known[one]
        return max(self.known[whole] - taken, 0)

    def settle(self) -> None:
        """Raise Uncounted if anything that was asked for is missing."""
        if self.missing:
            raise Uncounted(tuple(self.missing.values()))
