"""What is kept of an answer for those who come late or read slowly."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.replay import PART_BYTES, Replay

EVENT = b"data: {}\n\n"


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(0, 400))
def test_what_is_kept_is_the_end_of_what_was_relayed(pieces: list[bytes], most: int) -> None:
    """Every place after the base reads what follows it; earlier ones are gone."""
    replay, whole = Replay(), b"".join(pieces)
    for piece in pieces:
        replay.append(piece)
    assert replay.drop(most) == max(len(whole) - most, 0)
    assert (replay.end, replay.size) == (len(whole), min(most, len(whole)))
    for place in range(len(whole) + 1):
        assert replay.read(place) == (whole[place:] if place >= replay.base else None)


def test_a_part_ends_with_an_event() -> None:
    """So that what ends a stream early never follows half an event."""
    replay, events = Replay(), EVENT * (2 * PART_BYTES // len(EVENT) + 3)
    replay.append(events)
    parts, at = [], 0
    while part := replay.read(at):
        assert len(part) <= PART_BYTES and part.endswith(EVENT)
        parts.append(part)
        at += len(part)
    assert b"".join(parts) == events and len(parts) == 3


def test_an_event_larger_than_a_part_comes_in_several() -> None:
    """Nothing waits for its end."""
    replay = Replay()
    replay.append(b"x" * (PART_BYTES + 5))
    assert replay.read(0) == b"x" * PART_BYTES and replay.read(PART_BYTES) == b"x" * 5
