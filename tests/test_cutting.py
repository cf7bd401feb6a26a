"""Where a history is cut: marks, sizes, the fewest turns that must go, and the same place for a fresh process."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from proxy.core.counting import Counter
from proxy.core.cutting import (
    Marks,
    Sizes,
    anchored,
    bound,
    cut_at,
    exact,
    marks,
    next_cut,
    replayed,
    request_ends,
    turn_starts,
)
from proxy.core.draft import Cut, Draft
from proxy.core.ledger import Node
from proxy.core.pipeline import draft_of
from proxy.core.request import ChatRequest, Message
from tests.trimming import counted, t1

USER: Message = {"role": "user", "content": "w " * 6}
REPLY: Message = {"role": "assistant", "content": "w " * 6}
RESULT: Message = {"role": "tool", "tool_call_id": "1", "content": "w " * 6}
SYSTEM: Message = {"role": "system", "content": "w " * 3}


def drafted(*messages: Message) -> Draft:
    """Return a draft of these messages: 10 tokens each after the head."""
    return draft_of(ChatRequest(messages, {}))


def sizes(draft: Draft, stays: Callable[[int], int] = lambda _: 0) -> Sizes:
    """Return what is known of a draft all of whose messages cost 10, with 10 around them and 5 for a gap."""
    last = len(draft.entries) - 1
    after = {i: 10 * (last - i) for i in request_ends(draft)}
    return Sizes(10, 0, 0, 5, 0, 0, after, lambda _: 10, stays)


@pytest.mark.parametrize(
    ("size", "reserve", "most", "high"),
    [
        (1000, 100, None, 900),
        (1000, 900, None, 750),
        (1000, 0, None, 999),
        (1000, 100, 500, 500),
        (1000, 100, 950, 900),
    ],
)
def test_the_reserve_is_never_above_a_quarter_and_never_none(
    size: int, reserve: int, most: int | None, high: int
) -> None:
    """What fits is less than the context by the answer's reserve, and at most what the settings allow."""
    assert marks(size, reserve, 0.6, most) == Marks(high, int(high * 0.6))


def test_requests_end_at_user_messages_answered_results_and_the_end() -> None:
    """Two results of one reply are one end."""
    draft = drafted(SYSTEM, USER, REPLY, RESULT, RESULT, REPLY, USER, REPLY, RESULT)
    assert request_ends(draft) == [0, 3, 5, 7]
    assert turn_starts(draft) == [0, 5]
    assert request_ends(replace(draft, gone=frozenset({0, 1, 2, 3, 4}))) == [5, 7]


def test_the_fewest_whole_turns_go() -> None:
    """Five turns of 20: down to 60 is the two newest and a half, so the cut is at the newest but one."""
    draft = drafted(*[USER, REPLY] * 4, USER)
    cut = next_cut(draft, sizes(draft), None, 8, Marks(80, 65), 0)
    assert cut is not None
    assert (cut.turn, cut.inner) == (4, 5)
    assert sizes(draft).from_cut(cut, 8) == 10 + 5 + 50


def test_where_no_turn_is_short_enough_only_the_newest_is_left() -> None:
    """It may stay above the low mark, not above the high one."""
    draft = drafted(USER, REPLY, USER, REPLY, RESULT, REPLY, RESULT)
    cut = next_cut(draft, sizes(draft), None, 6, Marks(65, 20), 0)
    assert cut == cut_at(draft, 2)


def test_inside_the_newest_turn_calls_go_with_their_results_down_to_the_low_mark() -> None:
    """Never the newest of them."""
    draft = drafted(USER, *[REPLY, RESULT] * 5)
    known = sizes(draft)
    first = next_cut(draft, known, None, 10, Marks(100, 50), 0)
    assert first is not None
    assert (first.turn, first.inner) == (0, 9)
    second = next_cut(draft, known, first, 10, Marks(40, 10), 0)
    assert second == first


def test_a_cut_never_moves_back() -> None:
    """Only later turns are looked at."""
    draft = drafted(*[USER, REPLY] * 4, USER)
    cut = next_cut(draft, sizes(draft), cut_at(draft, 4), 8, Marks(40, 40), 0)
    assert cut == cut_at(draft, 8)
    assert next_cut(draft, sizes(draft), cut_at(draft, 8), 8, Marks(10, 10), 0) == cut_at(draft, 8)


