"""`prefix-proxy template check`, run as a user runs it: on files, and on a server."""

import argparse
import asyncio
import datetime
import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from proxy.commands import main
from proxy.commands import template as command
from proxy.config import SettingError
from tests.fake_replies import json_error
from tests.fake_vllm import FakeVllm
from tests.toy_templates import FAULTS, STEADY, TRIMS, toy

REPOSITORY = Path(__file__).parent.parent


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["check", *words])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "template.jinja"


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.1"])
def test_the_projects_own_templates_pass_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the README says of them is what the command says."""
    assert main(["template", "check", "--file", name]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Stable: the prefix is kept in all 1")


@pytest.mark.parametrize("name", FAULTS)
def test_a_template_with_a_fault_ends_with_1_and_names_it(
    file: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case, turn and cause stand on one line."""
    text, cause, case, turn, _, _ = FAULTS[name]
    file.write_text(text, encoding="utf-8")
    assert command.run(parsed("--file", str(file))) == 1
    line = next(each for each in capsys.readouterr().out.splitlines() if each.startswith(f"{case}\t"))
    assert line.split("\t")[1] == "unstable"
    assert f"turn {turn}, character " in line and str(cause) in line


def test_json_holds_every_case_and_the_result(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(toy(shape=TRIMS))
    assert command.run(parsed("--json", "--file", str(file))) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["result"], answer["unit"]) == ("unstable", "character")
    found = {each["case"]: each for each in answer["cases"]}
    assert found["plain"] == {"case": "plain", "says": "a chat of three turns", "outcome": "stable", "counted": True}
    assert found["white space"]["cause"] == "white space of a reply stripped"
    assert found["white space"]["turn"] == 1 and found["white space"]["expected"] == " \n"


@pytest.mark.parametrize("text", ["{% if %}", "{{ raise_exception('no \x1b[2J') }}"])
def test_a_template_that_cannot_be_checked_ends_with_2(
    file: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is not valid, one that refuses everything; what it says does not steer the terminal."""
    file.write_text(text)
    assert command.run(parsed("--file", str(file))) == 2
    told = capsys.readouterr()
    assert "\x1b" not in told.out and ("not valid" in told.err or "could not be checked" in told.out)


def test_a_file_that_is_not_there_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parsed("--file", str(tmp_path / "none.jinja"))) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--file", "x", "--model", "m"], ["--upstream", "http://x", "--tokenizer", "t"]])
def test_flags_that_do_not_go_together_are_refused(words: list[str]) -> None:
    with pytest.raises(SettingError, match="goes with"):
        command.run(parsed(*words))


def test_on_a_terminal_it_is_a_table(file: Path) -> None:
    """rich draws it there, and only there."""
    file.write_text(STEADY)
    parent, child = pty.openpty()
    words = [sys.executable, "-m", "proxy", "template", "check", "--file", str(file)]
    environ = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=child, env=environ) as process:
        os.close(child)
        shown = bytearray()
        # When the other end is closed, all is read.
        with suppress(OSError):
            while part := os.read(parent, 65536):
                shown += part
        os.close(parent)
    assert process.returncode == 0
    assert "┏━━━" in shown.decode() and "Stable" in shown.decode()


async def checked(fake_vllm: FakeVllm, *words: str) -> int:
    return await asyncio.to_thread(main, ["template", "check", "--upstream", f"{fake_vllm.url}/v1", *words])


async def test_a_running_server_is_asked_through_tokenize(
    fake_vllm: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    """The count is in tokens then, and nothing but /tokenize is called."""
    code = await checked(fake_vllm, "--json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["unit"] == "token" and answer["result"] == ("stable", "unstable")[code]
    found = {each["case"]: each["outcome"] for each in answer["cases"]}
    assert found["plain"] == found["system later"] == found["clock"] == "stable"
    assert len(fake_vllm.of("/tokenize")) > 40 and not fake_vllm.generations


async def test_a_server_without_the_model_or_away_ends_with_2(
    fake_vllm: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_vllm.answers["/tokenize"] = json_error(404, {"error": {"message": "The model `x` does not exist."}})
    assert await checked(fake_vllm, "--model", "x") == 2
    assert "does not exist" in capsys.readouterr().err
    await fake_vllm.stop()
    assert await checked(fake_vllm) == 2
    assert "cannot be reached" in capsys.readouterr().err


async def test_todays_date_in_the_prompts_of_a_server_is_a_fault(
    fake_vllm: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its clock cannot be set from here, so the date is looked for."""
    today = datetime.datetime.now().strftime("%d %b %Y")
    strings = ["<sys>", *today.replace(" ", "Ġ"), "<user>"]
    body: dict[str, Any] = {"tokens": list(range(len(strings))), "token_strs": strings}
    fake_vllm.answers["/tokenize"] = json_error(200, body)
    assert await checked(fake_vllm, "--json") == 1
    clock = json.loads(capsys.readouterr().out)["cases"][-1]
    assert (clock["case"], clock["cause"], clock["position"]) == ("clock", "date in the template", 1)
