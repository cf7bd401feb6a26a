"""*Continue*: the reply goes on in the assistant's words, without a character of them changed."""

from typing import Any

import pytest

from proxy.core.draft import Facts
from proxy.core.ledger import Ledger
from proxy.core.pipeline import rewrite
from proxy.core.request import ChatRequest

FLAGS = {"continue_final_message": True, "add_generation_prompt": False}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def sent(last: dict[str, Any], reasons: bool = False, **rest: Any) -> dict[str, Any]:
    """Return the fields that go up with a request that ends in `last`."""
    facts = Facts(frozenset({"continue_final"}), Ledger(0), reasons=reasons)
    messages = ({"role": "user", "content": "hi"}, last)
    done = rewrite(ChatRequest(messages, rest), facts)
    assert done.request.messages == messages
    return dict(done.request.rest)


def test_the_assistants_words_are_gone_on_with() -> None:
    """Trailing space stays: the page puts the answer right behind what it shows."""
    assert sent({"role": "assistant", "content": "The Nile is "}, model="m") == {"model": "m", **FLAGS}


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "x"},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": " \n"},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": 3},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "x", "tool_calls": [CALL]},
        {"role": "assistant", "content": "x", "tool_calls": "odd"},
    ],
)
def test_any_other_end_begins_a_new_turn(last: dict[str, Any]) -> None:
    """Tool calls, list or empty content cannot be gone on with."""
    assert sent(last) == {}


@pytest.mark.parametrize(
    "rest",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a"]}},
        {"guided_json": {}},
        {"continue_final_message": False},
        {"continue_final_message": True},
        {"add_generation_prompt": True},
        {"add_generation_prompt": None},
    ],
)
def test_constrained_output_and_the_clients_own_flags_are_left(rest: dict[str, Any]) -> None:
    """The client knows what it wants."""
    assert sent({"role": "assistant", "content": "x"}, **rest) == rest


def test_no_flag_for_a_model_that_reasons() -> None:
    """Its template puts a think block in front."""
    assert sent({"role": "assistant", "content": "x"}, reasons=True) == {}


def test_a_null_format_is_none() -> None:
    """`response_format: null` constrains nothing."""
    assert sent({"role": "assistant", "content": "x"}, response_format=None) == {"response_format": None, **FLAGS}
