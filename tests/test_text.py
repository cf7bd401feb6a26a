"""The text of messages, and when two of them are called equal."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.text import (
    bare,
    calls_of,
    digest,
    encoded,
    first_text,
    length_of,
    message_digest,
    packed,
    reply_key,
    same_arguments,
    text_of,
    unpacked,
    with_first_text,
)
from tests.strategies import json_values, odd_messages

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def reply(content: Any, *arguments: Any, **fields: Any) -> dict[str, Any]:
    """Return a reply with one call for each of `arguments`."""
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "f", "arguments": a}} for i, a in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {}), **fields}


def test_digests_tell_parts_apart_by_their_lengths() -> None:
    """No two lists of parts meet."""
    made = {digest(), digest(b""), digest(b"", b""), digest(b"ab"), digest(b"a", b"b"), digest(b"1:a")}
    assert len(made) == 6 and all(len(d) == 16 for d in made)


@given(st.lists(json_values(), min_size=2, max_size=2))
@settings(max_examples=100, deadline=None)
def test_messages_are_equal_only_where_every_value_is(values: list[Any]) -> None:
    """1 is not true and not 1.0; the order of keys does not count."""
    one, two = ({"role": "user", "content": value} for value in values)
    same = json.dumps(values[0], sort_keys=True) == json.dumps(values[1], sort_keys=True)
    assert (message_digest(one) == message_digest(two)) == same
    assert message_digest(one) == message_digest(dict(reversed(one.items())))


def test_a_string_and_a_text_part_are_two_messages() -> None:
    """They render alike in one template, not in all."""
    part = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    made = {
        message_digest(m)
        for m in (part, {"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": ""})
    }
    assert len(made) == 3


@given(odd_messages(), st.text(max_size=5))
@settings(max_examples=100, deadline=None)
def test_no_message_makes_them_fail(messages: list[Any], text: str) -> None:
    """Whatever a client sends; and what is packed comes back."""
    for message in messages:
        message_digest(message), reply_key(message), text_of(message), calls_of(message)
        if first_text(message) is not None and text:
            assert first_text(with_first_text(message, text)) == text
        assert unpacked(packed(message)) == json.loads(json.dumps(message)) or "e" in repr(message)
    assert length_of(messages) >= 0


def test_surrogates_have_bytes() -> None:
    """They come out of escapes."""
    assert encoded("\ud800") and message_digest({"role": "user", "content": "\ud800"})
    assert unpacked(packed(["\ud800", 2**70]))[0] == "\ud800"  # type: ignore[index]  # a list


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (" x\n", "x"),
        ("<think>\nhm\n</think>\n\nx", "x"),
        ("\n<think></think>x <think>y</think>", "x <think>y</think>"),
        ("<think>never ends", "<think>never ends"),
        ("x <think>y</think>", "x <think>y</think>"),
        ("", ""),
    ],
)
def test_a_reply_is_told_without_its_thoughts_and_outer_space(told: str, text: str) -> None:
    """As Open WebUI tells it later."""
    assert bare(told) == text


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ('{"a": 1, "b": [1, 2]}', '{"a":1,"b":[1,2]}', True),
        ('{"city": "K\\u00f6ln"}', '{"city":"Köln"}', True),
        ('{"a": true}', '{"a":1}', False),
        ('{"a": 1.0}', '{"a":1}', False),
        ('{"a":1,"b":2}', '{"b":2,"a":1}', False),
        ('{"a": 1', '{"a":1', False),
        ("", "{}", False),
        ('{"a": 1}', {"a": 1}, False),
        ("[" * 100_000, "[" * 100_001, False),
    ],
)  # fmt: skip
def test_arguments_are_equal_as_reserialised_text(one: Any, two: Any, same: bool) -> None:
    """White space and escapes do not count, values and their order do."""
    assert (same_arguments(one) == same_arguments(two)) == same
    assert (reply_key(reply("", one)) == reply_key(reply("", two))) == same


def test_a_reply_is_what_was_generated_by_text_and_calls() -> None:
    """Another id, another name, one call more, list content: another reply."""
    key = reply_key(reply("x", "{}"))
    other_id = reply("x", "{}")
    other_id["tool_calls"][0]["id"] = "9"
    for other in (
        reply("y", "{}"),
        reply("x"),
        reply("x", "{}", "{}"),
        other_id,
        reply([{"type": "text", "text": "x"}], "{}"),
    ):
        assert reply_key(other) != key
    assert reply_key(reply(" x\n", "{ }")) == key
    assert reply_key(reply(None)) == reply_key(reply(""))


def test_the_first_text_part_is_the_one_that_is_changed() -> None:
    """Images stay where they are; a part left empty goes."""
    message = {"role": "user", "content": [IMAGE, {"type": "text", "text": "a", "x": 1}, {"type": "text", "text": "b"}]}
    assert first_text(message) == "a" and text_of(message) == "ab"
    changed = with_first_text(message, "c")
    assert changed["content"] == [IMAGE, {"type": "text", "text": "c", "x": 1}, {"type": "text", "text": "b"}]
    assert with_first_text(message, "")["content"] == [IMAGE, {"type": "text", "text": "b"}]
    assert message["content"][1]["text"] == "a"  # type: ignore[index]  # a list


def test_odd_content_has_no_text() -> None:
    """Numbers, null, objects."""
    for content in (3, None, {"text": "x"}, [1, "x", {"type": "text"}, {"type": "image_url", "text": "x"}]):
        assert text_of({"role": "user", "content": content}) == ""
    assert first_text({"role": "user"}) is None and first_text({"content": [{"type": "text", "text": 3}]}) is None
