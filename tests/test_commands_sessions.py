"""`prefix-proxy sessions`, run as a user runs it."""

import argparse
import asyncio
import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proxy.commands import sessions as command
from proxy.config import Key, SettingError
from proxy.downstream.auth import hash_token
from proxy.store import SessionKey, SessionRow
from proxy.store.sessions import open_store
from tests.conftest import RunningProxy, StartProxy
from tests.store_help import count, key, row
from tests.test_admin import fill

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.sqlite3"
    async with open_store(path) as store:
        store.put(row(1, now=time.time() - 5000))
        store.put(row(2))
        odd = SessionKey(key().tenant, key(3).chat, "[red]\x1b[2Jmodel\n")
        store.put(SessionRow(odd, 0.0, 0.0, 9e9, 2, 0, b"", b"words of a user"))
    return path


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_a_list_in_a_pipe_is_lines_of_columns(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parsed("list", "--database", str(path))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[0].split("\t")[:3] == [key(2).id, "m", "1"]
    assert "\x1b" not in lines[2] and "[red]?[2Jmodel?" in lines[2] and "words" not in lines[2]


def test_a_list_as_json_is_what_the_route_answers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parsed("list", "--json", "--database", str(path))) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["total"] == 3
    assert set(answer["sessions"][0]) == {"id", "model", "turns", "created", "last_seen", "expires_seconds", "bytes"}


def test_on_a_terminal_it_is_a_table(path: Path) -> None:
    main, side = pty.openpty()
    words = ["sessions", "list", "--database", str(path)]
    code = f"import sys; from proxy.commands import main; sys.exit(main({words!r}))"
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=side, env=environ, cwd=REPOSITORY)
    os.close(side)
    shown = b""
    try:
        while part := os.read(main, 65536):
            shown += part
    except OSError:
        pass  # Linux says so when the other side is closed.
    os.close(main)
    assert process.wait(timeout=30) == 0
    text = shown.decode()
    assert "3 sessions" in text and "expires seconds" in text and "[red]" in text and "\x1b[2J" not in text


def test_clear_takes_expired_ones_or_one_or_all(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--database", str(path))
    assert command.run(parsed("clear", *where)) == 0
    assert command.run(parsed("clear", "--session", key(2).id, "--json", *where)) == 0
    assert command.run(parsed("clear", "--all", *where)) == 0
    assert capsys.readouterr().out == 'cleared 1\n{"cleared": 1}\ncleared 1\n'
    assert count(path) == 0


def test_the_database_of_the_settings_is_taken(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIX_PROXY_DATABASE", str(path))
    assert command.run(parsed("clear")) == 0
    monkeypatch.delenv("PREFIX_PROXY_DATABASE")
    with pytest.raises(SettingError, match="--url"):
        command.run(parsed("clear"))


def test_what_cannot_be_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parsed("list", "--database", str(tmp_path / "none"))) == 1
    assert capsys.readouterr().err == "prefix-proxy: there is no session database at this path\n"
    for words in (("list", "--all"), ("clear", "--all", "--session", "x"), ("list", "--key", "k")):
        with pytest.raises(SettingError):
            command.run(parsed(*words))


async def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = await asyncio.to_thread(command.run, parsed(*words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


async def test_a_running_proxy_is_asked_by_its_url(proxy: RunningProxy, capsys: pytest.CaptureFixture[str]) -> None:
    fill(proxy)
    code, out, _ = await told(capsys, "list", "--json", "--url", proxy.url + "/v1/")
    assert code == 0 and json.loads(out)["total"] == 3
    assert await told(capsys, "clear", "--url", proxy.url) == (0, "cleared 1\n", "")
    assert await told(capsys, "clear", "--session", key(2).id, "--url", proxy.url) == (0, "cleared 1\n", "")
    assert await told(capsys, "clear", "--all", "--url", proxy.url) == (0, "cleared 1\n", "")


async def test_a_key_is_sent_and_a_refusal_is_told(
    start_proxy: StartProxy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start_proxy(keys=(Key("boss", hash_token("sk-admin"), admin=True),))
    fill(proxy)
    code, _, err = await told(capsys, "list", "--url", proxy.url)
    assert code == 1 and err.startswith("prefix-proxy: refused with status 401: ")
    assert (await told(capsys, "clear", "--all", "--url", proxy.url, "--key", "sk-admin"))[1] == "cleared 3\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("sk-admin\n"))
    assert (await told(capsys, "list", "--json", "--url", proxy.url, "--key", "-"))[0] == 0


async def test_a_url_where_no_proxy_is_is_told(
    proxy: RunningProxy, unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in (f"http://127.0.0.1:{unused_tcp_port}", "nonsense", "http://[::1"):
        code, _, err = await told(capsys, "list", "--url", url)
        assert (code, err) == (1, "prefix-proxy: the proxy cannot be reached at this URL\n")
    vllm = str(proxy.state.config.upstream.url)
    code, _, err = await told(capsys, "list", "--url", vllm)
    assert code == 1 and "404" in err
