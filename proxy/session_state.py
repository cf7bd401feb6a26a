"""What is stored of a session beside its times: digests, places and counts, and its ledger where text may be stored."""

import orjson

from proxy.core.draft import Cut
from proxy.core.learned_lines import Lines
from proxy.core.ledger import Ledger
from proxy.core.ledger_pack import pack, unpack

State = tuple[tuple[bytes, ...], Lines, Cut | None, Ledger]


def dump(tools: tuple[bytes, ...], lines: Lines, cut: Cut | None, ledger: Ledger | None) -> bytes:
    """Return a session's state as bytes; without `ledger` no text is in them."""
    learned = sorted(lines.learned)
    recent = [[value.hex() for value in turn] for turn in lines.recent[-1:]] if learned else []
    state: dict[str, object] = {"tools": [value.hex() for value in tools], "lines": [recent, learned]}
    if cut is not None:
        state["cut"] = [cut.turn, cut.seen.hex(), cut.inner]
    if ledger is not None:
        state["ledger"] = pack(ledger).decode()
    return orjson.dumps(state)


def load(raw: bytes, max_bytes: int) -> State:
    """Return what `dump` wrote; a cold start where it is another version's."""
    try:
        state = orjson.loads(raw)
        tools = tuple(bytes.fromhex(value) for value in state["tools"])
        recent, learned = state["lines"]
        lines = Lines(tuple(tuple(map(bytes.fromhex, turn)) for turn in recent), frozenset(map(int, learned)))
        ledger = unpack(state["ledger"].encode(), max_bytes) if "ledger" in state else Ledger(max_bytes)
        return tools, lines, _cut(state.get("cut")), ledger
    except (ValueError, TypeError, KeyError, AttributeError):
        return (), Lines(), None, Ledger(max_bytes)


def _cut(row: list[object] | None) -> Cut | None:
    if row is None:
        return None
    turn, seen, inner = row
    return Cut(int(str(turn)), bytes.fromhex(str(seen)), int(str(inner)))
