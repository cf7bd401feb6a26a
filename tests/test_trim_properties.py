"""Trimming under a model of Open WebUI: what must hold of every prompt of a chat that outgrows its context."""

import json
import os
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from proxy.core.draft import Trim
from proxy.core.learned_lines import Lines
from proxy.core.reject import Reject
from proxy.core.request import ChatRequest, Message
from proxy.core.text import message_digest, text_of
from proxy.session_state import dump, load
from tests.test_pipeline import check_head, whole_text
from tests.trim_chats import LongAction, Sent, TrimWire, count_of, fresh, tokens_of
from tests.trimming import answered
from tests.webui import CLOCKS, Client
from tests.wire import TEMPLATES

EXAMPLES = int(os.environ.get("TRIM_EXAMPLES", "20"))
# Without shrinking: these chats are long, and a failure that takes minutes to show is looked at by nobody.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
QUICK = settings(max_examples=EXAMPLES, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))

PLAIN = ("say", "say", "long", "tools", "loop", "image", "repeat")
"""Only appends, and the client tells everything as it went up: no text moves."""
KINDS: tuple[str, ...] = (
    *PLAIN, "documents", "same_document", "same_document", "memory", "regenerate", "edit", "arrow", "goes_on",
    "cites", "twice", "stopped", "failed", "save", "compact",
)  # fmt: skip


def chats(
    kinds: Sequence[str] = KINDS, *, plain: bool = False, most: int = 14
) -> st.SearchStrategy[tuple[Client, list[LongAction]]]:
    """A chat before a small context, and what its user does; `plain`: nothing in it is volatile."""
    small = st.integers(0, 11)
    space = st.just("") if plain else st.sampled_from(["", " ", "\n\n"])
    done = st.lists(st.builds(LongAction, st.sampled_from(list(kinds)), small, small, space), min_size=3, max_size=most)
    clock = st.none() if plain else st.sampled_from([None, *CLOCKS])
    memory = st.just("") if plain else st.sampled_from(["", "[User Memory]\n- likes cats"])

    def begun(size: int, template: int, low: float, pinned: int, **fields: Any) -> Client:
        wire = TrimWire(TEMPLATES[template], size=size, trim=Trim(low, pinned))
        return Client(wire, **fields)

    client = st.builds(
        begun,
        st.integers(320, 900),
        st.integers(0, 1),
        st.sampled_from([0.4, 0.6, 0.9]),
        st.sampled_from([0, 0, 0, 1]),
        clock=clock,
        system=st.sampled_from(["You help.", "", "You help.\nBe brief.\n\nOpen 9:00 to 17:00."]),
        two_systems=st.booleans(),
        memory=memory,
    )
    return st.tuples(client, done)


def played(chat: tuple[Client, list[LongAction]]) -> Client:
    """Let the user do these things; a chat that does not fit any more ends."""
    client, done = chat
    try:
        for action in done:
            action.do(client)
    except Reject as refusal:
        assert refusal.code == "context_length_exceeded"
    return client


def wire_of(client: Client) -> TrimWire:
    """Return the chat's wire."""
    assert isinstance(client.wire, TrimWire)
    return client.wire


def sent_by(chat: tuple[Client, list[LongAction]]) -> tuple[TrimWire, list[Sent]]:
    """Play a chat; return its wire and all that went up."""
    wire = wire_of(played(chat))
    return wire, wire.sent


def by_value(messages: Sequence[Message]) -> list[Any]:
    """Return messages with the arguments of their calls as values: a template renders these, however spelled."""
    out: list[Any] = json.loads(json.dumps(list(messages)))
    for message in out:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return out


def head_size(messages: Sequence[Message]) -> int:
    """Return how many system messages lead."""
    return next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))


@given(chats())
@QUICK
def test_no_prompt_is_over_the_high_mark_where_anything_can_be_left_out(chat: tuple[Client, list[LongAction]]) -> None:
    """Above it is only what must stay: system messages, pinned turns, the newest user message, its newest calls."""
    wire, all_sent = sent_by(chat)
    for sent in all_sent:
        if sent.tokens <= wire.marks.high:
            continue
        told = sent.told[head_size(sent.told) :]
        newest = max(i for i, m in enumerate(told) if m["role"] == "user")
        pinned = [i for i, m in enumerate(told) if m["role"] == "user"][: wire.trim.pinned_turns]
        calls = [i for i in range(newest + 1, len(told)) if told[i]["role"] == "assistant"]
        least = len(told) - (calls[-1] if calls else newest) + (newest < (calls or [0])[-1])
        kept = len(told) - sent.done.left_out
        if not pinned:
            assert kept <= least, (sent.tokens, wire.marks)
        assert sent.tokens < wire.size


@given(chats())
@QUICK
def test_counts_are_exact_where_something_was_asked_and_else_an_upper_bound(
    chat: tuple[Client, list[LongAction]],
) -> None:
    """A decision that depended on a count rests on what vLLM counts of the very prompt that goes up."""
    for sent in sent_by(chat)[1]:
        assert sent.done.counted is not None
        if sent.done.exact:
            assert sent.done.counted == sent.tokens
        else:
            assert sent.done.counted >= sent.tokens


@given(chats(("say", "long", "tools", "loop", "image", "repeat", "memory", "documents", "same_document", "cites")))
@QUICK
def test_the_cut_moves_only_past_the_mark_and_never_back(chat: tuple[Client, list[LongAction]]) -> None:
    """A trimmer without this one passes every other test and ruins the prefix cache."""
    wire, all_sent = sent_by(chat)
    for sent in all_sent:
        before, after = sent.before, sent.done.cut
        if before == after:
            continue
        assert after is not None
        # A document that vanished from the first message kept makes another conversation of it: all is new after it.
        told = [message_digest(message) for message in sent.told[head_size(sent.told) :]]
        if before is not None and told[before.turn] == before.seen:
            assert (after.turn, after.inner) > (before.turn, before.inner)
        assert sent.uncut > wire.marks.high


