"""How a plan looks: lines with tabs for programs, a table on a terminal, help with examples."""

import json
import os
import pty
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from proxy.commands import main
from tests import model_configs as known

REPOSITORY = Path(__file__).parent.parent


def shown(config: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    main(["plan", str(file), *words])
    return capsys.readouterr().out


def test_the_command_can_be_pasted_and_each_flag_has_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shell reads the command as it stands, the override in one word."""
    out = shown(known.QWEN25_7B, tmp_path, capsys, "--gpu", "H100", "--context", "65536", "--users", "20")
    command = out[out.index("vllm serve") :].split("\n\n")[0]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "MODEL"]
    assert json.loads(words[words.index("--hf-overrides") + 1])["rope_parameters"]["factor"] == 2.0
    reasons = out[out.index(command) + len(command) :]
    assert all(word in reasons for word in words if word.startswith("--"))
    assert "lengths.max_output_tokens = 2048" in reasons


def test_the_table_has_a_line_of_tabs_for_each_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it does not fit, how many cards would do."""
    lines = [line.split("\t") for line in shown(known.QWEN25_7B, tmp_path, capsys).splitlines() if "\t" in line]
    assert len(lines) == 10 and {len(line) for line in lines} == {7}
    assert lines[1] == ["RTX 3060", "11.6", "14.2", "-", "-", "-", "2"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (known.GEMMA2_9B, "172,032 of it only for the last 4,096 tokens"),
        (known.DEEPSEEK_V3, "a latent vector of 512 + 64"),
        (known.QWEN25_72B_AWQ, "38.7 GiB of weights by their shapes, awq"),
    ],
)
def test_what_is_special_of_a_model_is_told(
    config: object, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in shown(config, tmp_path, capsys)


def test_a_name_in_the_file_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in shown(known.QWEN25_7B | {"architectures": ["\x1b[2JQwen"]}, tmp_path, capsys)


def test_on_a_terminal_there_is_a_table(tmp_path: Path) -> None:
    """And no tabs."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(known.QWEN25_7B))
    parent, child = pty.openpty()
    environ = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-m", "proxy", "plan", str(file), "--gpu", "L4"]
    ended = subprocess.run(command, stdout=child, stderr=child, cwd=REPOSITORY, env=environ, timeout=60)
    os.close(child)
    seen = b""
    with suppress(OSError):
        while part := os.read(parent, 65536):
            seen += part
    os.close(parent)
    assert ended.returncode == 0
    assert "cards needed" in seen.decode() and "─" in seen.decode() and b"\t" not in seen


def test_the_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = capsys.readouterr().out
    assert "examples:" in out and "exit codes:" in out
