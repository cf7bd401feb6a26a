"""What a stretch of messages adds to a prompt: the difference of two small prompts, asked once each."""

import pytest

from proxy.core.counting import Counter, Uncounted
from proxy.core.request import Message
from tests.trimming import counted

HEAD: Message = {"role": "system", "content": "you help"}
USER: Message = {"role": "user", "content": "one two three"}
REPLY: Message = {"role": "assistant", "content": "four five"}
RESULT: Message = {"role": "tool", "tool_call_id": "1", "content": "six"}


def settled(counter: Counter, *, over: int = 0) -> Counter:
    """Return a counter whose questions are answered, each with so many tokens too many."""
    answers = {key: counted(question) + over for key, question in counter.missing.items()}
    return Counter({**counter.known, **answers}, frozenset(answers) if over else frozenset())


def test_a_stretch_costs_what_it_adds() -> None:
    """4 a message and 1 a word; nothing of what stands around it."""
    counter = Counter({})
    assert counter.stretch([USER, REPLY, USER]) is None
    assert settled(counter).stretch([USER, REPLY, USER]) == 7 + 6 + 7


@pytest.mark.parametrize("stretch", [[REPLY, USER], [USER], [HEAD, USER], [RESULT, REPLY]])
def test_what_is_asked_are_prompts_that_templates_take(stretch: list[Message]) -> None:
    """They begin with a user's message, and replies follow one."""
    counter = Counter({})
    counter.stretch(stretch, (USER, {**REPLY, "tool_calls": []}))
    for question in counter.missing.values():
        roles = [message["role"] for message in question.messages]
        assert roles[0] == "user"
        assert all(roles[i - 1] in ("user", "system", "tool") for i, r in enumerate(roles) if r == "assistant")
    assert settled(counter).stretch(stretch, (USER, {**REPLY, "tool_calls": []})) == counted_alone(stretch)


def counted_alone(stretch: list[Message]) -> int:
    """Count 4 a message and 1 a word."""
    return sum(4 + len(str(message["content"]).split()) for message in stretch)


def test_the_base_is_what_stands_around_the_messages() -> None:
    """Head, tools, generation prompt."""
    counter = Counter({})
    assert counter.base([HEAD], {"tools": [{}, {}], "temperature": 0}) is None
    assert settled(counter).base([HEAD], {"tools": [{}, {}], "temperature": 1}) == 6 + 20 + 3


def test_nothing_is_asked_for_nothing_and_nothing_twice() -> None:
    """An empty stretch is free; the same context is one question."""
    counter = Counter({})
    assert counter.stretch([]) == 0
    counter.stretch([USER])
    counter.stretch([USER, REPLY])
    assert len(counter.missing) == 3


def test_what_is_open_is_raised_at_once_and_together() -> None:
    """The shell asks for all of it at the same time."""
    counter = Counter({})
    counter.stretch([USER])
    with pytest.raises(Uncounted) as open_questions:
        counter.settle()
    assert len(open_questions.value.questions) == 2
    settled(counter).settle()


def test_tools_and_template_fields_make_another_question_and_others_do_not() -> None:
    """What the template does not render does not count."""
    counter = Counter({})
    counter.prompt([USER], {"temperature": 1})
    counter.prompt([USER], {"temperature": 2, "tools": None})
    assert len(counter.missing) == 1
    counter.prompt([USER], {"tools": [{}]})
    counter.prompt([USER], {"chat_template_kwargs": {"enable_thinking": False}})
    counter.prompt([USER], generation=True)
    assert len(counter.missing) == 4


def test_a_bound_is_never_taken_from_an_exact_count() -> None:
    """vLLM counted the whole and then failed: the difference would be too low."""
    first = Counter({})
    first.stretch([USER])
    whole, part = sorted(first.missing.values(), key=lambda question: -len(question.messages))
    mixed = Counter({whole.key: counted(whole), part.key: counted(part) + 200}, frozenset({part.key}))
    assert mixed.stretch([USER]) == counted(whole)
    rough = settled(first, over=100)
    assert rough.stretch([USER]) == 7
