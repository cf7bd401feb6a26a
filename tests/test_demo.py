"""The command `demo`, with a fake vLLM in the environment that it thinks it has made."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from proxy.demo.needs import lacking, this_machine
from proxy.demo.pins import PINS, folder_name
from proxy.demo.server import free_port, is_free

pytestmark = pytest.mark.skipif(bool(lacking(this_machine())), reason="the demo refuses to run on this machine")

ROOT = Path(__file__).parents[1]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache folder whose environment looks whole, and whose Python is the stand-in for vLLM."""
    return with_vllm(tmp_path / "cache", f'exec {sys.executable} {ROOT / "tests/standin_vllm.py"} "$@"')


def with_vllm(cache: Path, script: str) -> Path:
    """Put an environment into `cache` whose vLLM is this shell script."""
    environment = cache / folder_name(sys.version_info[:2])
    (environment / "venv/bin").mkdir(parents=True)
    (environment / "venv/complete.json").write_text(json.dumps(PINS))
    (environment / "smollm2").mkdir()
    (environment / "smollm2/config.json").write_text("{}")
    python = environment / "venv/bin/python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return cache


@contextmanager
def demo(cache: Path, *flags: str, environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run the demo as a user does, and end it if the test has not."""
    command = [sys.executable, "-m", "proxy", "demo", "--cache", str(cache), "--port", str(free_port()), *flags]
    env = {**os.environ, "COLUMNS": "80", **(environ or {})}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def urls_when_up(process: subprocess.Popen[str]) -> list[str]:
    """Read until the demo says that both servers stay up; return their URLs, the proxy's first."""
    assert process.stdout is not None
    text = ""
    while "Ctrl-C stops both" not in text:
        line = process.stdout.readline()
        assert line, text
        text += line
    return re.findall(r"http://127\.0\.0\.1:\d+/v1", text)


def test_once_prints_the_table_and_ends(cache: Path) -> None:
    """
    With --once the table has a row for each turn on both ways, in 80 columns, and the command ends with 0.
    """
    with demo(cache, "--once") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    rows = re.findall(r"^ +(\d) +([\d,]+) +([\d,]+) \( *\d+%\) +[\d.]+ s +([\d,]+) +[\d,]+ \( *\d+%\)", output, re.M)
    assert [row[0] for row in rows] == list("123456"), output
    assert [row[2] for row in rows] == ["0"] * 6, "the chat that goes straight found something in the cache"
    assert "straight" in output
    assert "by proxy" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_both_servers_stay_up_until_the_demo_is_stopped(cache: Path, number: signal.Signals) -> None:
    """
    After the table both URLs answer; Ctrl-C and SIGTERM end both servers and the command ends with 0.
    """
    with demo(cache) as process:
        urls = urls_when_up(process)
        for url in urls:
            with urllib.request.urlopen(f"{url}/models", timeout=5) as response:
                assert json.load(response)["data"][0]["id"] == "smollm2"
        process.send_signal(number)
        assert process.wait(30) == 0
    assert [url for url in urls if not is_free(int(url.split(":")[2].removesuffix("/v1")))] == []


def test_a_vllm_that_does_not_start_is_told_with_its_last_error(tmp_path: Path) -> None:
    """
    What vLLM wrote last, and where its log lies, is what the user sees; exit code 1.
    """
    cache = with_vllm(tmp_path, "echo 'RuntimeError: no such CPU'; exit 3")
    with demo(cache) as process:
        output, _ = process.communicate(timeout=60)
    words = " ".join(output.split())
    assert process.returncode == 1
    assert "vLLM ended while it started: RuntimeError: no such CPU" in words
    assert str(tmp_path / "logs") in words.replace(" ", "")


def test_an_index_without_torch_is_told_in_a_sentence(tmp_path: Path) -> None:
    """
    Where pip finds no build for this machine the demo says of what, and ends with 2.
    """
    empty = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    with demo(tmp_path, environ=empty) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    assert "The package index has no build of torch==" in output


def test_a_taken_port_is_told(cache: Path) -> None:
    """
    A port that the user named and another program has is refused by its number.
    """
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with demo(cache, "--port", str(port)) as process:
            output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"Port {port} is taken" in output
