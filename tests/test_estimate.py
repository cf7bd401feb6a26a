"""An upper bound of a prompt's tokens without a tokenizer: never below what a byte-level one makes of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.estimate import characters, is_media, media_count, upper_bound, utf8_bytes, without_media
from tests.fake_engine import Vocabulary, render

TEXT = st.text(max_size=200)
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"a": [1, 2, {"b": None}]}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"q":1,"r":[2,3]}'}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2_550_000}}
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT}),
        st.fixed_dictionaries({"role": st.just("user"), "content": st.just([]) | TEXT.map(lambda t: [{"text": t}])}),
        st.just({"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}),
        TEXT.map(lambda text: {"role": "tool", "tool_call_id": "c1", "content": text}),
    ),
    min_size=1,
    max_size=8,
)


@given(MESSAGES, st.lists(st.just(TOOL), max_size=3))
def test_no_byte_level_tokenizer_makes_more(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    """Whatever the messages are: the template, the tools and the generation prompt are within it."""
    prompt = render({"messages": messages, "tools": tools})
    assert len(Vocabulary().encode(prompt)) <= upper_bound(messages, tools)


def test_an_image_counts_what_is_told_and_its_bytes_do_not() -> None:
    """A picture of 1.9 MB is not 638,000 tokens (LL-07)."""
    message = {"role": "user", "content": [{"type": "text", "text": "what is it"}, PICTURE]}
    assert upper_bound([message], per_image=100) - upper_bound([message]) == 100
    assert upper_bound([message], per_image=100) < 300
    assert characters([message]) == len("userwhat is it")
    assert media_count([message, message]) == 2
    assert without_media([message]) == [{"role": "user", "content": [{"type": "text", "text": "what is it"}]}]


def test_a_message_of_images_alone_keeps_its_place() -> None:
    """A template that wants a user message gets one; messages without images are the same objects."""
    plain = {"role": "assistant", "content": "a"}
    bare, same = without_media([{"role": "user", "content": [PICTURE]}, plain])
    assert bare == {"role": "user", "content": [{"type": "text", "text": ""}]}
    assert same is plain


@pytest.mark.parametrize(
    ("part", "media"),
    [
        ({"type": "input_image"}, True),
        ({"type": "audio_url"}, True),
        ({"type": "image_embeds"}, True),
        ({"image_url": "data:,"}, True),
        ({"type": "text", "text": "image_url"}, False),
        ("image_url", False),
        (None, False),
    ],
)
def test_media_are_known_by_type_or_by_field(part: object, media: bool) -> None:
    """vLLM infers the type of a part that has none."""
    assert is_media(part) is media


@given(st.text(st.characters(codec="utf-8"), max_size=100))
def test_bytes_are_those_of_utf8(text: str) -> None:
    """In slices as in one go."""
    assert utf8_bytes(text * 700) == len((text * 700).encode())


def test_odd_contents_are_counted_all_the_same() -> None:
    """Lone surrogates, numbers, nothing: vLLM will refuse them, and the count must not fail before."""
    odd: list[dict[str, Any]] = [{"role": "user", "content": value} for value in ("\ud800", 3, None, [None, 3, "x"])]
    assert upper_bound(odd, "no list") > 0 and utf8_bytes("\ud800") == 3
