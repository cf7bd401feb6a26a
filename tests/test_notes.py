"""Texts of ours that join a message: after a result, before a question, in a fence."""

from proxy.core.notes import appended, fenced, in_front


def test_a_text_goes_after_the_content_of_a_result() -> None:
    assert appended({"role": "tool", "content": "21 C", "tool_call_id": "1"}, "Now: 10:00") == {
        "role": "tool",
        "content": "21 C\n\nNow: 10:00",
        "tool_call_id": "1",
    }
    parts = [{"type": "text", "text": "21 C"}]
    assert appended({"role": "tool", "content": parts}, "x")["content"] == [*parts, {"type": "text", "text": "\n\nx"}]
    assert appended({"role": "tool", "content": None}, "x")["content"] == "\n\nx"


def test_a_text_goes_before_the_words_of_a_user_as_a_part_of_its_own() -> None:
    note = {"type": "text", "text": "n"}
    assert in_front({"role": "user", "content": "hi"}, "n")["content"] == [note, {"type": "text", "text": "hi"}]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert in_front({"role": "user", "content": [image]}, "n")["content"] == [note, image]


def test_a_fence_is_closed_by_its_own_mark() -> None:
    assert fenced("x", "note 1a") == "[note 1a]\nx\n[/note 1a]"
