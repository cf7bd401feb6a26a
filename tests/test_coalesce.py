"""Which requests are one: the key of a request, who takes whose place, and the table of those who share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from proxy.core.coalesce import Ask, Group, Table, determined, equal, extends, joins, same_request
from proxy.core.identity import Identity
from proxy.core.request import ChatRequest

USER = Identity("tenant", True, "c1", None, None, True)
HI = ({"role": "user", "content": "hi"},)


def made(*texts: str, who: Identity = USER, key: str = "k", **rest: Any) -> Ask:
    """Return a request of these user messages; without texts, of "hi"."""
    messages = tuple({"role": "user", "content": text} for text in texts) or HI
    return Ask(who, key, "m", "/v1/chat/completions", ChatRequest(messages, {"model": "m", **rest}))


@pytest.mark.parametrize(
    "variant",
    [
        {"temperature": None}, {"temperature": 1}, {"temperature": False}, {"max_tokens": 16}, {"top_p": 0.5},
        {"stop": ["x"]}, {"n": 2}, {"seed": 7}, {"tool_choice": "none"}, {"logprobs": True},
        {"response_format": {"type": "json_object"}}, {"chat_template_kwargs": {"enable_thinking": False}},
        {"stream": True}, {"unknown_future_field": 1}, {"stream_options": {"include_usage": True}},
    ],
)  # fmt: skip
def test_every_field_counts(variant: Mapping[str, Any]) -> None:
    """Known to us or not (CO-03)."""
    base = made(temperature=0)
    other = made(**{"temperature": 0, **variant})
    assert not joins(other, base) and not joins(base, other)


def test_equal_numbers_and_harmless_fields_do_not_count() -> None:
    """0 is 0.0; `user` and `metadata` go unread; the order of fields is no difference (CO-03)."""
    base = made(temperature=0, seed=1)
    assert joins(made(seed=1, temperature=0.0), base)
    assert joins(made(seed=1, temperature=0, user="x", metadata={"trace": 1}), base)


def test_an_absent_temperature_is_not_zero() -> None:
    """It is what the server's default says."""
    assert not joins(made(), made()) and not joins(made(temperature=0), made())
    assert not determined(ChatRequest(HI, {})) and not determined(ChatRequest(HI, {"temperature": None}))
    assert not determined(ChatRequest(HI, {"temperature": False})) and not determined(ChatRequest(HI, {"seed": True}))
    assert determined(ChatRequest(HI, {"temperature": 0.0})) and determined(ChatRequest(HI, {"seed": 3, "n": 1}))
    assert not determined(ChatRequest(HI, {"temperature": 0, "n": 2}))
    assert not determined(ChatRequest(HI, {"temperature": 0, "n": True}))


@pytest.mark.parametrize("field", ["tenant", "chat", "message", "task"])
def test_nothing_is_shared_across_identities(field: str) -> None:
    """Tenant, chat, message id and task are part of the question."""
    base = made(temperature=0, who=replace(USER, message="m"))
    assert joins(base, base)
    assert not joins(replace(base, who=replace(base.who, **{field: "other"})), base)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize("field", ["key", "model", "route", "idempotency"])
def test_nothing_is_shared_across_keys_models_routes_or_operations(field: str) -> None:
    """One Idempotency-Key is one operation, also where the answer is determined."""
    base = made(temperature=0)
    assert not joins(replace(base, **{field: "other"}), base)  # type: ignore[arg-type]  # by name


def test_without_a_proven_user_nothing_is_shared() -> None:
    """Neither side may be unknown."""
    unknown = made(temperature=0, who=replace(USER, proven=False))
    assert not joins(unknown, unknown) and not joins(made(temperature=0), unknown)
    assert not extends(made("hi", "more", who=replace(USER, proven=False)), made("hi", who=replace(USER, proven=False)))


def test_images_count_by_their_content() -> None:
    """Two pictures of one size, type and description are two questions."""

    def shown(data: str) -> Ask:
        parts = [
            {"type": "text", "text": "what?"},
            {"type": "image_url", "image_url": {"url": f"data:x;base64,{data}"}},
        ]
        return replace(made(), request=ChatRequest(({"role": "user", "content": parts},), {"seed": 1}))

    assert joins(shown("AAAA"), shown("AAAA")) and not joins(shown("AAAA"), shown("AAAB"))


def test_an_idempotency_key_does_not_make_different_questions_one() -> None:
    """A key that was used twice by mistake must not give one question the answer of another."""
    assert not joins(replace(made("a"), idempotency="k"), replace(made("b"), idempotency="k"))
    assert joins(replace(made("a"), idempotency="k"), replace(made("a"), idempotency="k"))
    assert joins(replace(made("a"), again=True), made("a")) and not joins(made("a"), replace(made("a"), again=True))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, 0.5]) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def typed(value: object) -> object:
    """Return a value that Python compares as JSON is to be compared."""
    if isinstance(value, dict):
        return ("object", [(name, typed(each)) for name, each in value.items()])
    if isinstance(value, list):
        return ("list", [typed(each) for each in value])
    kind = "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    return (kind, value)


