"""Bodies of requests as values: what is taken, what is refused and with which words."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.reject import Reject
from proxy.core.request import MAX_DEPTH, Received, deeper_than, is_image, parse_body, parts_of
from tests.strategies import json_values

USER = {"role": "user", "content": "x"}


def parse(value: Any, *, most: int = 10, images: int = 2, chat: bool = True) -> Received:
    """Parse `value`, as JSON unless it is bytes."""
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_body(raw, max_messages=most, max_images=images, chat=chat)


def refusal(value: Any, **limits: Any) -> Reject:
    """Return how `value` is refused."""
    with pytest.raises(Reject) as caught:
        parse(value, **limits)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["type"] == "invalid_request_error"  # type: ignore[index]  # an object in an object
    return caught.value


def test_messages_and_every_other_field_are_kept() -> None:
    """Unknown fields too, in their order."""
    got = parse({"x": 1, "messages": [USER], "metadata": {"a": [None]}})
    assert got.request.messages == (USER,) and list(got.request.rest.items()) == [("x", 1), ("metadata", {"a": [None]})]
    assert got.plain


@pytest.mark.parametrize(
    "raw", [b"", b"nope", b"[1]", b'"x"', b"null", b"{", b'{"messages":[}', b"\xff\xfe{}", b'{"a":"\xff"}']
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    """400, never 500."""
    refusal(raw)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e999", "9" * 5000])
def test_numbers_that_are_not_finite_or_too_long_are_refused(number: str) -> None:
    """Python would take the first three (SC-07)."""
    refusal(f'{{"messages":[{{"role":"user","content":"x"}}],"seed":{number}}}'.encode())


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([USER, 3], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": None}], "messages[0].role"),
        ([USER] * 11, "messages"),
    ],
)
def test_unusable_messages_are_refused_by_name(messages: Any, param: str) -> None:
    """The field is named."""
    assert refusal({"messages": messages}).param == param


def test_other_routes_need_no_messages() -> None:
    """A `messages` field there is a field like any other."""
    got = parse({"prompt": "x", "messages": 3}, chat=False)
    assert got.request.messages == () and got.request.rest == {"prompt": "x", "messages": 3}


def test_too_many_images_are_refused() -> None:
    """Those in older messages count too."""
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parse({"messages": [{"role": "user", "content": [image, image]}]})
    refusal({"messages": [{"role": "user", "content": [image]}, {"role": "user", "content": [image, image]}]})


def test_a_lone_surrogate_is_taken_but_no_text_of_it_moves() -> None:
    """orjson refuses it, Python's json does not; it is relayed as it came."""
    got = parse(b'{"messages":[{"role":"user","content":"\\ud800"}]}')
    assert not got.plain and got.request.messages[0]["content"] == "\ud800"


def test_an_integer_beyond_64_bits_is_taken() -> None:
    """orjson reads a float; its spelling goes up all the same, for the bytes are kept (SC-07)."""
    assert parse(b'{"messages":[{"role":"user","content":"x"}],"seed":123456789012345678901234}').plain


@pytest.mark.parametrize("open_close", ["[]", "{}"])
def test_deep_nesting_is_refused_with_the_same_depth_for_all(open_close: str) -> None:
    """Whatever recursion limit there is; and at once (SC-06)."""
    inner = ("[", "]") if open_close == "[]" else ('{"a":', "}")

    def nested(levels: int) -> bytes:
        value = inner[0] * levels + "1" + inner[1] * levels
        return f'{{"messages":[{{"role":"user","content":"x"}}],"x":{value}}}'.encode()

    parse(nested(MAX_DEPTH - 1))
    refusal(nested(MAX_DEPTH))
    began = time.perf_counter()
    refusal(nested(1_000_000))
    assert time.perf_counter() - began < 2


@given(json_values(), st.integers(0, 6))
@settings(max_examples=200, deadline=None)
def test_depth_is_what_a_recursive_count_says(value: Any, levels: int) -> None:
    """Brackets in strings do not count."""

    def depth(v: Any) -> int:
        inner = v.values() if isinstance(v, dict) else v if isinstance(v, list) else None
        return 0 if inner is None else 1 + max((depth(i) for i in inner), default=0)

    value = {'[{\\"': value, "}": "[[["}
    assert deeper_than(value, levels) == (depth(value) > levels)


def test_looking_for_depth_takes_linear_time() -> None:
    """Four hundred thousand lists."""
    began = time.perf_counter()
    assert not deeper_than({"a": '"\\[' * 300_000, "b": [[]] * 400_000}, MAX_DEPTH)
    assert time.perf_counter() - began < 2


def test_parts_that_are_no_objects_are_passed_over() -> None:
    """Content may be anything."""
    assert parts_of({"content": ["x", 1, None, {"type": "text"}]}) == [{"type": "text"}]
    assert parts_of({"content": "x"}) == [] and parts_of({}) == []
    assert is_image({"type": "image_url"}) and not is_image({"type": ["image_url"]})


@given(st.binary(max_size=60) | json_values().map(lambda value: json.dumps(value).encode()))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_taken_or_refused(raw: bytes) -> None:
    """Nothing but Reject comes out."""
    try:
        parse(raw)
    except Reject as refused:
        assert refused.status == 400
