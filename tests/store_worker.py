"""A process of its own that uses the store: `python -m tests.store_worker increment|write PATH`."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from proxy.store.sessions import SessionRow, open_store
from tests.store_help import key, row

ROUNDS = 500
# A row is whole when its skeleton, state and turns belong together.
PATTERN_BYTES = 3000


def whole(number: int, turn: int) -> SessionRow:
    """Make a row whose parts tell whether they were written together."""
    return replace(row(number, turns=turn), skeleton=turn.to_bytes(8, "big"), state=bytes([turn % 256]) * PATTERN_BYTES)


def is_whole(found: SessionRow) -> bool:
    """Check such a row."""
    return found == replace(
        found, skeleton=found.turns.to_bytes(8, "big"), state=bytes([found.turns % 256]) * PATTERN_BYTES
    )


async def increment(path: Path) -> None:
    """Read a row, then write it with one turn more, many times."""
    failures: list[str] = []
    async with open_store(path, on_failure=failures.append) as store:
        for _ in range(ROUNDS):
            await store.update(
                key(1), lambda old: row(1, turns=1) if old is None else replace(old, turns=old.turns + 1)
            )
        print(len(failures), store.degraded)


async def write(path: Path) -> None:
    """Write until killed; tell after each flush what is on disk for sure."""
    async with open_store(path, write_delay_seconds=0) as store:
        turn = 0
        while True:
            turn += 1
            for number in range(20):
                store.put(whole(number, turn))
            await store.flush()
            print(turn, flush=True)


if __name__ == "__main__":
    asyncio.run({"increment": increment, "write": write}[sys.argv[1]](Path(sys.argv[2])))
