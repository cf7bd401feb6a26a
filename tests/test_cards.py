"""The table of cards, and what users call them."""

import pytest

from proxy.core.cards import CARDS, card_of


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H200", "H200"), ("h100", "H100"), ("NVIDIA H100 80GB", "H100"), ("3090", "RTX 3090"), ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"), ("a10g", "A10G"), ("L4", "L4"), ("A100", "A100 80GB"),
        ("a100-40gb", "A100 40GB"), ("A100 80GB", "A100 80GB"),
    ],
)  # fmt: skip
def test_a_card_is_known_by_what_people_call_it(text: str, name: str) -> None:
    found = card_of(text)
    assert found is not None and found.name == name


@pytest.mark.parametrize(("text", "gib"), [("24", 24), ("47.5", 47.5), ("16GiB", 16), ("16 GB", 16)])
def test_a_number_is_a_card_of_that_many_gib(text: str, gib: float) -> None:
    found = card_of(text)
    assert found is not None and (found.memory_gib, found.lacks_fp8) == (gib, False)


@pytest.mark.parametrize("text", ["", "GTX 1080", "0", "-3", "nan", "inf", "5000"])
def test_what_is_neither_a_name_nor_a_size_is_refused(text: str) -> None:
    assert card_of(text) is None


def test_what_vllm_takes_at_a_time_depends_on_the_card() -> None:
    """From 70 GiB on more, but not on an A100; and Ampere has no FP8."""
    usual = {card.name: card.usual_batch for card in CARDS}
    assert usual["H100"] == usual["H200"] == (8192, 1024)
    assert usual["A100 80GB"] == usual["RTX 3090"] == (2048, 256)
    assert [card.name for card in CARDS if not card.lacks_fp8] == ["RTX 4090", "L4", "H100", "H200"]
