"""What is read off an answer."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.meter import MAX_GAPS, REPLY_BYTES, Meter, Reply, ToolCall, Usage


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def delta(part: object, finish: str | None = None, index: int = 0) -> bytes:
    return event({"id": "x", "choices": [{"index": index, "delta": part, "finish_reason": finish}]})


def metered(*events: bytes) -> Meter:
    meter = Meter()
    for now, each in enumerate(events):
        meter.feed(each, float(now))
    return meter


def replied(meter: Meter) -> Reply:
    reply = meter.reply()
    assert reply is not None
    return reply


def test_text_finish_and_times_of_a_stream() -> None:
    """The empty first chunk is no token."""
    meter = metered(
        delta({"role": "assistant", "content": ""}), delta({"content": "Hi"}), delta({"content": " 🧠"}),
        delta({}, "stop"), b"data: [DONE]\n\n",
    )  # fmt: skip
    assert (meter.first_token, meter.gaps, meter.finish_reason, meter.done) == (1.0, [1.0], "stop", True)
    assert replied(meter) == Reply("Hi 🧠", "", (), replayable=True, complete=True)


@given(st.lists(st.integers(0, 400), max_size=30))
def test_any_cutting_gives_the_same_reply(places: list[int]) -> None:
    """Also inside a character."""
    stream = delta({"content": "你好 🧠"}) + delta({"reasoning": "é"}) + delta({}, "stop") + b"data: [DONE]\n\n"
    marks = sorted({min(place, len(stream)) for place in places} | {0, len(stream)})
    meter = metered(*(stream[a:b] for a, b in pairwise(marks)))
    assert replied(meter) == Reply("你好 🧠", "é", (), replayable=True, complete=True)
    assert meter.done


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_counts_as_tokens_under_either_name(name: str) -> None:
    """vLLM renamed it; both at once are one text."""
    meter = metered(delta({name: "hm"}), delta({"content": "yes"}))
    assert (meter.first_token, replied(meter).reasoning) == (0.0, "hm")
    assert replied(metered(delta({"reasoning": "a", "reasoning_content": "a"}))).reasoning == "a"


def calls_of(*deltas: Sequence[object]) -> Reply:
    return replied(metered(*(delta({"tool_calls": list(each)}) for each in deltas)))


def test_interleaved_tool_calls_are_put_together_by_their_index() -> None:
    """Arguments come in pieces, ids and names once."""
    reply = calls_of(
        [{"index": 0, "id": "c1", "function": {"name": "bash", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"x":'}}],
        [{"index": 1, "id": "c2", "function": {"name": "read", "arguments": "{}"}}],
        [{"index": 0, "function": {"arguments": "1}"}}],
    )
    assert reply.tool_calls == (ToolCall("c1", "bash", '{"x":1}'), ToolCall("c2", "read", "{}"))
    assert reply.replayable


@pytest.mark.parametrize(
    "deltas",
    [
        [[{"id": "c1", "function": {"name": "a", "arguments": "{}"}}, {"id": "c2", "function": {"name": "b"}}]],
        [[{"index": 0, "id": "c1", "function": {"name": "a"}}, {"index": 0, "id": "c2", "function": {"name": "b"}}]],
        [[{"index": 0, "id": "c1", "function": {"name": "a"}}], [{"index": 0, "id": "c2", "function": {"name": "b"}}]],
        [[{"function": {"name": "a"}}], [{"function": {"name": "b"}}]],
    ],
)
def test_odd_tool_calls_stay_two_and_are_not_replayed(deltas: list[list[object]]) -> None:
    """No index, or one index for two ids: never one call named 'ab'."""
    reply = calls_of(*deltas)
    assert [call.name for call in reply.tool_calls] == ["a", "b"]
    assert not reply.replayable


@pytest.mark.parametrize(
    "odd",
    [
        [{"index": 3, "id": "c", "function": {"name": "a"}}],
        [{"index": 0, "function": {"name": "a"}}, {"index": 0, "function": {"name": "b"}}],
        ["call"],
        [{"index": 0, "function": "a"}],
    ],
)
def test_tool_calls_that_cannot_be_told_surely_are_not_replayed(odd: list[object]) -> None:
    """A skipped index, a second name, no object."""
    assert not calls_of(odd).replayable


def test_a_name_that_is_repeated_is_taken_once() -> None:
    """Some servers send id and name with every piece."""
    piece = {"index": 0, "id": "c", "function": {"name": "a", "arguments": "1"}}
    assert calls_of([piece], [piece]) == Reply("", "", (ToolCall("c", "a", "11"),), replayable=True, complete=False)


def test_usage_with_and_without_details() -> None:
    """Null where vLLM does not tell; nonsense is not taken."""
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    assert metered(event({"choices": [], "usage": usage})).usage == Usage(5, 4, 2)
    for details in (None, {}, {"cached_tokens": None}, "x"):
        assert metered(event({"choices": [], "usage": {**usage, "prompt_tokens_details": details}})).usage == Usage(
            5, None, 2
        )
    for bad in (None, "x", {}, {"prompt_tokens": "5"}, {"prompt_tokens": True}, {"prompt_tokens": -1}):
        assert metered(event({"choices": [], "usage": bad})).usage is None


@pytest.mark.parametrize("body", [{"error": {"message": "boom"}}, {"error": "boom"}, {"object": "error"}])
def test_an_error_in_the_stream_is_seen(body: object) -> None:
    """Also after some text, which is kept."""
    meter = metered(delta({"content": "Hi"}), event(body))
    assert meter.error
    assert replied(meter) == Reply("Hi", "", (), replayable=True, complete=False)


def test_of_several_choices_only_the_first_is_kept_and_not_replayed() -> None:
    """n > 1: the client may go on with any of them."""
    meter = metered(delta({"content": "a"}), delta({"content": "b"}, index=1), delta({}, "stop"))
    assert replied(meter) == Reply("a", "", (), replayable=False, complete=True)


def test_a_plain_answer_is_read_like_a_stream() -> None:
    """Its tool calls carry no index."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "a", "arguments": "{}"}}] * 2
    calls[1] = {**calls[1], "id": "c2"}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": calls}
    body = {
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    meter = Meter()
    meter.feed_json(json.dumps(body).encode(), 7.0)
    assert replied(meter) == Reply(
        "", "hm", (ToolCall("c1", "a", "{}"), ToolCall("c2", "a", "{}")), replayable=True, complete=True
    )
    assert (meter.usage, meter.first_token) == (Usage(1, None, 2), 7.0)


def test_the_text_of_a_bare_completion_is_its_content() -> None:
    """/v1/completions, streamed and plain."""
    choice = {"index": 0, "text": "abc", "finish_reason": "length"}
    assert replied(metered(event({"choices": [choice]}))).content == "abc"


def test_a_reply_above_the_bound_is_cut_and_not_replayed() -> None:
    """Memory for one answer stays bounded, whatever comes."""
    meter = metered(*[delta({"content": "x" * 1_000_000})] * 6)
    assert len(replied(meter).content) <= REPLY_BYTES
    assert not replied(meter).replayable
    many = metered(*[delta({"tool_calls": [{"index": n, "id": str(n)} for n in range(9000)]})] * 2)
    assert len(replied(many).tool_calls) * 256 <= REPLY_BYTES


def test_gaps_are_bounded() -> None:
    """One per token, up to a number that no capped answer reaches."""
    meter = metered(*[delta({"content": "x"})] * (MAX_GAPS + 50))
    assert len(meter.gaps) == MAX_GAPS


NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "delta", "message", "index", "tool_calls", "function", "name", "arguments", "content", "usage",
             "error", "finish_reason", "prompt_tokens", "id", "text", "prompt_tokens_details"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@given(NONSENSE)
def test_nothing_that_may_come_makes_it_fail(body: object) -> None:
    """It runs in the middle of a user's answer."""
    meter = metered(event(body), event({"choices": [body]}), event({"choices": [{"delta": body}]}), b"data: {no\n\n")
    meter.reply()
    plain = Meter()
    plain.feed_json(json.dumps(body).encode(), 0.0)
    plain.feed_json(b"\xff", 0.0)
    plain.reply()
