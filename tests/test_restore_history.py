"""Earlier messages as they were sent: what comes back, and what a user deleted for good."""

import time
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.ledger import Ledger
from proxy.core.pipeline import rewrite
from proxy.core.request import ChatRequest, Message
from tests.wire import LEAD, TEMPLATES, Wire

BLOCK = f'{LEAD}<source id="1">The Nile is a river in Africa, and long.</source>\n</context>\n\n'
LONG = "The answer goes on and on, and is worth as much as the document. " * 3


def user(text: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": text}


def model(text: str) -> Message:
    """Return a reply."""
    return {"role": "assistant", "content": text}


def answered(wire: Wire, messages: list[Message], reply: str) -> tuple[Message, ...]:
    """Send a request and remember its answer."""
    sent = wire.send(messages)
    wire.answered(model(reply))
    return sent


def test_a_reply_goes_as_it_was_generated() -> None:
    """White space, and arguments as they were spelled."""
    wire = Wire()
    answered(wire, [user("hi")], "\n\n hello \n")
    assert wire.send([user("hi"), model("hello"), user("x")])[1] == model("\n\n hello \n")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    told = {**call, "function": {"name": "f", "arguments": '{"a":1}'}}
    wire.send([user("tool")])
    wire.answered({"role": "assistant", "content": "", "tool_calls": [call]})
    result = {"role": "tool", "tool_call_id": "1", "content": "y"}
    for content in ("", None):
        sent = wire.send([user("tool"), {"role": "assistant", "content": content, "tool_calls": [told]}, result])
        assert sent[1] == {"role": "assistant", "content": content, "tool_calls": [call]}


@pytest.mark.parametrize(
    "told",
    [
        "hello there",
        "hello\nworld!",
        "hello  world",
        "Hello world",
        "",
    ],
)
def test_a_reply_that_was_edited_goes_as_it_is_told(told: str) -> None:
    """Inner space and letters are the client's."""
    wire = Wire()
    answered(wire, [user("hi")], " hello world ")
    assert wire.send([user("hi"), model(told), user("x")])[1] == model(told)


def test_a_reply_with_fields_that_we_never_relayed_is_not_ours() -> None:
    """A name, a refusal, list content."""
    wire = Wire()
    answered(wire, [user("hi")], " hello ")
    for reply in (
        {**model("hello"), "name": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
    ):
        assert wire.send([user("hi"), reply, user("x")])[1] == reply


def test_thoughts_do_not_come_back() -> None:
    """Clients do not tell them, templates leave them out; a client that tells them gets its own words."""
    wire = Wire()
    answered(wire, [user("hi")], "<think>\nhm\n</think>\n\nhello ")
    assert wire.send([user("hi"), model("hello"), user("x")])[1] == model("hello")
    whole = model("<think>\nhm\n</think>\n\nhello")
    assert wire.send([user("hi"), whole, user("x")])[1]["content"].strip() == whole["content"]  # type: ignore[attr-defined]  # a text


@pytest.mark.parametrize("explicit", [True, False])
def test_thoughts_come_back_where_wanted_but_never_to_a_chat_found_by_content(explicit: bool) -> None:
    """The generated reply that is found there may be another user's, and he did not see its thoughts."""
    wire = Wire(explicit=explicit)
    answered(wire, [user("hi")], "<think>\nsecret\n</think>\n\nhello ")
    request = ChatRequest((user("hi"), model("hello"), user("x")), {})
    sent = rewrite(request, replace(wire.facts(), thinking=True)).request.messages
    assert ("secret" in str(sent)) is explicit


def documents(steps: frozenset[str] | None = None, explicit: bool = True, reply: str = LONG, text: str = "Q1") -> Any:
    """Send a message with a document, then tell it without; return the wire and the second prompt."""
    wire = Wire(explicit=explicit)
    wire.steps = steps or wire.steps
    answered(wire, [user(BLOCK + text)], reply)
    return wire, wire.send([user(text), model(reply.strip()), user("Q2")])


def test_a_document_block_comes_back_with_its_message() -> None:
    """It is cached; and it keeps coming back."""
    wire, sent = documents()
    assert sent[0] == user(BLOCK + "Q1")
    wire.answered(model("A2"))
    again = wire.send([user("Q1"), model(LONG.strip()), user("Q2"), model("A2"), user("Q3")])
    assert again[: len(sent)] == sent


def test_a_block_does_not_come_back_to_a_chat_without_a_name() -> None:
    """It may be another user's."""
    assert documents(explicit=False)[1][0] == user("Q1")


def test_a_block_larger_than_what_it_saves_stays_away_for_good() -> None:
    """Refused once for a turn, refused always."""
    wire, sent = documents(reply="short")
    assert sent[0] == user("Q1")
    wire.answered(model(LONG))
    told = [user("Q1"), model("short"), user("Q2"), model(LONG.strip()), user("Q3")]
    assert wire.send(told)[0] == user("Q1")


def test_a_block_that_a_user_typed_stays_deleted() -> None:
    """It was told in full with a turn after it: machines never do that."""
    wire = Wire()
    answered(wire, [user(BLOCK + "Q1")], LONG)
    answered(wire, [user(BLOCK + "Q1"), model(LONG.strip()), user("Q2")], "A2")
    assert wire.send([user("Q1"), model(LONG.strip()), user("Q3")])[0] == user("Q1")


@pytest.mark.parametrize(
    "front", ["> quoted\n\n", "Read this:\n\n", "<context>x</context>\n\n", "### Task:\nMine.\n\n"]
)
def test_words_that_a_user_deleted_stay_deleted(front: str) -> None:
    """*Save* keeps the reply."""
    wire = Wire()
    answered(wire, [user(front + "Q1")], LONG)
    assert wire.send([user("Q1"), model(LONG.strip()), user("Q2")])[0] == user("Q1")


def test_a_block_does_not_come_back_to_another_text_or_another_reply() -> None:
    """The message was edited, or answered elsewhere."""
    wire = Wire()
    answered(wire, [user(BLOCK + "Q1")], LONG)
    for told in ([user("Q1!"), model(LONG.strip())], [user("Q1"), model("another")], [user("Q1")]):
        assert wire.send([*told, user("Q2")])[: len(told)] == tuple(told)


def test_a_text_that_merely_ends_alike_is_another_message() -> None:
    """The last words of a question are not the question."""
    wire = Wire()
    answered(wire, [user(BLOCK + "Who knows Q1")], LONG)
    assert wire.send([user("Q1"), model(LONG.strip()), user("Q2")])[0] == user("Q1")


def test_the_newest_message_goes_as_it_is_told() -> None:
    """Asked again with other documents, or with none."""
    wire = Wire()
    answered(wire, [user(BLOCK + "Q1")], LONG)
    assert wire.send([user("Q1")]) == (user("Q1"),)


@pytest.mark.parametrize("told", ["The Nile", "The Nile is long", "The Nile is long and wide"])
def test_a_cut_reply_is_matched_whichever_is_longer(told: str) -> None:
    """The client saw less or more than we did; its words go out, the turns before it stand."""
    wire = Wire(TEMPLATES[1])
    head: Message = {"role": "system", "content": "Now: 2026-01-02 10:00:01."}
    first = wire.send([head, user("hi")])
    wire.answered(model("The Nile is long"), cut=True)
    later: Message = {"role": "system", "content": "Now: 2026-01-02 10:00:09."}
    sent = wire.send([later, user("hi"), model(told), user("x")])
    assert sent[: len(first)] == first and sent[len(first)] == model(told)
    # What was told is then known as it was told.
    wire.answered(model("y"))
    assert wire.send([later, user("hi"), model(told), user("x"), model("y"), user("z")])[: len(sent)] == sent


def test_of_equal_turns_the_next_message_chooses() -> None:
    """The same words twice, two answers, each with a history of its own."""
    wire = Wire(TEMPLATES[1])
    heads: list[Message] = [{"role": "system", "content": f"Now: 2026-01-02 10:00:0{i}."} for i in range(3)]
    one = wire.send([heads[0], user("hi")])
    wire.answered(model("one"))
    two = wire.send([heads[1], user("hi")])
    wire.answered(model("two"))
    for sent, reply in ((one, "one"), (two, "two")):
        assert wire.send([heads[2], user("hi"), model(reply), user("x")])[: len(sent)] == sent


def test_what_is_in_the_tree_is_not_changed_by_reading() -> None:
    """A request that is refused later leaves no trace."""
    wire = Wire()
    answered(wire, [user(BLOCK + "Q1")], LONG)
    before = [(n.seen, n.short, n.sent, n.used, n.in_full) for n in wire.ledger.nodes()]
    done = [user("Q1"), model(LONG.strip()), user("Q2")]
    rewrite(ChatRequest(tuple(done), {}), wire.facts())
    assert before == [(n.seen, n.short, n.sent, n.used, n.in_full) for n in wire.ledger.nodes()]


def test_thousands_of_messages_take_linear_time() -> None:
    """The longest request that is taken, known to the last message."""
    wire = Wire()
    told = [user(f"q{i}") if i % 2 == 0 else model(f"a{i}") for i in range(4001)]
    wire.send(told)
    began = time.process_time()
    wire.send([*told, model("x"), user("y")])
    assert time.process_time() - began < 2


def test_a_pointer_never_lacks_its_target() -> None:
    """The system message may be another one in the next turn: what stands only there is no target."""
    source = f'<source id="1">{"The Nile is long. " * 10}</source>'
    wire, told = Wire(TEMPLATES[1]), user(f"{LEAD}{source}\n</context>\n\nQ")
    answered(wire, [{"role": "system", "content": f"Handbook:\n{source}\nEnd."}, told], LONG * 2)
    sent = wire.send([{"role": "system", "content": "Handbook: gone."}, told, model((LONG * 2).strip()), user("x")])
    assert "The Nile is long." in str(sent)


def test_a_note_in_front_of_a_large_image_is_kept() -> None:
    """The message is told again every turn: only its note needs to be remembered."""
    wire = Wire(TEMPLATES[1], ledger=Ledger(4 << 20))
    image: Message = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5_000_000}}
    look: Message = {"role": "user", "content": [{"type": "text", "text": "look"}, image]}
    first = answered(wire, [{"role": "system", "content": "Now: 2026-01-02 10:00:01."}, look], "nice")
    told = [{"role": "system", "content": "Now: 2026-01-02 10:00:02."}, look, model("nice"), user("x")]
    assert wire.send(told)[: len(first)] == first


def test_a_calendar_beside_a_clock_is_told_once() -> None:
    """Dates with a time that never change: the notes of later turns hold the clock alone."""
    calendar = "\n".join(f"2026-01-{day:02} 10:00 dentist" for day in range(1, 31))
    wire = Wire(TEMPLATES[1])
    answered(wire, [{"role": "system", "content": f"Now: 2026-01-02 10:00:01.\n{calendar}"}, user("a")], "b")
    sent = wire.send(
        [{"role": "system", "content": f"Now: 2026-01-02 10:00:02.\n{calendar}"}, user("a"), model("b"), user("c")]
    )
    assert len(str(sent[-2]["content"])) < 100
