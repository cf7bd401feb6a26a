"""What is left out of a prompt that outgrew its context, by a counter that anybody can check by hand."""

from typing import Any

import pytest

from proxy.core.draft import GAP_TEXT, PART, Cut, Facts, Template, Trim
from proxy.core.ledger import Ledger
from proxy.core.pipeline import Rewritten
from proxy.core.reject import Reject
from proxy.core.request import ChatRequest, Message
from proxy.core.text import message_digest, text_of
from tests.trimming import answered, facts_for, t1

SYSTEM: Message = {"role": "system", "content": "sys"}


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def says(text: str) -> Message:
    """A reply."""
    return {"role": "assistant", "content": text}


def calls(*names: str) -> Message:
    """A reply of calls."""
    made = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(name: str, words: int = 1) -> Message:
    """The result of a call."""
    return {"role": "tool", "tool_call_id": name, "content": "w " * words}


def within(budget: int, messages: list[Message], facts: Facts | None = None, **rest: Any) -> Rewritten:
    """Send a request whose prompt may have `budget` tokens: one is left for the answer."""
    request = ChatRequest(tuple(messages), {"max_tokens": 1, **rest})
    done, _ = answered(request, facts or facts_for(budget + 1))
    return done


def kept(budget: int, messages: list[Message], **rest: Any) -> list[Message]:
    """Return the messages that go up."""
    return list(within(budget, messages, **rest).request.messages)


def test_a_cut_never_lands_between_a_call_and_its_result() -> None:
    """HT-01: the whole turn of the call goes, though its first message alone would have been enough."""
    chat = [SYSTEM, user("user A"), calls("1"), result("1"), user("user B"), says("done"), user("user C")]
    assert t1(chat) == 45
    assert kept(44, chat) == [SYSTEM, *chat[4:]]
    assert within(44, chat).counted == 25


def test_parallel_calls_go_with_all_their_results() -> None:
    """HT-02: two calls at once, answered in the other order, go together; the next turn's stay together."""
    first = [user("q1"), calls("c1", "c2"), result("c2"), result("c1"), says("ok")]
    second = [user("q2"), calls("c3"), result("c3", 20), user("q3")]
    assert kept(75, [SYSTEM, *first, *second]) == [SYSTEM, *second]


@pytest.mark.parametrize("budget", [27, 28, 1_000_000])
def test_below_the_limit_nothing_changes(budget: int) -> None:
    """HT-04: also exactly at it; the very objects go out."""
    chat = [SYSTEM, user("q"), calls("c1"), result("c1")]
    assert t1(chat) == 27
    sent = kept(budget, chat)
    assert all(a is b for a, b in zip(sent, chat, strict=True))
    assert within(budget, chat).left_out == 0


def test_list_content_is_counted_and_goes_as_a_whole() -> None:
    """HT-06: an image goes with its message or stays with it."""
    look: Message = {
        "role": "user",
        "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:,x"}}],
    }
    head: Message = {"role": "system", "content": [{"type": "text", "text": "sys text"}]}
    chat = [head, look, says("nice"), user("next")]
    assert kept(30, chat) == [head, chat[3]]
    assert kept(t1(chat), chat) == chat


def test_all_leading_system_messages_stay_and_a_users_message_follows_them() -> None:
    """HT-09: two system messages, two user messages in a row."""
    heads: list[Message] = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}]
    chat = [*heads, user("1"), user("2"), says("3"), user("4")]
    assert kept(18, chat) == [*heads, user("4")]
    assert kept(t1(chat), chat) == chat


def test_tools_count_and_are_never_dropped() -> None:
    """HT-13: 12 tools and one word are 128 tokens."""
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(12)]
    with pytest.raises(Reject) as refused:
        within(127, [user("hi")], tools=tools)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert within(128, [user("hi")], tools=tools).request.rest["tools"] is tools


def test_a_system_prompt_that_is_too_long_is_refused_with_the_numbers() -> None:
    """HT-14: never dropped, never cut; the refusal says how long the prompt is and what the model takes."""
    with pytest.raises(Reject) as refused:
        within(100, [{"role": "system", "content": "w " * 300}, user("hi")])
    assert refused.value.code == "context_length_exceeded"
    assert "312 tokens" in refused.value.message
    assert "101 in all" in refused.value.message


