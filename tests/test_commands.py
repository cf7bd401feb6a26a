"""The command line: what each command prints and returns."""

import importlib.util
import io
import json
import tomllib
from pathlib import Path

import pytest

from proxy.commands import COMMANDS, main
from proxy.config.keys import keys_from
from proxy.config.show import markdown
from proxy.downstream.auth import matches


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of whoever runs the tests do not count."""
    import os

    for name in [name for name in os.environ if name.startswith("PREFIX_PROXY_")]:
        monkeypatch.delenv(name)


def test_every_command_of_the_table_has_a_module_with_its_two_functions() -> None:
    for name, command in COMMANDS.items():
        assert importlib.util.find_spec(command.module) is not None, name
        module = importlib.import_module(command.module)
        assert callable(module.add_arguments) and callable(module.run), name


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0 and all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["config", "--no-such-flag"], ["config", "--prof", "safe"]])
def test_wrong_use_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "config"])
def test_a_bad_setting_is_one_plain_sentence_and_exit_code_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--port", "99999"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert shown.err.startswith("prefix-proxy: --port = '99999' cannot be used")


def test_config_prints_values_and_where_they_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIX_PROXY_UPSTREAM_API_KEY", "canary-key")
    monkeypatch.setenv("PREFIX_PROXY_PROFILE", "safe")
    assert main(["config", "--port", "9001", "--allow-anonymous"]) == 0
    shown = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert shown["listen.port"] == ["9001", "--port"]
    assert shown["listen.allow_anonymous"] == ["true", "--allow-anonymous"]
    assert shown["profile"] == ["safe", "PREFIX_PROXY_PROFILE"]
    assert shown["upstream.api_key"] == ["***", "PREFIX_PROXY_UPSTREAM_API_KEY"]
    assert shown["drain.seconds"] == ["30", "default"]


def test_config_as_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json", "--upstream", "http://10.0.0.9:8000/v1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["upstream.url"] == {"value": "http://10.0.0.9:8000", "origin": "--upstream"}
    assert shown["lengths.default_output_tokens"] == {"value": None, "origin": "default"}


def test_config_as_markdown_is_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--markdown"]) == 0
    assert capsys.readouterr().out == markdown()


def test_keys_prints_a_table_that_matches_the_key_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The table goes to stdout and the key to stderr, so that `>> keys.toml` stores the hash alone."""
    assert main(["keys", "open-webui", "--trusted"]) == 0
    shown = capsys.readouterr()
    (key,) = keys_from(tomllib.loads(shown.out)["keys"], "stdout")
    token = shown.err.split()[-1]
    assert matches(key.hash, token) and token not in shown.out
    assert (key.name, key.trusted, key.admin) == ("open-webui", True, False)


def test_keys_hashes_an_existing_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("an-existing-key-of-mine\n"))
    assert main(["keys", "old", "--admin", "--read"]) == 0
    shown = capsys.readouterr()
    (key,) = keys_from(tomllib.loads(shown.out)["keys"], "stdout")
    assert matches(key.hash, "an-existing-key-of-mine") and key.admin and shown.err == ""


@pytest.mark.parametrize("name", ["local", "anonymous", "two words", ""])
def test_keys_refuses_a_name_that_cannot_be_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", name]) == 2
    assert f"NAME = {name!r} cannot be used" in capsys.readouterr().err


def test_keys_refuses_a_key_that_can_be_guessed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("secret\n"))
    assert main(["keys", "weak", "--read"]) == 2
    assert "fewer than 16" in capsys.readouterr().err


def test_the_wheel_names_the_command() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["prefix-proxy"] == "proxy.commands:main"
