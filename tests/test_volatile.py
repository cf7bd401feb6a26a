"""What of a system text is volatile: blocks from its end, times in its lines; every line is in one of the two."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.draft import DOCUMENT_LEADS
from proxy.core.volatile import Parted, block, part
from tests.strategies import WEIRD
from tests.webui import CLOCKS
from tests.wire import LEAD

MEMORY = "<memory_context>\n- likes tea\n</memory_context>"
DOCUMENTS = f"{LEAD}<source>a</source>\n</context>"
SUMMARY = "[CONVERSATION SUMMARY]\nThey met.\n</memory_context>"


def parted(text: str, *tags: str) -> Parted:
    """Part a text with the defaults."""
    return part(text, tags=tags, leads=DOCUMENT_LEADS)


def kinds(found: Parted) -> list[str]:
    """Return the kinds of the blocks in their order."""
    return [b.kind for b in found.blocks]


def test_blocks_are_taken_from_the_end_in_their_order() -> None:
    """Documents, memory, summary: the head is left."""
    found = parted(f"Rules.\n\n{DOCUMENTS}\n{MEMORY}\n\n{SUMMARY}")
    assert found.head == "Rules.\n" and kinds(found) == ["documents", "tag:memory_context", "summary"]
    assert [b.text for b in found.blocks] == [DOCUMENTS, MEMORY, SUMMARY]


@pytest.mark.parametrize(
    "text",
    [
        f"{MEMORY}\nRules come after.",
        "Talk about <memory_context> and </memory_context>",
        "inline <memory_context>x</memory_context>",
        "</memory_context>",
        "<context>\nadmin's own\n</context>",
        "We speak of [CONVERSATION SUMMARY] here.",
        "A\n<news>\nx\n</news>",
    ],
)
def test_what_only_looks_like_a_block_stays(text: str) -> None:
    """Only whole lines from the end, in known tags."""
    assert parted(text) == Parted(text, ())


def test_configured_tags_are_blocks() -> None:
    """A filter of the operator's."""
    found = parted("A\n<news>\nx\n</news>", "news")
    assert (found.head, kinds(found)) == ("A", ["tag:news"])


def test_a_text_that_is_a_block_leaves_no_head() -> None:
    """A system message of memory alone."""
    assert parted(MEMORY).head == "" and kinds(parted(MEMORY)) == ["tag:memory_context"]


def test_a_block_is_known_by_kind_and_text() -> None:
    """Two kinds with one text are two."""
    assert block("a", "x").digest != block("b", "x").digest and block("a", "x") == block("a", "x")


PIECES = ["Rules.", "", MEMORY, DOCUMENTS, SUMMARY, "See John 3:16.", *WEIRD, *("".join(c).format(
    h=10, h12=10, m=11, s=12) for c in CLOCKS)]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=7).map("\n".join))
@settings(max_examples=200, deadline=None)
def test_every_line_is_in_the_head_or_in_a_block(text: str) -> None:
    """Times of day aside, which stand in the clock's block."""
    found = parted(text)
    lines = [*found.head.split("\n"), *(line for b in found.blocks for line in b.text.split("\n"))]
    for line in text.split("\n"):
        clock = any(line == "".join(c).format(h=10, h12=10, m=11, s=12) for c in CLOCKS) or line == "now 10:00"
        assert not line or line in lines or (clock and any(k.startswith("clock") for k in kinds(found))), line
    assert all(b.text for b in found.blocks)


def test_parting_takes_linear_time() -> None:
    """Many blocks, many openings without an end, a megabyte of clocks: no second."""
    began = time.process_time()
    for text in (f"{MEMORY}\n" * 2000, "<memory_context>\n" * 20_000 + "</memory_context>", "now 10:30\n" * 100_000):
        parted(text)
    assert time.process_time() - began < 6


def test_a_line_that_a_client_writes_anew_each_time_moves_whole() -> None:
    """Claude Code's first system block (PC-12); a user's text is never looked at here."""
    found = parted("x-anthropic-billing-header: cc_version=1.2.3; cch=11111;\nYou are X.")
    assert found.head == "You are X."
    assert [b.text for b in found.blocks] == ["x-anthropic-billing-header: cc_version=1.2.3; cch=11111;"]
    assert parted("explain x-anthropic-billing-header: cch=3;").blocks == ()
