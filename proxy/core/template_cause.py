"""Where a prompt departs from the last one and its reply, and which known fault of a template that is."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from proxy.core.request import Message
from proxy.core.template_cases import TOOL_NAME, TOOL_SAYS
from proxy.core.text import calls_of, same_arguments, text_of


class Cause(StrEnum):
    """Why a prefix is not kept."""

    THINKING_REMOVED = "thinking removed from history"
    DATE = "date in the template"
    DEFAULT_SYSTEM = "default system text"
    ARGUMENTS = "tool arguments re-serialised"
    EMPTY_THINK = "empty think block in the generation prompt"
    TOOLS = "tools not in the prompt head"
    SYSTEM_MOVED = "system message moved"
    TRIMMED = "white space of a reply stripped"
    LEFT_OUT = "a message left out"
    RETOKENISED = "text tokenised otherwise"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Step:
    """One turn and the next, rendered."""

    prompt: str
    without_generation: str  # the same messages without the generation prompt, "" if unknown
    reply: Message
    messages: tuple[Message, ...]  # of the prompt
    new: tuple[Message, ...]  # what the next turn adds after the reply
    later: str  # the next prompt
    tools: bool


@dataclass(frozen=True, slots=True)
class Break:
    """The first character of the next prompt that is not as it was, why, and what had been there."""

    at: int
    cause: Cause
    expected: str


def find_break(step: Step) -> Break | None:
    """Return where the next prompt is not this one and its reply, None if it is."""
    if not step.later.startswith(step.prompt):
        at = _common(step.prompt, step.later)
        return Break(at, _cause_in_prompt(step, at), step.prompt[at:])
    end = _after_text(step)
    if isinstance(end, Break):
        return end
    end = _after_calls(step, end)
    if isinstance(end, Break):
        return end
    for message in step.new:
        text = text_of(message).strip()
        if (at := step.later.find(text, end)) < 0:
            return Break(end, Cause.LEFT_OUT, text)
        end = at + len(text)
    return None


def _common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def thinking_of(message: Message) -> str:
    """Return the thinking of a reply, from its own field or from the front of its content."""
    for field in ("reasoning", "reasoning_content"):
        if isinstance(told := message.get(field), str):
            return told
    text = text_of(message).lstrip()
    inside, closed, _ = text.removeprefix("<think>").partition("</think>")
    return inside.strip("\n") if text.startswith("<think>") and closed else ""


def generated_text(reply: Message, prompt: str) -> str:
    """Return what the model wrote before its calls, with thinking as models of the `<think>` kind write it."""
    thinking, text = thinking_of(reply), text_of(reply)
    if thinking and not text.lstrip().startswith("<think>"):
        text = f"<think>\n{thinking}\n</think>\n\n{text}"
    # Some generation prompts end in the opening tag; what is generated then begins after it.
    opened = next((tag for tag in ("<think>\n", "<think>") if prompt.endswith(tag)), "")
    return text.removeprefix(opened)


def _after_text(step: Step) -> int | Break:
    """Return where the text of the reply ends in the next prompt."""
    begin = len(step.prompt)
    rest = step.later[begin:]
    generated = generated_text(step.reply, step.prompt)
    # The one space: tokenizers of the sentencepiece kind begin a reply with it, and leave it out of its text.
    for form in (generated, f" {generated}"):
        if rest.startswith(form):
            return begin + len(form)
    thinking = thinking_of(step.reply)
    content = text_of(step.reply).rpartition("</think>")[2].strip() if thinking else text_of(step.reply)
    # A model of another kind writes its thinking in its own form: where all of it stands, in order, it is kept.
    if thinking and (told := rest.find(thinking)) >= 0 and (at := rest.find(content, told + len(thinking))) >= 0:
        return begin + at + len(content)
    at = begin + _common(generated, rest)
    cause = Cause.UNKNOWN
    if thinking and thinking not in rest:
        cause = Cause.THINKING_REMOVED
    elif not thinking and "think" in rest[: rest.find(generated)] and generated in rest:
        cause = Cause.EMPTY_THINK
    elif generated.strip() and rest.lstrip().startswith(generated.strip()):
        cause = Cause.TRIMMED
    elif generated.strip() not in rest:
        cause = Cause.LEFT_OUT
    return Break(at, cause, generated[at - begin :])


def _after_calls(step: Step, end: int) -> int | Break:
    """Return where the calls of the reply end in the next prompt: each must stand there with its arguments' text."""
    for call in calls_of(step.reply):
        function = call.get("function")
        known: Mapping[str, object] = function if isinstance(function, dict) else {}
        arguments = str(known.get("arguments"))
        named = step.later.find(str(known.get("name")), end)
        if named < 0:
            return Break(end, Cause.LEFT_OUT, str(known.get("name")))
        if (at := step.later.find(arguments, named)) >= 0:
            end = at + len(arguments)
        elif (other := _other_spelling(step.later, named, arguments)) is not None:
            place, spelled = other
            same = _common(arguments, spelled)
            return Break(place + same, Cause.ARGUMENTS, arguments[same:])
        else:  # a form of its own, such as one tag for each argument: nothing here to compare it with
            end = named
    return end


