"""Is a turn's prompt plus its reply a prefix of the next turn's prompt?  Pure: it judges renderings that others got.

vLLM's cache holds the tokens of the prompt and of what was generated.  A template that renders history in another way
than it was generated, or a head that changes, makes them worthless.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from proxy.core.request import Message
from proxy.core.template_cases import CASES, PROBED_THOUGHTS, TOOL_NAME, Ask, Case, Key, Turn
from proxy.core.template_cause import Break, Cause, Step, find_break
from proxy.core.text import text_of

Outcome = Literal["stable", "unstable", "refused", "skipped"]
_SHOWN_CHARACTERS = 48


@dataclass(frozen=True, slots=True)
class Rendering:
    """A prompt as text, and where a tokenizer was there as tokens; `starts` are their offsets in characters."""

    text: str
    tokens: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    def token_at(self, character: int) -> int:
        """Return the index of the token in which a character stands."""
        return max(0, bisect_right(self.starts, character) - 1)


@dataclass(frozen=True, slots=True)
class Refused:
    """A template, or vLLM, would not render this; `why` in its words."""

    why: str


Rendered = Mapping[Key, Rendering | Refused]


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template knows: shows tools, shows thinking or asks for it, has a switch for it."""

    tools: bool
    thinking: bool
    switch: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one case showed.  `turn` counts from 1: the one whose prompt and reply are not kept by the next."""

    case: str
    says: str
    outcome: Outcome
    counted: bool = True
    why: str = ""  # refused or skipped: in a sentence
    turn: int | None = None
    position: int | None = None  # of the first token, else character, that differs
    cause: Cause | None = None
    expected: str = ""  # what stood, or was generated, from there on
    found: str = ""  # what the next prompt has there


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many leading items (tokens, characters) two sequences share."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def reusable_tokens(sent: Sequence[int], next_prompt: Sequence[int], *, block_size: int) -> int:
    """Return how many tokens of `next_prompt` vLLM can take from its cache after `sent`: an estimate, whole blocks."""
    return common_prefix(sent, next_prompt) // block_size * block_size


def traits_of(probes: Mapping[str, Rendering | Refused]) -> Traits:
    """Say what a template knows, from the renderings of PROBES."""
    texts = {name: each.text if isinstance(each, Rendering) else "" for name, each in probes.items()}
    switch = bool(texts["on"] and texts["off"]) and texts["on"] != texts["off"]
    shown = PROBED_THOUGHTS[0] in texts["thought"] or PROBED_THOUGHTS[1] in texts["thought in a loop"]
    return Traits(
        tools=TOOL_NAME in texts["tools"],
        thinking=shown or switch or any("<think" in texts[name] for name in ("bare", "on", "off")),
        switch=switch,
    )


_LACKS = {
    "tools": "the template shows no tools",
    "thinking": "the template knows no thinking",
    "switch": "the template has no switch for thinking",
}
_NOTHING = "nothing was rendered"


def judge(case: Case, rendered: Rendered, traits: Traits) -> Verdict:
    """Say whether the case keeps its prefix; `rendered` holds what `case.asks()` names."""
    for need in case.needs:
        if not getattr(traits, need):
            return Verdict(case.name, case.says, "skipped", case.counted, _LACKS[need])
    for number in range(len(case.turns)):
        prompt = rendered[case.name, number, "prompt"]
        if isinstance(prompt, Refused):
            return Verdict(case.name, case.says, "refused", case.counted, prompt.why, turn=number + 1)
    for number, turn in enumerate(case.turns[:-1]):
        if (verdict := _judge_turn(case, number, turn, rendered)) is not None:
            return verdict
    return Verdict(case.name, case.says, "stable", case.counted)


def _judge_turn(case: Case, number: int, turn: Turn, rendered: Rendered) -> Verdict | None:
    now = rendered[case.name, number, "prompt"]
    later = rendered[case.name, number + 1, "prompt"]
    bare = rendered[case.name, number, "open"]
    assert isinstance(now, Rendering) and isinstance(later, Rendering)  # `judge` has looked
    following = case.turns[number + 1]
    step = Step(
        prompt=now.text,
        without_generation=bare.text if isinstance(bare, Rendering) and not turn.continues else "",
        reply=turn.reply,
        messages=turn.messages,
        new=() if following.continues else following.messages[len(turn.messages) + (not turn.continues) :],
        later=later.text,
        tools=case.tools,
    )
    found = find_break(step)
    if found is None:
        return _retokenised(case, number, now, later)
    return _unstable(case, number, found, later)


def _unstable(case: Case, number: int, found: Break, later: Rendering) -> Verdict:
    return Verdict(
        case.name,
        case.says,
        "unstable",
        case.counted,
        turn=number + 1,
        position=later.token_at(found.at) if later.tokens else found.at,
        cause=found.cause,
        expected=found.expected[:_SHOWN_CHARACTERS],
        found=later.text[found.at :][:_SHOWN_CHARACTERS],
    )


def _retokenised(case: Case, number: int, now: Rendering, later: Rendering) -> Verdict | None:
    """Return a verdict where the text goes on as it was, and the tokens of the prompt do not."""
    at = common_prefix(now.tokens, later.tokens)
    if at == len(now.tokens):
        return None
    begins = later.starts[at] if at < len(later.starts) else len(later.text)
    found = Break(begins, Cause.RETOKENISED, now.text[begins:])
    return _unstable(case, number, found, later)


def asks_of(traits: Traits) -> Mapping[Key, Ask]:
    """Return what has to be rendered of a template with these traits."""
    cases = [case for case in CASES if all(getattr(traits, need) for need in case.needs)]
    return dict(chain.from_iterable(case.asks() for case in cases))


def judge_all(rendered: Rendered, traits: Traits) -> list[Verdict]:
    """Judge every case."""
    return [judge(case, rendered, traits) for case in CASES]


def judge_clock(now: Rendered, later: Rendered) -> Verdict:
    """Say whether the same prompts come out on another day: for a template file, whose clock one can set."""
    says = "the same prompts on another day"
    for key, one in now.items():
        other = later[key]
        if isinstance(one, Rendering) and isinstance(other, Rendering) and one.text != other.text:
            at = common_prefix(one.text, other.text)
            return _unstable(Case("clock", says, ()), key[1], Break(at, Cause.DATE, one.text[at:]), other)
    if not any(isinstance(each, Rendering) for each in now.values()):
        return Verdict("clock", says, "skipped", why=_NOTHING)
    return Verdict("clock", says, "stable")


def judge_date(prompts: Sequence[tuple[Rendering | Refused, Sequence[Message]]], spellings: Sequence[str]) -> Verdict:
    """Say whether today's date stands in a prompt and in none of its messages: for a server, whose clock is its own."""
    says = "today's date in a prompt"
    for prompt, messages in prompts:
        told = "\n".join(text_of(message) for message in messages)
        for spelling in spellings:
            if isinstance(prompt, Rendering) and spelling not in told and (at := prompt.text.find(spelling)) >= 0:
                return _unstable(Case("clock", says, ()), 0, Break(at, Cause.DATE, ""), prompt)
    if not any(isinstance(prompt, Rendering) for prompt, _ in prompts):
        return Verdict("clock", says, "skipped", why=_NOTHING)
    return Verdict("clock", says, "stable")


def stable(verdicts: Sequence[Verdict]) -> bool:
    """Say whether nothing that counts is unstable."""
    return not any(each.outcome == "unstable" and each.counted for each in verdicts)


def checked(verdicts: Sequence[Verdict]) -> bool:
    """Say whether the plain chat could be judged: without it nothing is known of a template."""
    return any(each.case == "plain" and each.outcome in ("stable", "unstable") for each in verdicts)
