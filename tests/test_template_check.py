"""A template is checked by what it makes of growing conversations: each known fault, by construction."""

import pytest

from proxy.chat_template import LATER, FileRenderer
from proxy.core.template_cases import CASES, PROBES, Ask
from proxy.core.template_cause import Cause
from proxy.core.template_check import (
    Refused,
    Rendered,
    Rendering,
    Traits,
    Verdict,
    asks_of,
    checked,
    common_prefix,
    judge,
    judge_all,
    judge_clock,
    judge_date,
    reusable_tokens,
    stable,
    traits_of,
)
from tests.toy_templates import FAULTS, STEADY, toy

ALL = Traits(tools=True, thinking=True, switch=True)


def rendered(text: str) -> tuple[Rendered, Traits]:
    """Render what a template has to show."""
    renderer = FileRenderer.of(text, {})
    traits = traits_of({name: renderer.render(ask) for name, ask in PROBES.items()})
    return {key: renderer.render(ask) for key, ask in asks_of(traits).items()}, traits


def verdicts_of(text: str) -> dict[str, Verdict]:
    """Check a template as the command does, today and on another day."""
    now, traits = rendered(text)
    later = FileRenderer.of(text, {}, clock=LATER)
    clock = judge_clock(now, {key: later.render(ask) for key, ask in asks_of(traits).items()})
    return {each.case: each for each in [*judge_all(now, traits), clock]}


def test_a_template_that_renders_what_it_is_told_is_stable() -> None:
    """Nothing that counts breaks, and nothing is refused."""
    found = verdicts_of(STEADY)
    assert {name: each.outcome for name, each in found.items() if each.outcome != "stable"} == {
        "compact arguments": "unstable",
        "thinking off": "skipped",
        "loop, thinking off": "skipped",
    }
    assert stable(list(found.values())) and checked(list(found.values()))


def test_arguments_that_vllm_itself_spells_anew_are_told_and_not_counted() -> None:
    """vLLM parses arguments before a template sees them, so none can keep their spelling."""
    found = verdicts_of(STEADY)["compact arguments"]
    assert (found.cause, found.counted, found.turn) == (Cause.ARGUMENTS, False, 1)
    assert found.expected.startswith('"Bern"') and found.found.startswith(' "Bern"')


@pytest.mark.parametrize("name", FAULTS)
def test_each_known_fault_is_found_where_it_is(name: str) -> None:
    """Case, turn, cause, and the text on both sides of the break are those that the toy was made for."""
    text, cause, case, turn, expected, found = FAULTS[name]
    verdict = verdicts_of(text)[case]
    assert (verdict.outcome, verdict.cause, verdict.turn) == ("unstable", cause, turn)
    assert verdict.expected.startswith(expected) and verdict.found.startswith(found)
    assert not stable(list(verdicts_of(text).values()))


@pytest.mark.parametrize("name", FAULTS)
def test_the_position_is_that_of_the_first_character_that_differs(name: str) -> None:
    """Up to it the next prompt is the last one and its reply."""
    text, _, case, turn, _, found = FAULTS[name]
    position = verdicts_of(text)[case].position
    if case == "clock":
        return
    later = rendered(text)[0][case, turn, "prompt"]
    assert isinstance(later, Rendering) and position is not None
    assert later.text[position:].startswith(found)


def test_the_token_prefix_counts_and_not_that_of_the_messages() -> None:
    """
    The messages of the second turn begin with those of the first; its tokens do for 5, of which whole blocks are 4.
    """
    first_messages = ["S", "Q1"]
    second_messages = ["S", "Q1", "A1", "Q2"]
    first = ["<sys>", "S", "<u>", "Q1", "<as>", "<think>", "</think>"]
    second = ["<sys>", "S", "<u>", "Q1", "<as>", "A1", "<u>", "Q2", "<as>", "<think>", "</think>"]
    ids = {word: number for number, word in enumerate(dict.fromkeys(first + second))}
    one, other = [ids[word] for word in first], [ids[word] for word in second]
    assert second_messages[: len(first_messages)] == first_messages
    assert common_prefix(one, other) == 5
    assert reusable_tokens(one, other, block_size=2) == 4


def test_with_tokens_the_position_is_that_of_the_token() -> None:
    """Here each character is a token of its own but for the first two."""
    text = toy(opened="{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}")
    plain, traits = rendered(text)
    case = next(each for each in CASES if each.name == "thinking off")
    by_characters = judge(case, plain, traits)
    tokens = {key: tokenised(each.text) for key, each in plain.items() if isinstance(each, Rendering)}
    by_tokens = judge(case, tokens, traits)
    assert by_characters.position is not None
    assert by_tokens.position == by_characters.position - 1
    assert by_tokens.cause == Cause.EMPTY_THINK


