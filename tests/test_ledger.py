"""The tree of what was sent: branches, bounds in bytes, replies that are told for the first time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.ledger import NODE_BYTES, Ledger, Node, Record
from proxy.core.text import message_digest, packed


def told(
    text: str,
    role: str = "user",
    node: Node | None = None,
    sent: bytes | None = None,
    followed: bool = False,
    short: bool = False,
) -> Record:
    """Return the record of one message."""
    return Record(role, message_digest({"role": role, "content": text}), node, sent, followed=followed, short=short)


def size_of(ledger: Ledger) -> int:
    """Count the bytes anew."""
    return sum(node.size for node in ledger.nodes())


def path_to(node: Node) -> list[Node]:
    """Return the nodes from the root to `node`, the root left out."""
    out: list[Node] = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        out.append(at)
        at = at.parent
    return out[::-1]


def answer(text: str) -> dict[str, object]:
    """Return a generated reply."""
    return {"role": "assistant", "content": text}


Operation = tuple[list[str], int, str]


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6), st.integers(0, 900), st.text(max_size=3))
    ),
    st.integers(0, 8000),
)
@settings(max_examples=150, deadline=None)
def test_the_ledger_is_bounded_in_bytes_whatever_is_recorded(operations: list[Operation], most: int) -> None:
    """Its size is the sum of its nodes, never above the bound, and nothing points to what was shed."""
    ledger = Ledger(most)
    for texts, length, reply in operations:
        sent = packed(["x" * length]) if length % 2 else None
        at = ledger.record([told(text, sent=sent, followed=i + 1 < len(texts)) for i, text in enumerate(texts)])
        assert ledger.size == size_of(ledger) <= most
        ledger.add_reply(at, answer(reply or "x" * length), cut=bool(length % 3))
        assert ledger.size == size_of(ledger) <= most
        for node in ledger.nodes():
            assert node.parent is not None and node in node.parent.children


def test_the_path_just_recorded_is_kept_and_the_oldest_leaf_goes_first() -> None:
    """An old branch goes before the conversation that is going on."""
    ledger = Ledger(4 * NODE_BYTES)
    ledger.record([told("a"), told("old")])
    ledger.record([told("a"), told("newer")])
    at = ledger.record([told("a"), told("b"), told("c")])
    assert [n.seen for n in path_to(at)] == [told(t).seen for t in "abc"]
    assert ledger.size == 4 * NODE_BYTES
    seen = {n.seen for n in ledger.nodes()}
    assert told("newer").seen in seen and told("old").seen not in seen


def test_a_conversation_too_large_for_the_bound_starts_anew() -> None:
    """One cold turn, never more bytes."""
    ledger = Ledger(2 * NODE_BYTES)
    at = ledger.record([told("a"), told("b"), told("c")])
    assert ledger.size == 0 and not list(ledger.nodes())
    ledger.add_reply(at, answer("x"))
    ledger.record([told("a")])
    assert ledger.size == size_of(ledger)


def test_the_same_request_twice_is_one_path_with_two_answers() -> None:
    """The same model picked twice."""
    ledger = Ledger(1 << 20)
    first, second = ledger.record([told("hi")]), ledger.record([told("hi")])
    assert first is second
    ledger.add_reply(first, answer("one"))
    ledger.add_reply(first, answer("two"))
    ledger.add_reply(first, answer("one"))
    assert len(first.children) == 2


def test_a_reply_told_as_it_was_written_gives_its_text_back() -> None:
    """Nothing of it needs to be kept then; told in another form it stays."""
    ledger = Ledger(1 << 20)
    at = ledger.record([told("hi")])
    plain, spaced = ledger.add_reply(at, answer("one")), ledger.add_reply(at, answer(" two\n"))
    before = ledger.size
    ledger.record([told("hi"), told("one", "assistant", node=plain), told("x")])
    assert plain.sent is None and ledger.size == size_of(ledger) < before + NODE_BYTES
    ledger.record([told("hi"), told("two", "assistant", node=spaced, sent=spaced.sent), told("x")])
    assert spaced.sent is not None and spaced.seen == told("two", "assistant").seen


def test_a_node_shed_while_its_request_was_on_its_way_comes_back() -> None:
    """The tree stays whole, and so does its size."""
    ledger = Ledger(3 * NODE_BYTES)
    at = ledger.record([told("a"), told("b")])
    a = path_to(at)[0]
    ledger.record([told("x"), told("y")])
    ledger.record([told("p"), told("q")])
    assert at not in set(ledger.nodes())
    again = ledger.record([told("a", node=a), told("b", node=at)])
    assert again is at and ledger.size == size_of(ledger) <= ledger.max_bytes


def test_a_message_told_in_full_with_a_turn_after_it_is_marked() -> None:
    """A user typed it then: its front is no machine's block."""
    ledger = Ledger(1 << 20)
    assert not ledger.record([told("a")]).in_full
    at = ledger.record([told("a", followed=True), told("b")])
    assert path_to(at)[0].in_full and not at.in_full


def test_a_short_form_is_kept_beside_the_full_one() -> None:
    """The message is known again in both."""
    ledger = Ledger(1 << 20)
    at = ledger.record([told("block and text", sent=packed(["block and text"]))])
    ledger.record([told("text", node=at, sent=at.sent, short=True, followed=True), told("x")])
    assert at.short == told("text").seen and at.seen == told("block and text").seen and not at.in_full


def test_only_notes_of_the_time_may_go_to_a_chat_found_by_content() -> None:
    """Memory and documents are private."""
    assert not Node(None, "user", blocks=(("clock", b"x"),)).private
    assert Node(None, "user", blocks=(("clock", b"x"), ("tag:memory_context", b"y"))).private


def test_the_messages_of_a_node_are_those_that_went_up() -> None:
    """None where what was told goes out; anything odd is none."""
    assert Node(None, "user").messages() is None
    assert Node(None, "user", sent=packed([{"role": "user"}])).messages() == ({"role": "user"},)
    assert Node(None, "user", sent=b"3").messages() is None


def test_a_long_conversation_is_shed_in_little_time() -> None:
    """Thousands of turns, one bound; recording stays linear in the request."""
    ledger = Ledger(2000 * NODE_BYTES)
    for n in range(30):
        ledger.record([told(f"{n % 7} {i}") for i in range(500)])
    assert ledger.size == size_of(ledger) <= ledger.max_bytes