def test_the_cut_stays_for_many_turns() -> None:
    """PC-16: 40 turns of 100 tokens, 2,000 of budget, low mark three quarters: few cuts, each for at least 5 turns."""
    messages: list[Message] = [{"role": "system", "content": "w " * 16}]
    facts = facts_for(2001, low=0.75)
    left_out: list[int] = []
    for turn in range(40):
        messages.append(user(f"u{turn} " + "w " * 45))
        done = within(2000, messages, facts)
        left_out.append(done.left_out)
        assert t1(done.request.messages) <= 2000
        messages.append(says(f"a{turn} " + "w " * 45))
    places = sorted(set(left_out[20:]))
    assert len(places) <= 5
    assert all(left_out.count(place) >= 5 for place in places[:-1])
    assert left_out == sorted(left_out)


def test_inside_the_newest_turn_the_oldest_calls_go_down_to_the_low_mark() -> None:
    """A long tool loop is one turn: cut block by block to just fit, each call would move the cut."""
    loop: list[Message] = [user("q")]
    cuts = set()
    facts = facts_for(201, low=0.5)
    for i in range(20):
        loop += [calls(f"c{i}"), result(f"c{i}", 20)]
        done = within(200, [SYSTEM, *loop], facts)
        assert t1(done.request.messages) <= 200
        assert done.request.messages[1] == user("q")
        assert done.request.messages[-1] is loop[-1]
        cuts.add(done.cut.inner if done.cut is not None else 0)
    assert len(cuts) == 5


def test_a_system_message_in_the_middle_stays() -> None:
    """Wherever the client put it: it goes up behind the head once its turn is left out."""
    middle: Message = {"role": "system", "content": "from now on be brief"}
    chat = [SYSTEM, user("one " * 20), says("a"), middle, user("two " * 20), says("b"), user("three")]
    assert kept(60, chat) == [SYSTEM, middle, *chat[4:]]
    assert kept(30, chat) == [SYSTEM, middle, user("three")]


def test_pinned_turns_stay() -> None:
    """What comes after them goes."""
    chat = [SYSTEM, user("task"), says("ok"), user("w " * 30), says("a"), user("w " * 10), says("b"), user("c")]
    facts = facts_for(71)
    facts = Facts(**{**_fields(facts), "trim": Trim(1.0, 1, None)})
    assert list(within(70, chat, facts).request.messages) == [*chat[:3], *chat[5:]]


def _fields(facts: Facts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in Facts.__dataclass_fields__}


@pytest.mark.parametrize("in_place", [True, False])
def test_a_sentence_marks_the_gap(in_place: bool) -> None:
    """As a system message where the template takes one there, else in front of the user's words."""
    chat = [SYSTEM, user("w " * 60), says("a"), user("b")]
    facts = Facts(
        **{**_fields(facts_for(61)), "trim": Trim(1.0, 0, GAP_TEXT), "template": Template(system_in_place=in_place)}
    )
    done = within(60, chat, facts)
    sent = done.request.messages
    assert sent[0] is SYSTEM
    assert done.counted == t1(sent)
    if in_place:
        assert sent[1:] == ({"role": "system", "content": GAP_TEXT}, user("b"))
    else:
        assert len(sent) == 2
        assert text_of(sent[1]) == f"{GAP_TEXT}b"
        assert all(message["role"] != PART for message in sent)


def test_a_chat_without_a_system_message_keeps_the_templates_own() -> None:
    """A mark in place would be the first system message, and many templates put one of their own where none is."""
    facts = Facts(**{**_fields(facts_for(61)), "trim": Trim(1.0, 0, GAP_TEXT)})
    sent = within(60, [user("w " * 60), says("a"), user("b")], facts).request.messages
    assert [message["role"] for message in sent] == ["user"]


def test_a_stored_cut_holds_until_the_mark_is_passed_again() -> None:
    """Though a shorter one would do."""
    chat = [SYSTEM, user("one"), says("a"), user("two"), says("b"), user("three")]
    stored = Cut(4, message_digest(chat[5]), 5)
    facts = Facts(**{**_fields(facts_for(1000)), "cut": stored})
    assert list(within(999, chat, facts).request.messages) == [SYSTEM, user("three")]


def test_a_stored_cut_of_another_conversation_is_none() -> None:
    """The user edited the message that it begins at, or went back to before it."""
    chat = [SYSTEM, user("one"), says("a"), user("two")]
    for stored in (Cut(2, message_digest(user("other")), 3), Cut(8, message_digest(user("two")), 9)):
        facts = Facts(**{**_fields(facts_for(1000)), "cut": stored})
        assert list(within(999, chat, facts).request.messages) == chat


