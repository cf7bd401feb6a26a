"""The bench's scenarios: each tells a chat as Open WebUI does."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest

from proxy.bench.scenarios import SCENARIOS, SIZES, Ask, Plot, Sizes, requests_of, script

SMALL = SIZES["small"]


def told(name: str, turns: int = 3, sizes: Sizes = SMALL) -> list[Ask]:
    """Play one chat with answers that are all alike; return what was asked."""
    plot = Plot("user-1", "9a3f21c0-1", "Desk one.", turns, sizes, datetime(2026, 11, 29, 12, 0, 0))
    running = script(name, plot)
    asks = [next(running)]
    while True:
        try:
            asks.append(running.send("  An answer.\n"))
        except StopIteration:
            return asks


def texts(ask: Ask) -> Sequence[Any]:
    return [message["content"] for message in ask.messages]


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("turns", [1, 3])
def test_a_chat_makes_as_many_requests_as_was_said_before(name: str, turns: int) -> None:
    """The bound of all requests is counted with it; turns only go up; and it is the same each time."""
    asks = told(name, turns)
    assert len(asks) == requests_of(name, turns)
    assert [ask.turn for ask in asks] == sorted(ask.turn for ask in asks)
    assert asks == told(name, turns)


def test_the_clock_shows_another_second_with_every_turn_and_nothing_else_changes() -> None:
    asks = told("clock")
    heads = [texts(ask)[0] for ask in asks]
    assert "2026-11-29 12:00:41" in heads[1] and len(set(heads)) == 3
    assert len({head.split("\n", 1)[1] for head in heads}) == 1
    assert texts(asks[1])[1:3] == [texts(asks[0])[1], "An answer."]


def test_a_document_stands_before_the_newest_question_only() -> None:
    """In the next turn the question stands alone; the element of the attached file stays."""
    asks = told("document")
    first, later = texts(asks[0])[1], texts(asks[1])[1]
    assert first.startswith("### Task:\nRespond to the user query using the provided context") and first.endswith(later)
    assert "</context>\n\n<attached_files>" in first and later.startswith("<attached_files>")
    assert "<context>" in texts(asks[1])[-1]


def test_the_memory_changes_at_the_end_of_the_system_prompt() -> None:
    heads = [texts(ask)[0] for ask in told("memory")]
    assert len(set(heads)) == 3 and all(head.endswith("</memory_context>") for head in heads)
    assert len({head.split("<memory_context>")[0] for head in heads}) == 1


def test_a_tool_loop_puts_a_block_before_the_question_and_takes_it_back() -> None:
    """All with the same tools, in every round."""
    asks = told("tools", 2)
    assert {len(ask.tools) for ask in asks} == {SMALL.tools}
    assert [message["role"] for message in asks[1].messages] == ["system", "user", "assistant", "tool"]
    assert texts(asks[1])[1].endswith(texts(asks[0])[1]) and texts(asks[1])[1] != texts(asks[0])[1]
    assert texts(asks[2])[1] == texts(asks[0])[1]


def test_tasks_follow_the_answer_and_quote_the_chat() -> None:
    """Title, tags and follow-ups at first, then follow-ups alone."""
    asks = told("tasks", 2)
    assert [ask.task for ask in asks] == [
        "", "title_generation", "tags_generation", "follow_up_generation", "", "follow_up_generation",
    ]  # fmt: skip
    assert "ASSISTANT: An answer.\n</chat_history>" in texts(asks[1])[-1] and len(asks[1].messages) == 1


def test_a_long_chat_has_been_going_on_for_a_while() -> None:
    assert len(told("long", sizes=SIZES["normal"])[0].messages) == 2 * 30 + 2


def test_a_knowledge_base_answers_each_question_in_a_chat_of_its_own() -> None:
    """Some 1,200 tokens in: four to seven characters each."""
    asks = told("knowledge-base", 2)
    assert len({ask.chat for ask in asks}) == 2 and {len(ask.messages) for ask in asks} == {2}
    assert 4 * 1200 < sum(len(text) for text in texts(asks[0])) < 8 * 1200


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("context", [2048, 8192, 32768])
def test_texts_shrink_to_what_the_model_can_read(name: str, context: int) -> None:
    """Four characters a token at least, answers apart."""
    sizes = SIZES["large"].within(context, output_tokens=64, turns=4)
    longest = max(sum(len(text) for text in texts(ask)) for ask in told(name, 4, sizes))
    assert longest / 4.2 + 4 * 64 < context * 1.35
    assert SIZES["large"].within(None, output_tokens=64, turns=4) == SIZES["large"]