def test_pinned_turns_are_passed_over() -> None:
    """The first turn that can go is the one after them."""
    draft = drafted(*[USER, REPLY] * 3, USER)
    known = replace(sizes(draft), pinned=20, until=2)
    cut = next_cut(draft, known, None, 6, Marks(70, 65), 1)
    assert cut == cut_at(draft, 4)
    assert known.from_cut(cut_at(draft, 4), 6) == 10 + 20 + 5 + 30


def test_replayed_marks_cut_where_a_growing_chat_was_cut() -> None:
    """Turn by turn or all at once: the same place."""
    draft = drafted(*[USER, REPLY] * 20, USER)
    limits = Marks(100, 60)
    cut: Cut | None = None
    known = sizes(draft)
    for end in request_ends(draft):
        total = known.uncut(end) if cut is None else known.from_cut(cut, end)
        cut = next_cut(draft, known, cut, end, limits, 0) if total > limits.high else cut
    assert cut is not None
    assert replayed(draft, known, limits, 0) == cut
    assert replayed(draft, known, Marks(10_000, 10), 0) is None


def test_what_stays_wherever_the_cut_is_counts() -> None:
    """A system message in the middle is in every prompt."""
    draft = drafted(*[USER, REPLY] * 4, USER)
    known = sizes(draft, stays=lambda place: 30 if place > 2 else 0)
    assert known.from_cut(cut_at(draft, 4), 8) == 10 + 5 + 50 + 30


def _anchor(draft: Draft, place: int, tokens: int, family: bytes = b"f") -> Draft:
    entries = [
        entry._replace(node=Node(None, entry.role)) if i <= place else entry for i, entry in enumerate(draft.entries)
    ]
    node = entries[place].node
    assert node is not None
    node.upto, node.family = tokens, family
    return replace(draft, entries=tuple(entries))


def test_a_count_of_vllm_is_where_the_next_one_begins() -> None:
    """Bytes only of what is new: more than its tokens, far less than the whole prompt's bytes."""
    draft = _anchor(drafted(SYSTEM, USER, REPLY, USER), 0, 25)
    assert anchored(draft, b"f") == 0
    assert anchored(draft, b"other") is None
    assert 25 + 20 <= bound(draft, b"f", 0) < bound(draft, b"other", 0) + 25
    counter = Counter({})
    assert exact(draft, b"f", counter) is None
    answers = {key: counted(question) for key, question in counter.missing.items()}
    assert exact(draft, b"f", Counter(answers)) == 25 + 20


def test_a_count_behind_a_changed_message_is_no_anchor() -> None:
    """vLLM counted another prompt."""
    draft = _anchor(drafted(SYSTEM, USER, REPLY, USER, REPLY), 2, 45)
    changed = draft.with_entry(1, draft.entries[1]._replace(node=None))
    assert anchored(draft, b"f") == 2
    assert anchored(changed, b"f") is None


@pytest.mark.parametrize("messages", [(SYSTEM, USER, REPLY, USER), (USER,), (SYSTEM, REPLY, USER, REPLY, RESULT)])
def test_an_exact_count_is_the_prompts(messages: tuple[Message, ...]) -> None:
    """Asked piece by piece, it adds up to what the whole would have been counted."""
    draft, counter = drafted(*messages), Counter({})
    assert exact(draft, b"f", counter) is None
    answers = {key: counted(question) for key, question in counter.missing.items()}
    assert exact(draft, b"f", Counter(answers)) == t1(messages)


def test_a_count_is_never_a_difference_over_a_gap() -> None:
    """Two counts from before the cut hold what has gone."""
    draft = _anchor(_anchor(drafted(SYSTEM, *[USER, REPLY] * 3, USER), 6, 300), 0, 25)
    gone = replace(draft, gone=frozenset({2, 3}), cut=Cut(4, draft.entries[4].seen, 5))
    counter = Counter({})
    assert exact(gone, b"g", counter) is None
    answers = {key: counted(question) for key, question in counter.missing.items()}
    assert exact(gone, b"g", Counter(answers)) == t1(gone.request().messages)
