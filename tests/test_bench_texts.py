"""The bench's texts: the same for the same seed, about as long as wanted."""

import json

import pytest

from proxy.bench.texts import prose, question, tool_list


@pytest.mark.parametrize("tokens", [10, 300, 5000])
def test_prose_is_about_as_long_as_wanted_and_the_same_for_a_seed(tokens: int) -> None:
    """Four to seven characters a token, as English has."""
    text = prose("a", tokens)
    assert text == prose("a", tokens) != prose("b", tokens)
    assert 4 * tokens <= len(text) <= 7 * tokens


def test_questions_differ_by_seed() -> None:
    assert len({question(str(number)) for number in range(50)}) == 50


def test_the_tools_are_as_large_as_those_of_open_webui() -> None:
    """36 of them, 24.7 KB as compact JSON, each with a name of its own."""
    tools = tool_list("tools", 36)
    assert len(json.dumps(tools, separators=(",", ":"))) == pytest.approx(24_700, rel=0.25)
    assert len({json.dumps(each) for each in tools}) == 36
