"""`prefix-proxy doctor` before a real vLLM, badly started and well: every fault is named with what mends it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from proxy.chat_template import bundled, read_template
from proxy.commands import main
from proxy.demo import server
from tests.e2e.conftest import environment

# Each of the two fixtures starts a vLLM of its own.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BAD_FLAGS = (
    "--no-enable-prefix-caching", "--no-enable-prompt-tokens-details", "--no-enable-auto-tool-choice",
    "--block-size", "128", "--max-model-len", "4096", "--exclude-tools-when-tool-choice-none", "--host", "0.0.0.0",
)  # fmt: skip
BAD_ENVIRON = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "1", "VLLM_SERVER_DEV_MODE": "1"}
Report = Mapping[str, Any]


def examined(url: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Mapping[str, Report]]:
    """Run the command as a user does; return its exit code and what it found, by check."""
    main(["doctor", "--upstream", url])
    told = capsys.readouterr().out
    code = main(["doctor", "--upstream", url, "--json"])
    report = json.loads(capsys.readouterr().out)
    with capsys.disabled():
        print(f"\n{told}")
    return code, {each["check"]: each for each in report["findings"]}


@pytest.fixture(scope="module")
def badly_started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A vLLM with all that one can do wrong, and a template that strips what a model generated."""
    folder = tmp_path_factory.mktemp("bad")
    template = folder / "strips.jinja"
    steady = read_template(bundled()["qwen2.5"])[0]
    template.write_text(steady.replace("{{- '\\n' ~ text -}}", "{{- '\\n' ~ text | trim -}}"))
    assert template.read_text() != steady
    made = environment("qwen2tiny")
    flags = (*BAD_FLAGS, "--chat-template", str(template))
    child = server.vllm(made, log=folder / "vllm.log", model="qwen2tiny", flags=flags)
    child._environ |= BAD_ENVIRON
    with child:
        child.wait_ready()
        yield child.url


def test_each_fault_of_a_badly_started_vllm_is_named_with_its_cure(
    badly_started: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1; the figure of the cost is measured, not guessed."""
    code, found = examined(badly_started, capsys)
    assert code == 1
    cures = {check: each["mend"] for check, each in found.items() if each["state"] == "mend"}
    assert cures["prefix caching"] == "--enable-prefix-caching"
    assert " s, once more " in found["prefix caching"]["says"]
    assert cures["prompt tokens details"] == "--enable-prompt-tokens-details"
    assert cures["tool parser"] == "--enable-auto-tool-choice --tool-call-parser hermes"
    assert "--exclude-tools-when-tool-choice-none" in cures["tools of tasks"]
    assert cures["block size"].startswith("--block-size 32")
    assert cures["chat template"] == f"--chat-template {bundled()['qwen2.5']}"
    assert (
        cures["keep-alive"].startswith("VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5") and "after 1." in found["keep-alive"]["says"]
    )
    assert "VLLM_SERVER_DEV_MODE" in cures["developer routes"]
    assert found["scheduling policy"]["says"] == "First come, first served."


def test_a_well_started_vllm_has_nothing_to_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags that README.md names, and a context of which several fit."""
    made = environment("qwen2tiny")
    flags = ("--max-model-len", "8192")
    with server.vllm(made, log=tmp_path / "vllm.log", model="qwen2tiny", flags=flags) as child:
        child.wait_ready()
        code, found = examined(child.url, capsys)
    states = {check: each["state"] for check, each in found.items()}
    assert code == 0, found
    assert states.pop("scheduling policy") == "note" and set(states.values()) == {"well"}
    assert "4.9" in found["keep-alive"]["says"] or "5." in found["keep-alive"]["says"]
