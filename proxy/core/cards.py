"""Common cards: how much of their memory a process sees, and what they can do."""

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1024**3
_FP8_CAPABILITY = 8.9


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU.  The memory is what PyTorch reports as its total, which is less than the name says."""

    name: str
    memory_gib: float
    capability: float | None = None  # None: not known

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes."""
        return int(self.memory_gib * GIB)

    @property
    def lacks_fp8(self) -> bool:
        """Whether it is known that keys and values cannot be held in FP8 (vLLM asks for capability 8.9)."""
        return self.capability is not None and self.capability < _FP8_CAPABILITY

    @property
    def usual_batch(self) -> tuple[int, int]:
        """vLLM 0.32's own --max-num-batched-tokens and --max-num-seqs for a server on this card."""
        if self.memory_gib >= 160:
            return 16_384, 1024
        return (8192, 1024) if self.memory_gib >= 70 and "A100" not in self.name else (2048, 256)


CARDS = (
    Card("RTX 3060", 11.6, 8.6),
    Card("RTX 3090", 23.5, 8.6),
    Card("RTX 4090", 23.5, 8.9),
    Card("A10G", 22.0, 8.6),
    Card("L4", 22.0, 8.9),
    Card("A100 40GB", 39.4, 8.0),
    Card("A100 80GB", 79.1, 8.0),
    Card("H100", 79.1, 9.0),
    Card("H200", 139.8, 9.0),
)
_OTHER_NAMES: Mapping[str, str] = {"a100": "a10080gb", "a10040": "a10040gb", "a10080": "a10080gb", "h10080gb": "h100"}


def card_of(text: str) -> Card | None:
    """Return the card of that name (with or without its family: 3090), or one with that many GiB; else None."""
    name = "".join(sign for sign in text.lower() if sign.isalnum()).removeprefix("nvidia").removeprefix("geforce")
    name = _OTHER_NAMES.get(name, name)
    known = {card.name.lower().replace(" ", ""): card for card in CARDS}
    if found := known.get(name) or known.get(f"rtx{name}"):
        return found
    try:
        gib = float(text.lower().removesuffix("gib").removesuffix("gb"))
    except ValueError:
        return None
    return Card(f"a card of {gib:g} GiB", gib) if 1 <= gib <= 1000 else None
