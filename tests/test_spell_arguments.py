"""Tool arguments that are no text (PC-09): an object, nothing, null."""

import pytest

from proxy.core.request import Message
from tests.wire import TEMPLATES, Wire


def called(arguments: object) -> list[Message]:
    """Return a chat whose assistant called a tool with these arguments."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"city": "SF", "a": [1, {"z": None}]}, '{"city":"SF","a":[1,{"z":null}]}'),
        ({}, "{}"),
        ("", "{}"),
        (None, "{}"),
    ],
)
def test_what_is_no_text_becomes_one(arguments: object, text: str) -> None:
    """Compact, keys in their own order; the same in the next turn."""
    wire = Wire(TEMPLATES[1])
    sent = wire.send(called(arguments))
    assert sent[1] == called(text)[1]
    wire.answered({"role": "assistant", "content": "ok"})
    more: list[Message] = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "b"}]
    assert wire.send([*called(arguments), *more])[:3] == sent


@pytest.mark.parametrize("arguments", ['{"city":"SF"}', '{"a": \n', "[1,2]", [1, 2], 7])
def test_a_text_stays_as_it_is_broken_too(arguments: object) -> None:
    """It is what the model wrote; a list or number is vLLM's to refuse."""
    told = called(arguments)
    assert Wire(TEMPLATES[1]).send(told) == tuple(told)


def test_switched_off_it_changes_nothing() -> None:
    wire = Wire(TEMPLATES[1])
    wire.steps = wire.steps - {"spell_arguments"}
    assert wire.send(called({"city": "SF"})) == tuple(called({"city": "SF"}))
