"""What was sent: a tree of one session's messages, each as the client told it and, where different, as it went up.

A path from the root is one conversation as vLLM knows it.  Edits, regenerations and the same model picked twice are
branches; nothing is cut but the oldest leaves when the session outgrows its bytes.  Reading (`children`) is free of
side effects, so that a step may do it; `record` and `add_reply` are called by the shell once a request went up.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from proxy.core.request import Message
from proxy.core.text import kept, packed, reply_key, unpacked

NODE_BYTES = 320
"""What a node costs beside its text, measured with tracemalloc on CPython 3.11 and rounded up."""


@dataclass(slots=True, eq=False)
class Node:
    """A message in its place: how it was told, how it went up.

    `sent` is packed JSON of the messages that go out in its place ([note,] message), None where what was told goes out.
    In `sent` null stands for a message that goes out as told.  `upto` is vLLM's count of the prompt that ended here, in
    tokens, 0 where none did; `family` says with which head and cut.
    `keeps` marks a `sent` that repeats what was told, kept because its front may vanish (a document block).
    """

    parent: "Node | None"
    role: str
    seen: bytes = b""
    short: bytes = b""
    key: bytes = b""
    sent: bytes | None = None
    keeps: bool = False
    blocks: tuple[tuple[str, bytes], ...] = ()
    in_full: bool = False
    cut: bool = False
    used: int = 0
    upto: int = 0
    family: bytes = b""
    children: list["Node"] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes that the node holds."""
        return NODE_BYTES + (len(self.sent) if self.sent is not None else 0)

    @property
    def private(self) -> bool:
        """Whether its note tells more than a time of day: never given to a chat that was found by content."""
        return any(not kind.startswith("clock") for kind, _ in self.blocks)

    def messages(self) -> tuple[Message | None, ...] | None:
        """Return what went up in its place, note first, None for what was told; None alone where just that goes out."""
        if self.sent is None:
            return None
        value = unpacked(self.sent)
        return tuple(value) if isinstance(value, list) else None


class Record(NamedTuple):
    """One message of a request that went up, to be remembered in its place."""

    role: str
    seen: bytes
    node: Node | None = None
    sent: bytes | None = None
    keeps: bool = False
    blocks: tuple[tuple[str, bytes], ...] = ()
    followed: bool = False
    short: bool = False


class Ledger:
    """The tree of one session, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.root = Node(None, "")
        self.max_bytes = max_bytes
        self.size = 0
        self.ticks = 0

    def record(self, records: Iterable[Record]) -> Node:
        """Remember a request that goes up, message by message; return the node of its last message."""
        at = self.root
        self.ticks += 1
        for told in records:
            at = self._place(at, told)
            at.used = self.ticks
        self._shrink(at)
        return at

    def _place(self, at: Node, told: Record) -> Node:
        node = told.node
        if node is None or node.parent is not at:
            node = next((n for n in at.children if _same(n, told)), None) or self._add(at, told)
        else:
            self._put_back(node)
        if told.short:
            node.short = told.seen
        elif told.seen and not node.seen:
            self._first_told(node, told)
        if told.followed and told.seen == node.seen:
            node.in_full = True
        return node

    def _put_back(self, node: Node) -> None:
        """A node may have been shed while its request was on its way: it and its path are put back."""
        while node.parent is not None and node not in node.parent.children:
            node.parent.children.append(node)
            self.size += node.size
            node = node.parent

    def _first_told(self, node: Node, told: Record) -> None:
        """A generated reply is told for the first time: where it is told as it was written, its text can go."""
        node.seen = told.seen
        if told.sent is None and node.sent is not None:
            self.size -= len(node.sent)
            node.sent = None
        node.cut = False

    def _add(self, at: Node, told: Record) -> Node:
        sent = kept(told.sent) if told.sent is not None else None
        node = Node(at, told.role, told.seen, b"", b"", sent, told.keeps, told.blocks)
        self._hang(node, at)
        return node

    def _hang(self, node: Node, at: Node) -> None:
        at.children = [*at.children, node]  # of exact size: nearly all have one child, and `append` makes room for four
        self.size += node.size

    def add_reply(self, at: Node, message: Message, *, cut: bool = False) -> Node:
        """Remember what vLLM generated after `at`; `cut`: the stream ended early, the client may know more or less."""
        self._put_back(at)
        key = reply_key(message)
        sent = packed([message])
        same = next((n for n in at.children if n.role == "assistant" and n.key == key and n.sent in (None, sent)), None)
        if same is not None:
            same.used = self.ticks
            return same
        node = Node(at, "assistant", key=key, sent=kept(sent), cut=cut, used=self.ticks)
        self._hang(node, at)
        self._shrink(node)
        return node

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the root, parents before their children, children in their order."""
        pending = self.root.children[::-1]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(reversed(node.children))

    def _shrink(self, keep: Node) -> None:
        """Shed the leaves used longest ago until the tree fits; the path to `keep` stays."""
        if self.size <= self.max_bytes:
            return
        kept: set[int] = set()
        at: Node | None = keep
        while at is not None:
            kept.add(id(at))
            at = at.parent
        leaves = sorted((n for n in self.nodes() if not n.children and id(n) not in kept), key=lambda n: n.used)
        for leaf in leaves:
            self._shed(leaf, kept)
            if self.size <= self.max_bytes:
                return
        self._forget_path(keep)

    def _shed(self, leaf: Node, kept: set[int]) -> None:
        node: Node | None = leaf
        while node is not None and node.parent is not None and not node.children and id(node) not in kept:
            node.parent.children.remove(node)
            self.size -= node.size
            node = node.parent

    def _forget_path(self, keep: Node) -> None:
        """One conversation alone is too large: it starts anew from here, at the cost of one cold turn."""
        if self.size > self.max_bytes:
            for node in list(self.nodes()):  # so that one that is put back later brings nothing uncounted with it
                node.children.clear()
            self.root.children.clear()
            self.size = 0


def _same(node: Node, told: Record) -> bool:
    return node.role == told.role and node.seen == told.seen and node.sent == told.sent and node.blocks == told.blocks
