"""`prefix-proxy plan`: what fits, told as a user asks for it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from proxy.commands import main
from proxy.core.cards import CARDS, GIB
from proxy.core.model_shape import shape_of
from proxy.core.plan import Wish, can_share, fit, gpus_needed, most_context
from tests import model_configs as known

CARD = {card.name: card for card in CARDS}
QWEN = shape_of(known.QWEN25_7B)


def wish(card: str, **fields: Any) -> Wish:
    values: dict[str, Any] = {
        "gpus": 1,
        "users": 10,
        "context_tokens": 32768,
        "output_tokens": 2048,
        "utilization": 0.92,
    }
    return Wish(card=CARD[card], **(values | fields))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(known.QWEN25_7B))
    return path


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(["plan", "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("users", [10, 1000])
def test_the_estimate_is_within_5_percent_of_what_vllm_reported(users: int) -> None:
    """Qwen2.5-7B on an H200 at 0.85: 1,931,648 tokens in 103.16 GiB, of vLLM 0.26 with its own --max-num-seqs."""
    found = fit(QWEN, wish("H200", users=users, context_tokens=65536, utilization=0.85))
    assert found.kv_tokens == pytest.approx(1_931_648, rel=0.05)
    assert found.kv_bytes / GIB == pytest.approx(103.16, rel=0.05)


def test_chats_stay_warm_as_far_as_their_keys_and_values_fit() -> None:
    found = fit(QWEN, wish("RTX 3090"))
    assert found.chat_bytes == 32768 * 57_344
    assert found.warm_chats == found.kv_bytes // found.chat_bytes == 3
    assert found.kv_tokens % 16 == 0 and found.kv_tokens * 57_344 <= found.kv_bytes


def test_more_cards_share_weights_and_heads() -> None:
    """A 70 B model in 16 bits takes four cards of 80 GB; DeepSeek-V3 eight of 141 GB."""
    llama, deepseek = shape_of(known.LLAMA31_70B), shape_of(known.DEEPSEEK_V3)
    assert gpus_needed(llama, wish("H100")) in (2, 4)
    assert gpus_needed(llama, wish("RTX 3060")) == 16
    assert gpus_needed(deepseek, wish("H200")) == 8
    assert gpus_needed(deepseek, wish("RTX 3060")) is None


def test_only_whole_heads_are_shared() -> None:
    """Qwen2.5-7B has 28 heads, which eight cards cannot share."""
    assert [gpus for gpus in range(1, 9) if can_share(QWEN, gpus)] == [1, 2, 4]


def test_the_longest_context_is_the_last_that_starts() -> None:
    asked = wish("RTX 3090", context_tokens=1_000_000)
    longest = most_context(fit(QWEN, asked), asked)
    assert fit(QWEN, wish("RTX 3090", context_tokens=longest)).starts
    assert not fit(QWEN, wish("RTX 3090", context_tokens=longest + 16)).starts


def test_a_plan_as_json_holds_figures_flags_and_the_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, str(file), "--gpu", "4090", "--users", "2", "--context", "16384")
    assert plan["model"]["kv_bytes_per_token"] == 57_344 and plan["model"]["weights_from"] == "estimate"
    assert plan["plan"]["warm_chats"] >= 2 and plan["problem"] is None
    assert any(each["text"] == "--max-model-len 16384" for each in plan["plan"]["flags"])
    assert [row["card"] for row in plan["cards"]] == list(CARD)
    assert next(row for row in plan["cards"] if row["card"] == "RTX 3060")["cards_needed"] == 2


def test_a_folder_and_stdin_do_as_well_as_a_file(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no card named there is the table alone."""
    folder = planned(capsys, str(file.parent))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert planned(capsys, "-") == folder == planned(capsys, str(file))
    assert "plan" not in folder


def test_the_size_of_the_weights_is_taken_from_the_files_where_they_are(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index, else the files themselves; a checkpoint in 32 bits is served in 16."""
    (file.parent / "model.safetensors").write_bytes(b"0" * 4000)
    assert planned(capsys, str(file))["model"]["weights_bytes"] == 4000
    index = file.parent / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 15_231_233_024}}))
    assert planned(capsys, str(file))["model"]["weights_bytes"] == 15_231_233_024
    file.write_text(json.dumps(known.QWEN25_7B | {"torch_dtype": "float32"}))
    assert planned(capsys, str(file))["model"]["weights_bytes"] == 15_231_233_024 // 2
    index.write_text("{}")
    assert planned(capsys, str(file))["model"]["weights_from"] == "files"


@pytest.mark.parametrize(
    ("config", "words", "told"),
    [
        (known.QWEN25_7B, ("--gpu", "3060"), "--gpus 2"),
        (known.QWEN25_7B, ("--gpu", "3090", "--context", "131072"), "one chat may have"),
        (known.LLAMA31_8B, ("--gpu", "H200", "--context", "200000"), "--context 131072"),
        (known.LLAMA31_8B, ("--context", "200000"), "--context 131072"),
        (known.QWEN25_7B, ("--gpu", "A100", "--kv-cache-dtype", "fp8"), "8.9"),
        (known.DEEPSEEK_V3, ("--gpu", "24"), "ore than 16"),
    ],
)
def test_what_does_not_fit_ends_with_1_and_says_what_to_do(
    file: Path, config: Any, words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too little memory for the weights, or for one chat; positions that cannot be stretched; a card without FP8."""
    file.write_text(json.dumps(config))
    assert main(["plan", str(file), *words]) == 1
    out = capsys.readouterr().out
    assert told in out.splitlines()[-1] and "vllm serve" not in out


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("{", (), "JSON object"),
        ("[]", (), "JSON object"),
        ("{}", (), "config.json has no"),
        (json.dumps(known.QWEN25_7B), ("--gpu", "GTX 1080"), "RTX 3060"),
        (json.dumps(known.QWEN25_7B), ("--gpus", "3"), "1, 2, 4"),
        (json.dumps(known.QWEN25_7B), ("--context", "2048"), "--output"),
    ],
)
def test_what_cannot_be_used_ends_with_2_and_one_sentence(
    file: Path, text: str, words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert main(["plan", str(file), *words]) == 2
    caught = capsys.readouterr()
    assert told in caught.err and caught.err.count("\n") == 1 and not caught.out


def test_a_file_that_is_not_there_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "nowhere.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--gpus", "0"), ("--users", "x"), ("--gpu-memory-utilization", "92")])
def test_numbers_that_cannot_be_are_refused_by_their_flag(
    file: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(file), *words])
    assert ended.value.code == 2 and words[0] in capsys.readouterr().err
