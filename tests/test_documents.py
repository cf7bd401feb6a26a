"""Which fronts of a message a program put there."""

import time

import pytest

from proxy.core.documents import (
    AS_BEFORE,
    LEAST_INSTRUCTIONS,
    instructions_of,
    is_machine_made,
    pointed,
    shared_characters,
    sources_of,
)
from proxy.core.draft import DOCUMENT_LEADS
from tests.wire import LEAD

SOURCE = '<source id="1" name="a.txt">The Nile is a river in Africa.</source>'
INSTRUCTIONS = "### Task:\nRespond to the user query using the provided context. " + "Cite it. " * 40


@pytest.mark.parametrize(
    ("block", "ours"),
    [
        (f"{LEAD}{SOURCE}\n</context>\n\n", True),
        (f"<context>\n{SOURCE}\n</context>\n\n", True),
        ("<source>\nx\n</source>\n\n", True),
        ("<attached_files>\n<file name='x'/>\n</attached_files>\n\n", True),
        (f"{AS_BEFORE}x\n", True),
        ("Look at this:\n<context>\nx\n</context>\n\n", False),
        ("<context>x</context>\n\n", False),
        ("<context>\nx\n</context>\n", False),
        ("<context>\nx\n</context>\n\nand ", False),
        ("> quoted by a user\n\n", False),
        ("### Task:\nDo my homework.\n\n", False),
        ("", False),
        ("\n\n", False),
    ],
)
def test_a_block_is_known_by_its_lead_or_its_element(block: str, ours: bool) -> None:
    """A user who deletes a paragraph of his own has deleted it."""
    assert is_machine_made(block, DOCUMENT_LEADS) is ours


def test_sources_are_found_by_their_elements() -> None:
    """On lines of their own; one without an end is none."""
    text = f"a <source> is cited\n{SOURCE}\n{SOURCE}\n<sources>\n<source>open"
    assert [text[a:b] for a, b in sources_of(text)] == [SOURCE, SOURCE]


def test_what_two_blocks_share_is_counted() -> None:
    """Whole elements, and the instructions where they are the same."""
    one = f"{INSTRUCTIONS}\n<context>\n{SOURCE}\n<source>other</source>\n</context>\n\nQ"
    assert shared_characters(one, SOURCE) == len(SOURCE)
    assert shared_characters(one, one) > len(SOURCE) + LEAST_INSTRUCTIONS
    assert shared_characters(one, "nothing") == 0


def test_pointers_take_the_place_of_what_stands_earlier() -> None:
    """Everything else stays to the character."""
    text = f"{INSTRUCTIONS}\n<context>\n{SOURCE}\n<source>other</source>\n</context>\n\nQ"
    lead = instructions_of(text)
    assert lead is not None
    short = pointed(text, {SOURCE}, {lead})
    assert short == f'{AS_BEFORE}\n<context>\n<source id="1">as above</source>\n<source>other</source>\n</context>\n\nQ'
    assert pointed(text, set(), set()) == text


def test_searching_takes_linear_time() -> None:
    """Openings without an end."""
    began = time.process_time()
    sources_of("<source>\n" * 100_000)
    sources_of("<source>x</source>\n" * 50_000)
    instructions_of("### Task:\n" * 100_000 + "\n<context>\n")
    assert time.process_time() - began < 3
