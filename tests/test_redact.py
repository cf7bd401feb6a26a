"""Redaction: no word of a user stays, and what the rewriting and the comparison go by does."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.draft import DOCUMENT_LEADS
from proxy.core.redact import Redactor
from proxy.core.volatile import part

ONE, OTHER = Redactor(b"one key"), Redactor(b"another key")
CANARY = "Zebedee owes 4711 Kronen to zebedee@example.test, IBAN DE89 3704 0044; 秘密的话 ترجمه हिन्दी 🎉 naïve"


def test_no_word_and_no_number_of_a_text_stays() -> None:
    """In any script; the shape does."""
    out = ONE.text(CANARY)
    assert len(out) == len(CANARY)
    for word in re.findall(r"\w{3,}|[^\x00-\x7f]", CANARY):
        assert word not in out
    assert out[12] == " " and "@" in out and out.count(",") == CANARY.count(",")


def test_equal_words_stay_equal_and_other_keys_make_other_words() -> None:
    first, again, different = (
        ONE.text("apple pear Apple").split()[0],
        ONE.text("an apple").split()[1],
        ONE.text("appla"),
    )
    assert first == again != different
    assert OTHER.text("apple") != first
    assert ONE.text("apple pear")[:5] == ONE.text("apple")


def test_a_longer_run_without_spaces_begins_as_the_shorter_one() -> None:
    """So that the place where two Chinese texts part stays where it was."""
    assert ONE.text("你好世界")[:3] == ONE.text("你好世") and ONE.text("你好世界") != "你好世界"


def test_a_clock_in_a_system_text_is_still_a_clock() -> None:
    """With the date in front of it, and other times at other times."""
    texts = [f"You help. Now: 2026-01-02 10:00:0{second} UTC. Rules: be brief." for second in (1, 9)]
    parted = [part(ONE.text(text, system=True), tags=(), leads=()) for text in texts]
    assert [[b.kind[:5] for b in each.blocks] for each in parted] == [["clock"], ["clock"]]
    assert parted[0].head == parted[1].head and parted[0].blocks != parted[1].blocks
    assert "Rules" not in parted[0].head


@given(st.from_regex(r"[0-9]{1,2}:[0-5][0-9]", fullmatch=True))
def test_a_number_of_two_digits_becomes_another_of_its_kind(time: str) -> None:
    """An hour stays an hour, a minute a minute."""
    hour, _, minute = ONE.text(time).partition(":")
    assert (int(hour) < 24) == (int(time.partition(":")[0]) < 24) and int(minute) < 60
    assert len(hour) == len(time.partition(":")[0])


def test_numbers_of_a_kind_change_places_so_that_different_ones_stay_different() -> None:
    assert len({ONE.text(f"{number:02}") for number in range(100)}) == 100


@pytest.mark.parametrize("lead", [*DOCUMENT_LEADS, "<context>", "</source>", "[CONVERSATION SUMMARY]"])
def test_what_machines_write_stays(lead: str) -> None:
    assert ONE.text(f"{lead} word").startswith(lead) and "word" not in ONE.text(f"{lead} word")


def body(**fields: Any) -> Any:
    """Return what becomes of a body."""
    raw = json.dumps({"model": "qwen", "stream": True, "max_tokens": 7, **fields}).encode()
    return json.loads(ONE.body(raw, model="qwen"))


def test_a_body_keeps_its_structure_and_loses_its_words() -> None:
    arguments = '{"city": "Zebedee", "n": 1, "t": "a\\nb \\u4f60"}'
    call = {"id": "call_zebedee", "type": "function", "function": {"name": "find_zebedee", "arguments": arguments}}
    out = body(
        messages=[
            {"role": "system", "content": "zebedee rules"},
            {"role": "user", "content": [{"type": "text", "text": "zebedee"},
                                         {"type": "image_url", "image_url": {"url": "data:image/png;base64,zebedee"}}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_zebedee", "content": "zebedee"},
        ],
        metadata={"zebedee": "zebedee", "age": 47},
        chat_id="zebedee",
    )  # fmt: skip
    text = json.dumps(out)
    assert "zebedee" not in text.lower() and "47" not in text and "4f60" not in text
    assert (out["model"], out["stream"], out["max_tokens"]) == ("qwen", True, 7)
    assert [m["role"] for m in out["messages"]] == ["system", "user", "assistant", "tool"]
    sent = out["messages"][2]["tool_calls"][0]
    assert sent["id"] == out["messages"][3]["tool_call_id"] and sent["type"] == "function"
    assert len(json.loads(sent["function"]["arguments"])) == 3


def test_a_name_of_a_model_or_role_that_is_nobodys_is_replaced() -> None:
    out = json.loads(ONE.body(b'{"model": "zebedee", "messages": [{"role": "zebedee", "type": "zebedee"}]}', model=""))
    assert "zebedee" not in json.dumps(out)


def test_what_is_no_json_becomes_its_length() -> None:
    assert ONE.body(b"zebedee") == "xxxxxxx"


@given(st.text())
def test_any_text_keeps_its_length_and_lines(text: str) -> None:
    out = ONE.text(text)
    assert len(out) == len(text) and out.count("\n") == text.count("\n")
    assert ONE.text(text) == out
