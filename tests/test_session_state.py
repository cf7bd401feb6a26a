"""What is stored of a session: digests, places and counts, and nothing that anybody wrote unless that is allowed."""

import pytest

from proxy.core.draft import Cut, records_of
from proxy.core.learned_lines import Lines
from proxy.core.ledger import Ledger
from proxy.core.pipeline import draft_of
from proxy.core.request import ChatRequest
from proxy.session_state import dump, load

LINES = Lines(((b"a" * 16, b"b" * 16),), frozenset({0}))
CUT = Cut(12, b"c" * 16, 15)
SECRET = "what the user wrote"


def ledger() -> Ledger:
    """A ledger that knows a text."""
    out = Ledger(1 << 20)
    request = ChatRequest(({"role": "user", "content": f"<source>{SECRET}</source>"},), {})
    node = out.record(records_of(draft_of(request), ()))
    out.add_reply(node, {"role": "assistant", "content": f" {SECRET}"})
    return out


def test_tools_lines_and_cut_come_back_as_they_were() -> None:
    """Without the ledger, which is empty then."""
    tools, lines, cut, held = load(dump((b"t" * 16,), LINES, CUT, None), 1000)
    assert (tools, lines, cut) == ((b"t" * 16,), LINES, CUT)
    assert (held.size, held.max_bytes) == (0, 1000)


def test_a_session_without_a_cut_has_none() -> None:
    """It is not stored as one at the front."""
    assert load(dump((), Lines(), None, None), 1000)[2] is None


def test_text_is_stored_only_with_the_ledger() -> None:
    """Every word that anybody wrote is in there, and nowhere else."""
    assert SECRET.encode() not in dump((), LINES, CUT, None)
    raw = dump((), LINES, CUT, ledger())
    assert SECRET.encode() in raw
    assert load(raw, 1 << 20)[3].size == ledger().size


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"tools":["zz"],"lines":[[],[]]}',
        b'{"tools":[],"lines":[[],[]],"cut":[1]}',
        b'{"tools":[],"lines":[[],[]],"cut":["x","00",1]}',
        b'{"tools":[],"lines":[[],[]],"cut":5}',
        b'{"tools":[],"lines":[[],[]],"ledger":5}',
    ],
)
def test_another_versions_state_is_a_cold_start(raw: bytes) -> None:
    """It never costs an answer."""
    tools, lines, cut, held = load(raw, 1000)
    assert (tools, lines, cut, held.size) == ((), Lines(), None, 0)


def test_only_lines_that_were_learned_are_stored() -> None:
    """What is still watched begins anew after a restart."""
    watched = Lines(LINES.recent, frozenset())
    assert load(dump((), watched, None, None), 1000)[1] == Lines()