def _other_spelling(text: str, begin: int, arguments: str) -> tuple[int, str] | None:
    """Find the arguments in another spelling: place and text, None if there is none."""
    value = json.loads(arguments)
    for spelled in (repr(value), json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)):
        if (at := text.find(spelled, begin)) >= 0:
            return at, spelled
    return next(
        ((at, raw) for at, raw in _objects(text, begin) if _sorted(raw) == _sorted(arguments)),
        None,
    )


def _sorted(raw: str) -> bytes:
    return same_arguments(json.dumps(json.loads(raw), sort_keys=True))


def _objects(text: str, begin: int) -> Iterator[tuple[int, str]]:
    """Yield place and text of each JSON object, also of those within others."""
    decoder = json.JSONDecoder()
    at = text.find("{", begin)
    while at >= 0:
        try:
            _, end = decoder.raw_decode(text, at)
        except ValueError:
            end = -1
        if end > 0:
            yield at, text[at:end]
        at = text.find("{", at + 1)


def _cause_in_prompt(step: Step, at: int) -> Cause:
    """Return why the next prompt is not even the prompt that was sent."""
    bare = step.without_generation
    if bare and at >= len(bare) and step.prompt.startswith(bare) and "think" in (opened := step.prompt[len(bare) :]):
        return Cause.EMPTY_THINK if "</think" in opened else Cause.THINKING_REMOVED
    thoughts = [thinking for message in step.messages if (thinking := thinking_of(message))]
    if any(thinking in step.prompt and thinking not in step.later for thinking in thoughts):
        return Cause.THINKING_REMOVED
    first_user = next((text_of(m) for m in step.messages if m.get("role") == "user"), "")
    user_at = step.later.find(first_user)
    if any(0 <= step.later.find(text_of(m)) < user_at for m in step.new if m.get("role") == "system"):
        return Cause.SYSTEM_MOVED
    if step.tools and _tools_moved(step, at):
        return Cause.TOOLS
    if step.prompt.count("<think>") > step.later[: len(step.prompt)].count("<think>"):
        return Cause.EMPTY_THINK
    if step.messages[0].get("role") != "system" and at <= max(step.prompt.find(first_user), user_at):
        return Cause.DEFAULT_SYSTEM
    if any(text_of(m).strip() not in step.later for m in step.messages):
        return Cause.LEFT_OUT
    return Cause.UNKNOWN


def _tools_moved(step: Step, at: int) -> bool:
    """Say whether the definitions stand elsewhere now, and that is what is seen first."""
    before, after = step.prompt.find(TOOL_SAYS), step.later.find(TOOL_SAYS)
    named = step.prompt.find(TOOL_NAME), step.later.find(TOOL_NAME)
    return (before != after or named[0] != named[1]) and at <= max(before, after, *named)
