"""A ledger as bytes and back, for the store."""

import base64
from typing import Any

import orjson

from proxy.core.ledger import Ledger, Node


def pack(ledger: Ledger) -> bytes:
    """Return every node, texts included; only for a store that may hold text."""
    rows: list[list[object]] = []
    place: dict[int, int] = {id(ledger.root): -1}
    for i, node in enumerate(ledger.nodes()):
        place[id(node)] = i
        sent = None if node.sent is None else node.sent.decode()
        blocks = [[kind, _text(value)] for kind, value in node.blocks]
        flags = [node.keeps, node.in_full, node.cut]
        digests = [_text(node.seen), _text(node.short), _text(node.key)]
        rows.append([place[id(node.parent)], node.role, *digests, sent, flags, blocks, node.used])
    return orjson.dumps(rows)


def unpack(raw: bytes, max_bytes: int) -> Ledger:
    """Return the ledger that `pack` made; an empty one where the bytes are none of its (another version)."""
    ledger = Ledger(max_bytes)
    try:
        _fill(ledger, orjson.loads(raw))
    except (ValueError, TypeError, IndexError, AttributeError):
        return Ledger(max_bytes)
    return ledger


def _fill(ledger: Ledger, rows: list[Any]) -> None:
    """Hang the rows in the tree; whatever is not as `pack` writes it raises one of the errors that `unpack` catches."""
    nodes: list[Node] = []
    for at, role, seen, short, key, sent, (keeps, in_full, cut), blocks, used in rows:
        parent = ledger.root if at == -1 else nodes[at]
        told = tuple((str(kind), _bytes(value)) for kind, value in blocks)
        text = None if sent is None else str(sent).encode()
        node = Node(parent, str(role), _bytes(seen), _bytes(short), _bytes(key), text, bool(keeps), told, bool(in_full))
        node.cut, node.used = bool(cut), int(used)
        parent.children.append(node)
        nodes.append(node)
        ledger.size += node.size
        ledger.ticks = max(ledger.ticks, node.used)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(value: object) -> bytes:
    return base64.b64decode(str(value), validate=True)
