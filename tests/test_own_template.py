"""Which template `up` serves a model with."""

import json
from pathlib import Path

import pytest

from proxy.chat_template import bundled, read_template
from proxy.own_template import choose, folder_of
from tests.toy_templates import STEADY, TRIMS, toy


def folder_with(folder: Path, text: str) -> Path:
    """Write a tokenizer_config.json with a template."""
    settings = {"chat_template": text, "bos_token": None, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_stable_template_stays(tmp_path: Path) -> None:
    chosen = choose(folder_with(tmp_path, STEADY))
    assert chosen.path is None and "is stable" in chosen.says


def test_an_unstable_one_is_replaced_by_ours_where_ours_fits(tmp_path: Path) -> None:
    """One that strips what was generated, of a model that knows Qwen2.5's form; and one that none of ours fits."""
    text = read_template(bundled()["qwen2.5"])[0].replace("{{- '\\n' ~ text -}}", "{{- '\\n' ~ text | trim -}}")
    chosen = choose(folder_with(tmp_path, text))
    assert chosen.path == bundled()["qwen2.5"] and "white space of a reply stripped" in chosen.says
    chosen = choose(folder_with(tmp_path, toy(shape=TRIMS)))
    assert chosen.path is None and "none of ours fits" in chosen.says


def test_a_template_in_a_file_of_its_own_counts(tmp_path: Path) -> None:
    folder_with(tmp_path, toy(shape=TRIMS))
    (tmp_path / "chat_template.jinja").write_text(STEADY)
    assert "is stable" in choose(tmp_path).says


@pytest.mark.parametrize("text", ["{% if %}", "{{ raise_exception('no') }}"])
def test_one_that_cannot_be_read_or_checked_stays(tmp_path: Path, text: str) -> None:
    assert choose(folder_with(tmp_path, text)).path is None


def test_the_folder_is_the_one_named_or_that_of_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads lie where huggingface_hub puts them."""
    assert folder_of(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert folder_of("Qwen/Qwen3-8B") is None
    home = tmp_path / "models--Qwen--Qwen3-8B"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc\n")
    (home / "snapshots" / "abc").mkdir(parents=True)
    assert folder_of("Qwen/Qwen3-8B") == home / "snapshots" / "abc"
