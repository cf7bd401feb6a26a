"""What one chat learned of a head holds for its tenant, then for all; bounded, and kept over a restart."""

from pathlib import Path

from proxy.learning import MOST_PATTERNS, Learning
from proxy.store.sessions import open_store

A, B, C, D = (bytes([n]) * 16 for n in range(4))
HEAD, PLACES = b"h" * 16, frozenset({1})


def test_a_pattern_is_its_tenants_until_three_showed_it() -> None:
    learning = Learning()
    learning.note(A, HEAD, PLACES)
    learning.note(A, HEAD, PLACES)
    learning.note(B, HEAD, PLACES)
    assert learning.patterns(A) == ((HEAD, PLACES),) and learning.patterns(D) == ()
    learning.note(C, HEAD, PLACES)
    assert learning.patterns(D) == ((HEAD, PLACES),)


def test_the_pattern_shown_longest_ago_goes_first() -> None:
    learning = Learning()
    for number in range(MOST_PATTERNS + 1):
        learning.note(A, number.to_bytes(16, "big"), PLACES)
    known = learning.patterns(A)
    assert len(known) == MOST_PATTERNS and known[-1][0] == (1).to_bytes(16, "big")


async def test_a_restart_keeps_it_and_a_foreign_value_is_no_failure(tmp_path: Path) -> None:
    async with open_store(tmp_path / "s.db") as store:
        learning = Learning(store)
        for tenant in (A, B, C):
            learning.note(tenant, HEAD, PLACES)
        await store.flush()
    async with open_store(tmp_path / "s.db") as store:
        learning = Learning(store)
        await learning.load()
        assert learning.patterns(D) == ((HEAD, PLACES),)
        store.put_meta("learned_lines", b'[["zz",[1],["00"]]]')
        await learning.load()
        assert learning.patterns(A) == ()
