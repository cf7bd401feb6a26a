"""`prefix-proxy doctor` as a user types it: what goes together, what it prints, its help."""

import io
import json

import pytest

from proxy.commands import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "Name what to look at"),
        (["--flags", "x", "--fix"], "--fix goes with --openwebui-key"),
        (["--flags", "x", "--model", "m"], "--model goes with --upstream"),
        (["--openwebui", "http://x", "--openwebui-key", "k", "--fix"], "add --yes"),
        (["--openwebui", "x"], "must be a URL"),
        (["--upstream", "ftp://x"], "--upstream cannot be used"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["doctor", *words]) == 2
    assert says in capsys.readouterr().err


def test_findings_are_printed_with_why_and_what_mends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--flags", "vllm serve m --uds x --swap-space 4"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "flags" and lines[1] == "  mend   --swap-space: This flag does not exist."
    assert lines[2].strip().startswith("why: ") and lines[3].strip().startswith("mend: --kv-offloading-size")
    assert lines[-1] == "3 things to mend."


def test_flags_may_come_from_stdin_and_go_out_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("vllm serve m --cache-root /x"))
    assert main(["doctor", "--flags", "-", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["result"] == "to mend" and report["findings"][0]["check"] == "--cache-root"


def test_the_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    told = capsys.readouterr().out
    assert "examples:" in told and "exit codes: 0 well, 1 something to mend, 2" in told
