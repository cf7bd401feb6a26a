"""Lines that prove volatile: three values in three turns, in one place of a head that else stays."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.learned_lines import MOST_LINES, Lines, fits, learn, skeleton_of

HEAD = [
    "You are the desk of a harbour.",
    "Queue: {} ships",
    "Answer shortly, in the language of the question, and kindly.",
]


def after(*values: str, head: list[str] = HEAD) -> Lines:
    """Return what is known after one turn a value."""
    known = Lines()
    for value in values:
        known = learn(known, [line.format(value) for line in head])
    return known


def test_a_line_with_three_values_in_three_turns_is_learned() -> None:
    assert after("1", "2").learned == frozenset()
    assert after("1", "2", "3").learned == {1}


def test_one_edit_is_an_edit() -> None:
    """And so are two, where the line then stays."""
    assert after("1", "2", "2", "2").learned == frozenset()
    assert after("1", "2", "1", "2").learned == frozenset()


def test_a_regenerated_answer_is_no_turn() -> None:
    """It tells the same lines once more."""
    assert after("1", "1", "1", "2", "2", "3").learned == {1}


def test_a_head_of_another_shape_begins_anew() -> None:
    known = learn(after("1", "2", "3"), ["only", "two lines, of which none changed"])
    assert known.learned == frozenset() and len(known.recent) == 1


def test_learned_lines_stay_under_a_third_of_the_text() -> None:
    """Else the head is data, and moving it would move everything."""
    assert after("1", "2", "3", head=["Short.", "A much longer line that changes each time: {}"]).learned == frozenset()


def test_data_is_no_template() -> None:
    assert learn(Lines(), ["x"] * (MOST_LINES + 1)) == Lines()


def test_what_one_chat_learned_holds_for_another_of_the_same_skeleton() -> None:
    known = after("1", "2", "3")
    lines = [line.format("99") for line in HEAD]
    assert fits(skeleton_of(known), known.learned, lines)
    assert not fits(skeleton_of(known), known.learned, [*lines[:2], "Answer at length."])
    assert not fits(skeleton_of(known), known.learned, lines[:1])
    assert learn(Lines(), lines, known.learned).learned == {1}


@given(st.lists(st.lists(st.text("ab12 ", max_size=6), min_size=1, max_size=5), max_size=8))
def test_places_are_always_lines_of_the_last_head(turns: list[list[str]]) -> None:
    known = Lines()
    for lines in turns:
        known = learn(known, lines)
        assert all(0 <= place < len(lines) for place in known.learned)
        assert len(known.recent) <= 3
