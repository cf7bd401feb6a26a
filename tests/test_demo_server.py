"""Child servers of the demo: they become ready, they say why not, and nothing of them is left."""

import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from proxy.demo import server
from proxy.demo.recipe import Environment

SERVE = (
    "import http.server; print('up', flush=True);"
    "http.server.test(http.server.SimpleHTTPRequestHandler, port=PORT, bind='127.0.0.1')"
)


def child(tmp_path: Path, script: str, *, ready_path: str = "/", stop: signal.Signals = signal.SIGINT) -> server.Child:
    """Describe a child that runs a Python script; PORT in it is its port."""
    port = server.free_port()
    command = [sys.executable, "-c", script.replace("PORT", str(port))]
    return server.Child(
        "Child",
        command,
        port=port,
        log=tmp_path / "logs" / "log",
        environ=os.environ,
        ready_path=ready_path,
        stop_signal=stop,
    )


def gone(pid: int) -> bool:
    """Say whether there is no such process, or only what is left of one that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_child_becomes_ready_and_is_stopped_by_its_signal(tmp_path: Path) -> None:
    """
    Ready is when it answers 200; after the block it is gone and its port is free.
    """
    with child(tmp_path, SERVE) as running:
        seconds = running.wait_ready(limit_seconds=20)
        assert 0 <= seconds < 20
        assert running.running
        with urllib.request.urlopen(running.url, timeout=5) as response:
            assert response.status == 200
    assert not running.running
    assert server.is_free(int(running.url.rpartition(":")[2]))


def test_a_child_can_be_started_again_on_its_port(tmp_path: Path) -> None:
    """
    A restart of vLLM is the same child, stopped and started.
    """
    with child(tmp_path, SERVE) as running:
        running.wait_ready(limit_seconds=20)
        running.stop()
        running.start()
        running.wait_ready(limit_seconds=20)
        assert running.running


def test_a_child_that_ends_early_is_told_with_its_last_error(tmp_path: Path) -> None:
    """
    The last line with an error in it says more than the last line.
    """
    script = "print('ValueError: too little memory'); print('Goodbye.'); raise SystemExit(1)"
    with child(tmp_path, script) as running, pytest.raises(server.ServerFailed, match="ValueError: too little memory"):
        running.wait_ready(limit_seconds=20)


def test_a_child_that_never_becomes_ready_is_given_up(tmp_path: Path) -> None:
    """
    An answer that is not 200 is not ready; the limit is told.
    """
    waited: list[int] = []
    with child(tmp_path, SERVE, ready_path="/nothing") as running:
        with pytest.raises(server.ServerFailed, match="not ready after 1 s"):
            running.wait_ready(limit_seconds=1, waiting=lambda: waited.append(1))
        assert waited


def test_what_a_child_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A child that does not listen to its signal is killed, and its own children too.
    """
    monkeypatch.setattr(server, "STOP_SECONDS", 0.3)
    script = (
        "import signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        f"print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True); {SERVE}"
    )
    with child(tmp_path, script) as running:
        running.wait_ready(limit_seconds=20)
        grandchild = int(running.log.read_text().splitlines()[0])
        assert not gone(grandchild)
    deadline = time.monotonic() + 5
    while not gone(grandchild) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(grandchild)


def test_a_child_that_was_never_started_can_be_stopped(tmp_path: Path) -> None:
    """
    Clean-up does not ask how far the start came.
    """
    never = child(tmp_path, SERVE)
    never.stop()
    assert never.pid is None
    assert not never.running


def test_vllm_is_started_offline_and_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """
    Settings for another vLLM or proxy in our environment do not reach the demo's; its own do.
    """
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("PREFIX_PROXY_PROFILE", "off")
    environment = Environment(tmp_path)
    described = server.vllm(environment, log=tmp_path / "log", port=1234, flags=("--more",))
    environ = described._environ
    assert "VLLM_API_KEY" not in environ
    assert "PREFIX_PROXY_PROFILE" not in environ
    assert (environ["HF_HUB_OFFLINE"], environ["VLLM_NO_USAGE_STATS"]) == ("1", "1")
    words = " ".join(described.command)
    assert "--block-size 32" in words
    assert "--enable-prompt-tokens-details" in words
    assert words.endswith("--more")
    assert "--load-format" not in words
    assert "--load-format dummy" in " ".join(server.vllm(environment, log=tmp_path / "log", model="qwen2tiny").command)