def test_a_pointer_whose_target_goes_is_told_in_full() -> None:
    """A fresh process that cuts before the second copy of a document never points to the first."""
    source = f'<source id="1">{"word " * 30}</source>'
    ask = f"<context>\n{source}\n</context>\n\nwhat?"
    chat = [SYSTEM, user(ask), says("a " * 30), user("short"), says("b"), user(ask)]
    facts = facts_for(80, ledger=Ledger(1 << 20))
    sent = within(79, chat, facts).request.messages
    assert ask in [text_of(message) for message in sent]


def test_an_answer_that_goes_on_is_counted_as_a_bound() -> None:
    """Its prompt has no generation prompt, so vLLM counts a little less."""
    done = within(20, [SYSTEM, user("one"), says("and so")])
    assert done.request.rest["continue_final_message"] is True
    assert not done.exact
    assert done.counted is not None
    assert done.counted >= t1(done.request.messages, generation=False)


def test_counts_that_are_bounds_make_no_exact_one() -> None:
    """Where vLLM did not count, output lengths are not lowered to a room that may be larger."""
    chat = [SYSTEM, user("one"), says("a"), user("two")]
    facts = facts_for(40)
    done, asked = answered(ChatRequest(tuple(chat), {"max_tokens": 1}), facts)
    assert done.exact
    rough = Facts(**{**_fields(facts), "rough": frozenset(question.key for question in asked)})
    assert not answered(ChatRequest(tuple(chat), {"max_tokens": 1}), rough)[0].exact


def test_a_cut_stays_where_the_first_message_kept_was_changed() -> None:
    """What stood before it is the same, and stays left out: nothing comes back that was gone."""
    chat = [SYSTEM, user("w " * 20), says("a"), user("w " * 20), says("b"), user("three")]
    facts = facts_for(60)
    done, _ = answered(ChatRequest(tuple(chat), {"max_tokens": 1}), facts)
    assert done.cut is not None
    assert done.left_out == 2
    facts.ledger.record(done.records)
    edited = [*chat[:3], user("shorter"), *chat[4:]]
    again = Facts(**{**_fields(facts), "cut": done.cut})
    sent = answered(ChatRequest(tuple(edited), {"max_tokens": 1}), again)[0].request.messages
    assert list(sent) == [SYSTEM, *edited[3:]]


def test_a_cut_inside_a_turn_ends_with_the_calls_that_it_left_out() -> None:
    """The answer is regenerated, with one call instead of many: nothing of it is missing."""
    chat = [SYSTEM, user("q"), calls("a"), result("a"), calls("b"), result("b")]
    stored = Cut(0, message_digest(chat[1]), 3)
    facts = Facts(**{**_fields(facts_for(1000)), "cut": stored})
    assert list(within(999, chat, facts).request.messages) == [SYSTEM, chat[1], *chat[4:]]
    for other in ([SYSTEM, user("q")], [SYSTEM, user("q"), calls("c", "d"), result("c"), result("d")]):
        assert list(within(999, other, facts).request.messages) == other


def test_a_restored_document_goes_before_any_turn_and_stays_away() -> None:
    """What Open WebUI takes away after its turn was only kept for the prefix, which the cut breaks anyway."""
    ledger = Ledger(1 << 20)
    block = "<context>\n" + "doc " * 60 + "\n</context>\n\n"
    reply = says("fact " * 80)

    def send(budget: int, *messages: Message) -> list[Message]:
        done = within(budget, [SYSTEM, *messages], facts_for(budget + 1, low=0.9, ledger=ledger))
        at = ledger.record(done.records)
        at.upto, at.family = t1(done.request.messages), done.family
        ledger.add_reply(at, reply)
        return list(done.request.messages)

    first, second, third = user(block + "Q1"), user("Q2"), user("Q3")
    assert send(900, first) == [SYSTEM, first]
    assert send(900, user("Q1"), reply, second) == [SYSTEM, first, reply, second]
    told = [user("Q1"), reply, second, reply, third]
    assert send(220, *told) == [SYSTEM, *told]
    assert send(900, *told, reply, user("Q4")) == [SYSTEM, *told, reply, user("Q4")]
