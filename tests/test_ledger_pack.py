"""A ledger as bytes and back: every node, every text; other bytes are an empty ledger."""

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.ledger import Ledger, Node
from proxy.core.ledger_pack import pack, unpack
from tests.strategies import actions, clients, json_values
from tests.webui import Action, Client


def shape(node: Node) -> list[object]:
    """Return a node and all below it as values."""
    own = [
        node.role,
        node.seen,
        node.short,
        node.key,
        node.sent,
        node.keeps,
        node.blocks,
        node.in_full,
        node.cut,
        node.used,
    ]
    return [*own, sorted((shape(child) for child in node.children), key=repr)]


@given(clients(), actions(most=6))
@settings(max_examples=60, deadline=None)
def test_what_is_unpacked_is_what_was_packed(client: Client, done: list[Action]) -> None:
    """Nodes, texts, flags, order of use and size."""
    for action in done:
        action.do(client)
    ledger = client.wire.ledger
    again = unpack(pack(ledger), ledger.max_bytes)
    assert shape(again.root) == shape(ledger.root)
    assert (again.size, again.ticks, again.max_bytes) == (ledger.size, ledger.ticks, ledger.max_bytes)
    assert unpack(pack(again), 1 << 20).size == ledger.size


@given(clients(), actions(most=5))
@settings(max_examples=40, deadline=None)
def test_a_chat_goes_on_over_a_restart_as_if_there_was_none(client: Client, done: list[Action]) -> None:
    """What goes up next is the same, to the character."""
    for action in done:
        action.do(client)
    wire = client.wire
    messages = [*client.head(), *client.messages, {"role": "user", "content": "and now?"}]
    before = wire.ledger
    straight = wire.send(messages)
    restarted = unpack(pack(before), before.max_bytes)
    wire.ledger = restarted
    assert wire.send(messages) == straight


def test_equal_children_keep_their_order() -> None:
    """Where two answers fit, the choice must not change with a restart."""
    ledger = Ledger(1 << 20)
    for text in "abc":
        ledger.add_reply(ledger.root, {"role": "assistant", "content": text})
    again = unpack(pack(ledger), 1 << 20)
    assert [n.key for n in again.root.children] == [n.key for n in ledger.root.children]


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[1]", b"[[]]", b"null", b"\xff", b'[[5,"user","","","",null,[0,0,0],[],0]]']
)
def test_other_bytes_are_an_empty_ledger(raw: bytes) -> None:
    """A row of another version costs one cold turn."""
    assert unpack(raw, 1 << 20).size == 0


@given(json_values() | st.lists(st.lists(json_values(), min_size=9, max_size=9)))
@settings(max_examples=70, deadline=None)
def test_no_bytes_make_it_fail(value: object) -> None:
    """A file that somebody wrote into is no reason to fail."""
    try:
        raw = orjson.dumps(value)
    except TypeError:
        return
    unpack(raw, 1 << 20)


def test_a_ledger_above_a_smaller_bound_is_cut_at_its_next_use() -> None:
    """The setting was lowered between two runs."""
    ledger = Ledger(1 << 20)
    for i in range(50):
        ledger.add_reply(ledger.root, {"role": "assistant", "content": str(i)})
    again = unpack(pack(ledger), 4096)
    again.add_reply(again.root, {"role": "assistant", "content": "new"})
    assert again.size <= 4096
