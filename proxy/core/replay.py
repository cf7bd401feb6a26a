"""What a run has relayed so far, bounded, for those who join late or read slowly."""

PART_BYTES = 64 * 1024
"""What is handed to one reader at a time: as much as aiohttp buffers before it waits."""


class Replay:
    """The bytes of one answer from `base` to `end`, counted from its start."""

    def __init__(self) -> None:
        self.base = 0
        self._held = bytearray()

    @property
    def end(self) -> int:
        """How many bytes the answer has so far."""
        return self.base + len(self._held)

    @property
    def size(self) -> int:
        """How many bytes of it are kept."""
        return len(self._held)

    def append(self, data: bytes) -> None:
        """Add what was relayed."""
        self._held += data

    def read(self, at: int) -> bytes | None:
        """Return what comes after the first `at` bytes, at most `PART_BYTES` and to an event's end; None if dropped."""
        if at < self.base:
            return None
        begin = at - self.base
        part = bytes(self._held[begin : begin + PART_BYTES])
        if begin + len(part) < len(self._held):
            part = part[: part.rfind(b"\n\n") + 2] if b"\n\n" in part else part
        return part

    def drop(self, most: int) -> int:
        """Keep only the last `most` bytes; return how many went."""
        gone = max(len(self._held) - most, 0)
        del self._held[:gone]
        self.base += gone
        return gone
