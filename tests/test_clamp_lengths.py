"""Output lengths: lowered to the cap, never raised; refused by name where they are no length (cases LL-03, LL-05)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.clamp_lengths import clamp_lengths, ended_at, given_limit, hint, limit_of, whole
from proxy.core.draft import Draft, Facts, Lengths
from proxy.core.ledger import Ledger
from proxy.core.meter import Meter
from proxy.core.reject import Reject


def clamped(
    rest: dict[str, Any], cap: int | None = 50, default: int | None = None, room: int | None = 1000
) -> dict[str, Any]:
    """Return the fields that go up."""
    facts = Facts(frozenset(), Ledger(0), lengths=Lengths(cap, default, room))
    return dict(clamp_lengths(Draft((), (), rest), facts).rest)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, -2, 1.5, True, False, "5", [], {}, [5], 0.5, -0.0])
def test_what_is_no_length_is_refused_by_name(field: str, value: Any) -> None:
    """One choice for -1: a 400, as vLLM itself answers."""
    with pytest.raises(Reject) as caught:
        clamped({field: value})
    assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize("value", [None, "absent"])
def test_no_length_gets_the_default_or_the_cap(value: Any) -> None:
    """null counts as absent (LL-03)."""
    rest = {} if value == "absent" else {"max_tokens": None, "max_completion_tokens": None}
    assert clamped(rest) == {"max_tokens": 50}
    assert clamped(rest, default=20) == {"max_tokens": 20}
    assert clamped(rest, default=99) == {"max_tokens": 50}
    assert clamped(rest, cap=None) == {}
    assert clamped(rest, cap=None, default=5000) == {"max_tokens": 1000}


def test_without_the_models_length_no_default_is_made() -> None:
    """A number above max_model_len would be refused by vLLM."""
    assert clamped({"max_tokens": None}, room=None) == {}
    assert clamped({"max_tokens": 60}, room=None) == {"max_tokens": 50}


@pytest.mark.parametrize(
    ("told", "sent"),
    [
        ({"max_tokens": 100, "max_completion_tokens": 50}, {"max_tokens": 100, "max_completion_tokens": 50}),
        ({"max_completion_tokens": 50}, {"max_completion_tokens": 50}),
        ({"max_tokens": 100, "max_completion_tokens": None}, {"max_tokens": 100, "max_completion_tokens": None}),
    ],
)
def test_below_the_cap_both_fields_stay_as_they_are(told: dict[str, Any], sent: dict[str, Any]) -> None:
    """vLLM takes max_completion_tokens where both are given (LL-05)."""
    assert clamped(told, cap=200) == sent


@given(
    st.none() | st.integers(1, 300),
    st.none() | st.integers(1, 300),
    st.none() | st.integers(1, 300),
    st.none() | st.integers(1, 300),
    st.none() | st.integers(1, 300),
)
def test_the_effective_length_is_never_above_what_was_asked_nor_above_the_limits(
    tokens: int | None, completion: int | None, cap: int | None, default: int | None, room: int | None
) -> None:
    """After clamping the field that was effective carries the value, and the other cannot exceed the limit (LL-05)."""
    sent = clamped({"max_tokens": tokens, "max_completion_tokens": completion}, cap, default, room)
    asked = completion if completion is not None else tokens
    got = sent.get("max_completion_tokens") if sent.get("max_completion_tokens") is not None else sent.get("max_tokens")
    limit = min((v for v in (cap, room) if v is not None), default=None)
    if asked is not None:
        assert got == (asked if limit is None else min(asked, limit))
    if limit is not None:
        assert all(sent[f] is None or sent[f] <= limit for f in sent)


def test_a_whole_number_may_be_spelled_as_a_float() -> None:
    """5.0 is five; below the cap it goes up as it was spelled."""
    assert clamped({"max_tokens": 5.0}) == {"max_tokens": 5.0}
    assert clamped({"max_tokens": 1e300}) == {"max_tokens": 50}
    assert whole(2**80, "x") == 2**80


def test_the_hint_never_goes_up() -> None:
    """vLLM does not know max_expected_tokens."""
    assert clamped({"max_expected_tokens": 5, "max_tokens": 7}) == {"max_tokens": 7}
    assert hint({"max_expected_tokens": 5}) == 5 and hint({}) is None and hint({"max_expected_tokens": None}) is None
    with pytest.raises(Reject, match="max_expected_tokens"):
        hint({"max_expected_tokens": "many"})


def test_what_needs_no_change_is_the_same_draft() -> None:
    """No field is written anew for nothing."""
    facts = Facts(frozenset(), Ledger(0), lengths=Lengths(50, None, 1000))
    draft = Draft((), (), {"max_tokens": 5})
    assert clamp_lengths(draft, facts) is draft
    assert limit_of(Lengths()) is None


@pytest.mark.parametrize("rest", [{}, {"max_tokens": 900}])
def test_an_exact_count_of_the_prompt_lowers_the_limit_to_the_room(rest: dict[str, Any]) -> None:
    """An upper bound alone does not: it would cut answers that have room."""
    facts = Facts(frozenset(), Ledger(0), lengths=Lengths(950, None, 1000))
    for exact, expected in ((True, 200), (False, rest.get("max_tokens", 950))):
        draft = Draft((), (), rest, counted=800, exact=exact)
        assert clamp_lengths(draft, facts).rest["max_tokens"] == expected
    full = Draft((), (), rest, counted=1000, exact=True)
    assert clamp_lengths(full, facts).rest["max_tokens"] == 1


def test_a_hint_of_the_wrong_type_is_refused_also_where_nobody_uses_it() -> None:
    """The client should learn of it where it makes the mistake."""
    with pytest.raises(Reject, match="max_expected_tokens"):
        clamped({"max_expected_tokens": [], "max_tokens": 5})


@pytest.mark.parametrize(
    ("asked", "sent", "limit"),
    [
        ({}, {"max_tokens": 50}, 50),
        ({"max_tokens": None}, {"max_tokens": 50}, 50),
        ({"max_tokens": 60}, {"max_tokens": 50}, 50),
        ({"max_tokens": 60, "max_completion_tokens": 40}, {"max_tokens": 50, "max_completion_tokens": 40}, None),
        ({"max_tokens": 50.0}, {"max_tokens": 50.0}, None),
        ({}, {}, None),
    ],
)
def test_our_limit_is_told_from_the_clients(asked: dict[str, Any], sent: dict[str, Any], limit: int | None) -> None:
    """By the field that holds."""
    assert given_limit(asked, sent, ("max_completion_tokens", "max_tokens")) == limit


def test_an_answer_ended_at_our_limit_only_if_it_reached_it() -> None:
    """A full context ends answers too, and that is nobody's setting."""
    meter = Meter()
    assert not ended_at(5, meter)
    meter.feed(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n', 0.0)
    assert ended_at(5, meter) and not ended_at(None, meter)
    meter.feed(b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\n', 0.0)
    assert not ended_at(5, meter) and ended_at(4, meter)
