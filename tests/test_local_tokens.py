"""Counting with a tokenizer.json of our own, in a thread."""

from pathlib import Path
from typing import Any

import pytest

from proxy.upstream.local_tokens import AROUND_MESSAGE, AROUND_PROMPT, LOCAL_BYTES, LocalTokens

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that knows single bytes and one longer token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*alphabet, "he", "hel", "hell", "hello"])}
    merges = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path_factory.mktemp("tokens") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


async def counted(file: Path, *contents: Any, tools: object = None) -> int | None:
    """Return the tokens of messages with these contents, without what a template adds."""
    messages = [{"content": content} for content in contents]
    found = await LocalTokens(str(file)).count(messages, tools, per_image=100)
    return found and found - AROUND_PROMPT - AROUND_MESSAGE * len(messages)


async def test_text_counts_as_the_tokenizer_says(file: Path) -> None:
    """Bytes, characters and tokens are three numbers (HT-12)."""
    assert await counted(file, "hello") == 1
    assert await counted(file, "hello hello", "猫") == 1 + 1 + 1 + 3
    assert await counted(file, [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": "data:"}]) == 101


async def test_tools_count_too(file: Path) -> None:
    """They stand in the prompt (HT-13)."""
    with_tool, without = await counted(file, "hello", tools=[{"name": "hello"}]), await counted(file, "hello")
    assert with_tool is not None and without is not None and with_tool > without + 10


async def test_what_would_take_a_thread_for_too_long_is_not_counted(file: Path) -> None:
    """The upper bound serves there."""
    assert await counted(file, "x" * (LOCAL_BYTES + 1)) is None


async def test_without_a_usable_file_nothing_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, by class, and not tried again."""
    assert await LocalTokens(None).count([], None, per_image=0) is None
    (tmp_path / "t.json").write_text("no tokenizer")
    local = LocalTokens(str(tmp_path / "t.json"))
    assert [await local.count([], None, per_image=0) for _ in range(3)] == [None] * 3
    assert [record.message for record in caplog.records] == ["local_tokenizer_unusable"]
