"""A block that a client puts before an already-sent message in a tool loop is told after the newest result."""

import pytest

from proxy.core.request import Message
from tests.wire import LEAD, TEMPLATES, Wire

BLOCK = f'{LEAD}<source id="1" name="a.txt"></source>\n</context>\n\n'
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q":"x"}'}}],
}
RESULT: Message = {"role": "tool", "tool_call_id": "c1", "content": "found"}
ASK: Message = {"role": "user", "content": "what?"}
ASK_AGAIN: Message = {"role": "user", "content": BLOCK + "what?"}
DONE: Message = {"role": "assistant", "content": "that."}


@pytest.fixture(params=TEMPLATES, ids=["part", "in place"])
def wire(request: pytest.FixtureRequest) -> Wire:
    """A chat whose first round has called a tool, in either form of notes."""
    wire = Wire(request.param)
    wire.send([ASK])
    wire.answered(CALL)
    return wire


def test_the_question_goes_as_it_went_and_the_block_after_the_result(wire: Wire) -> None:
    assert wire.send([ASK_AGAIN, CALL, RESULT]) == (ASK, CALL, {**RESULT, "content": f"found\n\n{BLOCK.rstrip()}"})


def test_the_next_turn_finds_the_result_as_it_was_sent(wire: Wire) -> None:
    sent = wire.send([ASK_AGAIN, CALL, RESULT])
    wire.answered(DONE)
    assert wire.send([ASK, CALL, RESULT, DONE, {"role": "user", "content": "more"}])[:4] == (*sent, DONE)


def test_the_same_block_is_told_once_in_a_loop(wire: Wire) -> None:
    """A second result gets it only if it changed."""
    first = wire.send([ASK_AGAIN, CALL, RESULT])
    other: Message = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "c2"}]}  # type: ignore[index]  # a list
    wire.answered(other)
    more: Message = {"role": "tool", "tool_call_id": "c2", "content": "again"}
    assert wire.send([ASK_AGAIN, CALL, RESULT, other, more]) == (*first, other, more)
    changed: Message = {"role": "user", "content": BLOCK.replace("a.txt", "b.txt") + "what?"}
    last = wire.send([changed, CALL, RESULT, other, more])[-1]
    assert "b.txt" in str(last["content"]) and str(last["content"]).startswith("again\n\n")


def test_without_a_result_at_the_end_the_block_stays_where_it_was_put(wire: Wire) -> None:
    """There is no place for it that the model reads last."""
    sent = wire.send([ASK_AGAIN, CALL, RESULT, {"role": "assistant", "content": "tha"}])
    assert sent[0] == ASK_AGAIN and sent[2] == RESULT