@given(chats(("say", "long", "tools", "loop", "image", "repeat", "memory")))
@QUICK
def test_between_cuts_each_prompt_begins_with_the_last_one(chat: tuple[Client, list[LongAction]]) -> None:
    """Message by message, whatever clock and memory do."""
    client = played(chat)
    all_sent = wire_of(client).sent
    for last, sent, turn in zip(all_sent, all_sent[1:], client.turns[1:], strict=False):
        if sent.done.cut == last.done.cut and turn.grown:
            earlier = list(last.done.request.messages)
            assert list(sent.done.request.messages[: len(earlier)]) == earlier


@given(chats())
@QUICK
def test_calls_and_their_results_stay_together(chat: tuple[Client, list[LongAction]]) -> None:
    """No result without its call, no call without the results that the client told; the first after the head is a
    user's message."""
    for sent in sent_by(chat)[1]:
        messages: Sequence[Any] = sent.done.request.messages
        calls: set[str] = set()
        for message in messages:
            if message["role"] == "tool":
                assert message["tool_call_id"] in calls
            calls |= {call["id"] for call in message.get("tool_calls") or []}
        results = {m["tool_call_id"] for m in messages if m["role"] == "tool"}
        told: Sequence[Any] = sent.told
        assert calls & {m["tool_call_id"] for m in told if m["role"] == "tool"} <= results
        rest = messages[head_size(messages) :]
        told_rest = told[head_size(told) :]
        assert rest[0]["role"] == "user" or told_rest[0]["role"] != "user"


@given(chats())
@QUICK
def test_a_request_that_fits_is_untouched(chat: tuple[Client, list[LongAction]]) -> None:
    """Without a cut before it, and below the mark, it is what would go up before a model without a limit."""
    wire, all_sent = sent_by(chat)
    for sent in all_sent:
        if sent.before is not None:
            continue
        if tokens_of(sent.free.request) <= wire.marks.high:
            assert sent.done.request.messages == sent.free.request.messages
            assert sent.done.cut is None


@given(chats())
@QUICK
def test_no_system_line_is_lost_by_a_cut(chat: tuple[Client, list[LongAction]]) -> None:
    """Clock, memory, a second system message: after a cut they are told anew where their note went."""
    for turn in played(chat).turns:
        check_head(turn)


@given(chats(("same_document", "same_document", "documents", "say", "long", "regenerate", "loop")))
@QUICK
def test_no_pointer_lacks_its_target(chat: tuple[Client, list[LongAction]]) -> None:
    """Every line of a message that goes up is in the prompt, a document's where the pointer points or in its place."""
    for sent in sent_by(chat)[1]:
        prompt = whole_text(sent.done.request.messages)
        lines = {line.strip() for line in prompt.split("\n")}
        if ">as above<" in prompt:
            gone = _left_out(sent)
            for message in gone:
                for line in text_of(message).split("\n"):
                    assert line.strip() in lines


def _left_out(sent: Sent) -> list[Message]:
    """Return the told messages that go up: all but those that a cut leaves out."""
    told = sent.told[head_size(sent.told) :]
    cut = sent.done.cut
    if cut is None:
        return list(told)
    return [m for i, m in enumerate(told) if i == cut.turn or i >= cut.inner]


@given(chats(PLAIN, plain=True, most=24))
@QUICK
def test_a_fresh_process_cuts_where_the_old_one_did(chat: tuple[Client, list[LongAction]]) -> None:
    """Where no text was moved: the marks are replayed over the chat from its front."""
    wire, all_sent = sent_by(chat)
    for sent in all_sent:
        done, _ = answered(ChatRequest(sent.told, {"max_tokens": 60}), fresh(wire), count_of)
        assert done.cut == sent.done.cut
        assert by_value(done.request.messages) == by_value(sent.done.request.messages)


@given(chats(PLAIN, plain=True, most=24))
@QUICK
def test_a_stored_cut_holds_in_a_fresh_process(chat: tuple[Client, list[LongAction]]) -> None:
    """What the store holds is enough to send the next request as the old process would have."""
    wire, all_sent = sent_by(chat)
    for sent in all_sent:
        _, _, cut, _ = load(dump((), Lines(), sent.done.cut, None), 1 << 20)
        assert cut == sent.done.cut
        done, _ = answered(ChatRequest(sent.told, {"max_tokens": 60}), fresh(wire, cut), count_of)
        assert done.cut == cut
        assert by_value(done.request.messages) == by_value(sent.done.request.messages)


@given(chats(PLAIN, plain=True, most=24))
@QUICK
def test_a_chat_that_grows_asks_little(chat: tuple[Client, list[LongAction]]) -> None:
    """Two prompts a request, a dozen at a cut, and once vLLM has counted a prompt never one as long as that."""
    wire, all_sent = sent_by(chat)
    for sent in all_sent:
        if not sent.anchored:
            continue
        moved = sent.done.cut != sent.before or sent.tokens > wire.marks.high  # or it was looked for in vain
        assert len(sent.asked) <= (16 if moved else 3), [len(q.messages) for q in sent.asked]
        if not moved and len(sent.done.request.messages) > 8:
            assert max((count_of(q) for q in sent.asked), default=0) < sent.tokens