def tokenised(text: str) -> Rendering:
    """Return a rendering whose first token has two characters and each other one."""
    pieces = [text[:2], *text[2:]]
    starts = [0, *range(2, len(text))]
    return Rendering(text, tuple(map(hash, pieces)), tuple(starts))


def test_text_that_is_tokenised_otherwise_is_a_break() -> None:
    """The same characters in other tokens are other blocks."""
    plain, traits = rendered(STEADY)
    case = CASES[0]
    made = {key: tokenised(each.text) for key, each in plain.items() if isinstance(each, Rendering)}
    assert judge(case, made, traits).outcome == "stable"
    last = made["plain", 2, "prompt"]
    merged = Rendering(last.text, (1, *last.tokens[2:]), (0, *last.starts[2:]))
    verdict = judge(case, {**made, ("plain", 2, "prompt"): merged}, traits)
    assert (verdict.cause, verdict.turn, verdict.position) == (Cause.RETOKENISED, 2, 0)


def test_what_a_template_refuses_is_said_in_its_words_and_is_no_break() -> None:
    """Gemma takes no system message: the client gets a 400, and no prefix is lost."""
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    found = verdicts_of(refuses + STEADY)
    assert (found["system"].outcome, found["system"].why) == ("refused", "System role not supported")
    assert stable(list(found.values())) and checked(list(found.values()))


def test_a_template_that_refuses_a_plain_chat_is_not_checked() -> None:
    """Nothing is known of it then."""
    assert not checked(list(verdicts_of("{{ raise_exception('no') }}").values()))


@pytest.mark.parametrize(
    ("text", "traits"),
    [
        (STEADY, Traits(tools=True, thinking=True, switch=False)),
        (toy(head="", think=""), Traits(tools=False, thinking=False, switch=False)),
        (toy(think="", opened="<think>\n"), Traits(tools=True, thinking=True, switch=False)),
        (FAULTS["an empty think block that history lacks"][0], ALL),
    ],
)
def test_what_a_template_knows_decides_what_it_is_asked(text: str, traits: Traits) -> None:
    """A model without thinking loses none; one without tools is not blamed for them."""
    assert rendered(text)[1] == traits


def test_a_form_of_its_own_is_not_blamed() -> None:
    """Thinking in other tags, and arguments as one tag each, stand in history as they are generated."""
    own = toy(
        think="{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}",
        arguments="{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}",
    )
    found = verdicts_of(own)
    assert found["thinking"].outcome == found["thinking loop"].outcome == "stable"


def test_the_space_that_a_reply_begins_with_is_part_of_its_form() -> None:
    """Mistral's templates put it there, its models generate it, and it is not in the text that clients get."""
    spaced = STEADY.replace("{{ m.content }}", "{{ ' ' if m.role == 'assistant' else '' }}{{ m.content }}")
    assert verdicts_of(spaced)["plain"].outcome == "stable"


def test_todays_date_is_found_unless_a_message_holds_it() -> None:
    """A server's clock cannot be set, so its prompt is searched; a date that a client told is the client's."""
    prompt = Rendering("<sys>Today: 03 Feb 2026<user>Hi")
    found = judge_date([(prompt, [{"role": "user", "content": "Hi"}])], ("2026-02-03", "03 Feb 2026"))
    assert (found.cause, found.turn, found.position) == (Cause.DATE, 1, 12)
    told = [{"role": "user", "content": "Hi on 03 Feb 2026"}]
    assert judge_date([(prompt, told)], ("03 Feb 2026",)).outcome == "stable"
    assert judge_date([(Refused("no"), told)], ("03 Feb 2026",)).outcome == "skipped"


def test_every_case_grows_by_appending() -> None:
    """Each turn's messages begin with those of the turn before, so that a break is the template's."""
    for case in CASES:
        for one, other in zip(case.turns, case.turns[1:], strict=False):
            kept = one.messages[:-1] if one.continues else one.messages
            assert other.messages[: len(kept)] == kept, case.name


def test_the_asks_of_a_case_are_those_that_it_is_judged_by() -> None:
    """Nothing is rendered for a case that a template knows nothing of."""
    nothing = asks_of(Traits(tools=False, thinking=False, switch=False))
    assert {case for case, _, _ in nothing} == {each.name for each in CASES if not each.needs}
    assert all(isinstance(ask, Ask) and ask.messages for ask in asks_of(ALL).values())