@given(JSON, JSON)
def test_values_are_equal_if_their_types_and_contents_are(a: object, b: object) -> None:
    """Against a plain restatement; and each value equals itself."""
    assert equal(a, b) == (typed(a) == typed(b))
    assert equal(a, a)


@given(st.lists(st.text(max_size=3), min_size=1, max_size=3), st.lists(st.text(max_size=3), max_size=2))
def test_more_messages_of_the_user_extend_a_request(texts: list[str], more: list[str]) -> None:
    """And the same ones do not."""
    assert extends(made(*texts, *more), made(*texts)) == bool(more)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (made("so"), made("so what"), True),
        (made("so"), made("so\nwhat", "else"), True),
        (made("2"), made("25"), False),
        (made("so"), made("so what", stream=True), False),
        (made("so", n=2), made("so", "what", n=2), False),
        (made("so", who=replace(USER, explicit=False)), made("so", "x", who=replace(USER, explicit=False)), False),
        (made("so", who=replace(USER, chat=None)), made("so", "x", who=replace(USER, chat=None)), False),
        (made("so", who=replace(USER, message="a")), made("so", "x", who=replace(USER, message="b")), False),
        (made("so", who=replace(USER, task="x")), made("so", "x", who=replace(USER, task="x")), False),
        (made("so", "what"), made("so"), False),
    ],
)
def test_what_takes_the_place_of_what(old: Ask, new: Ask, expected: bool) -> None:
    """More text after white space does; another number, another field or another message id does not."""
    assert extends(new, old) == expected


def test_an_answer_in_between_is_another_turn() -> None:
    """The extension is by messages of the user alone, after one of the user."""
    between = ({"role": "assistant", "content": "yes"}, {"role": "user", "content": "b"})
    assert not extends(replace(made(), request=ChatRequest(HI + between, {"model": "m"})), made())
    told = replace(made(), request=ChatRequest((*HI, between[0]), {"model": "m"}))
    assert not extends(replace(made(), request=ChatRequest(HI + between, {"model": "m"})), told)
    assert same_request(told.request, told.request)


class Sharing(RuleBasedStateMachine):
    """Joins, leaves, first words, failures and supersedes, against what must always hold."""

    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.table: Table[Group[int], int] = Table()
        self.asks: dict[int, Ask] = {}  # of those who are in a group, as asked
        self.ended: list[Group[int]] = []
        self.next = 0

    @rule(
        target=clients,
        tenant=st.sampled_from("AB"),
        message=st.sampled_from([None, "m"]),
        texts=st.sampled_from([("a",), ("a", "b"), ("a", "b", "c")]),
        temperature=st.sampled_from([None, 0]),
    )
    def ask(self, tenant: str, message: str | None, texts: tuple[str, ...], temperature: int | None) -> int:
        """A client asks: it joins, or begins a run that may take the place of older ones."""
        ask = made(*texts, who=replace(USER, tenant=tenant, message=message), temperature=temperature)
        client, self.next = self.next, self.next + 1
        self.asks[client] = ask
        group = self.table.find(ask)
        if group is None:
            group = Group(ask)
            for old in self.table.overtaken(ask, lambda _: True):
                assert not old.spoken and old.members
                moved = self.table.move(old, group)
                assert all(extends(ask, old.ask) for _ in moved) and not old.members
                self.ended.append(old)
            self.table.add(group)
        else:
            assert joins(ask, group.ask) and group not in self.ended
        self.table.board(group, client)
        return client

    @rule(client=consumes(clients))
    def leave(self, client: int) -> None:
        """A client leaves: its run ends if it was the last one, and only then."""
        group = self.table.group_of(client)
        emptied = self.table.leave(client)
        self.asks.pop(client)
        if group is not None:
            over = group in self.ended
            assert (emptied is group) == (not group.members and not over)
        if emptied is not None:
            self.ended.append(emptied)

    @rule(client=clients)
    def speak(self, client: int) -> None:
        """The first bytes of an answer go out."""
        group = self.table.group_of(client)
        if group is not None and group not in self.ended:
            group.spoken, group.waiting = True, False

    @rule(client=clients)
    def fail(self, client: int) -> None:
        """A run ends, well or badly: nobody joins it any more, and its members leave one by one."""
        group = self.table.group_of(client)
        if group is not None and group not in self.ended:
            assert self.table.close(group)
            self.ended.append(group)
            assert self.table.find(group.ask) is not group

    @invariant()
    def every_member_is_in_one_group(self) -> None:
        """Each client that has not left is in exactly the group that the table says."""
        for client in self.asks:
            group = self.table.group_of(client)
            assert group is not None and client in group.members
        assert self.table.members == len(self.asks)

    @invariant()
    def nobody_shares_with_a_stranger(self) -> None:
        """All in a group are of one tenant and one message id."""
        for client, ask in self.asks.items():
            group = self.table.group_of(client)
            assert group is not None and group.ask.family == ask.family

    @invariant()
    def no_run_is_without_a_sharer(self) -> None:
        """Every open group has one, and none that has ended is found."""
        for group in self.table:
            assert group.members and group not in self.ended
        assert len(self.table) == len(list(self.table))


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
