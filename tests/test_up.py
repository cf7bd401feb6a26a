"""`prefix-proxy up` as a process of its own, with a stand-in for vLLM: started, killed, started again, stopped."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from proxy.commands import main
from tests.test_child import gone, until

STANDIN = Path(__file__).with_name("standin_vllm.py")
SECONDS = 40.0  # the machine may be busy
CHAT = {"model": "some/model", "messages": [{"role": "user", "content": "Which group is the right one for me?"}]}


@dataclass
class Running:
    """The command, the vLLM that it started, and where its proxy listens."""

    process: asyncio.subprocess.Process
    folder: Path
    url: str = ""

    async def line(self, begins: str) -> str:
        """Read until a line begins so; return it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(SECONDS):
            while line := (await self.process.stdout.readline()).decode():
                if line.startswith(begins):
                    return line
        raise AssertionError(f"it ended without a line that begins with {begins!r}")

    def vllm(self) -> int:
        """Return the process id of the last stand-in that was started."""
        return int((self.folder / "pids").read_text().split()[-1])

    async def ended(self, number: signal.Signals) -> int:
        """Send a signal; return the exit code."""
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), SECONDS)


Up = Callable[..., Awaitable[Running]]


def program(folder: Path, script: str) -> None:
    """Put a `vllm` into `folder`, which notes its process id."""
    path = folder / "vllm"
    path.write_text(f'#!/bin/sh\necho $$ >> "{folder}/pids"\n{script}\n')
    path.chmod(0o755)


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Up]:
    """Start the command with the stand-in, or another script, as its vLLM."""
    started: list[Running] = []

    async def start(*words: str, script: str = f'exec "{sys.executable}" "{STANDIN}" "$@"') -> Running:
        program(tmp_path, script)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PREFIX_PROXY_")}
        environ |= {"PATH": f"{tmp_path}:{environ['PATH']}", "TMPDIR": str(tmp_path)}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy", "up", "some/model", "--port", "0", "--vllm-log", str(tmp_path / "vllm.log"),
            *words, stdout=pipe, stderr=pipe, env=environ, cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        started.append(Running(process, tmp_path))
        return started[-1]

    yield start
    for each in started:
        if each.process.returncode is None:
            each.process.kill()
        await each.process.communicate()


async def listening(running: Running) -> Running:
    """Wait until its proxy listens."""
    running.url = (await running.line("prefix-proxy listens on")).split()[3].rstrip(",")
    return running


async def answer(session: aiohttp.ClientSession, url: str) -> int:
    """Ask for a chat's answer; return the status."""
    async with session.post(f"{url}/v1/chat/completions", json=CHAT) as response:
        await response.read()
        return response.status


async def test_a_killed_vllm_is_started_again_counted_and_answers(up: Up) -> None:
    """The proxy stays: 503 between, the same address after.  Stopping ends both, and leaves no socket behind."""
    running = await listening(await up())
    async with aiohttp.ClientSession() as session:
        assert await answer(session, running.url) == 200
        first = running.vllm()
        os.kill(first, signal.SIGKILL)
        assert "killed" in await running.line("vLLM ended: ")
        async with session.get(f"{running.url}/health") as response:
            assert response.status == 200
        await running.line("vLLM is back")
        assert running.vllm() != first
        assert await answer(session, running.url) == 200
        async with session.get(f"{running.url}/metrics") as response:
            metrics = await response.text()
    assert 'proxy_vllm_restarts_total{cause="killed"} 1.0' in metrics
    assert await running.ended(signal.SIGTERM) == 0
    assert gone(running.vllm()) and not list(running.folder.glob("prefix-proxy-*"))


async def test_ctrl_c_stops_both(up: Up) -> None:
    running = await listening(await up())
    assert await running.ended(signal.SIGINT) == 0
    assert gone(running.vllm())


async def test_vllm_gets_the_socket_the_advice_and_the_users_flags(up: Up) -> None:
    """What stands after `--` goes to vLLM as it is."""
    script = f'echo "$@" > "$(dirname "$0")/words"; exec "{sys.executable}" "{STANDIN}" "$@"'
    running = await listening(await up("--", "--served-model-name", "other", "--max-model-len", "4096", script=script))
    words = (running.folder / "words").read_text()
    assert re.search(r"^serve some/model --uds \S+/vllm.sock --enable-prefix-caching ", words)
    assert words.endswith("--served-model-name other --max-model-len 4096\n")


async def test_a_vllm_that_ends_while_it_starts_is_told_with_its_cause(up: Up) -> None:
    """Exit code 1; nothing is started again, since it would end the same way."""
    running = await up(script="echo 'torch.OutOfMemoryError: CUDA out of memory.'; exit 1")
    _, err = await asyncio.wait_for(running.process.communicate(), SECONDS)
    assert running.process.returncode == 1
    assert "vLLM ended while it started. The GPU's memory does not suffice." in err.decode()
    assert "CUDA out of memory" in err.decode() and len((running.folder / "pids").read_text().split()) == 1


async def test_a_signal_while_vllm_starts_ends_it(up: Up) -> None:
    """Nobody has to wait for minutes of loading."""
    running = await up(script="exec sleep 60")
    await until(lambda: (running.folder / "pids").exists())
    assert await running.ended(signal.SIGTERM) == 143
    assert gone(running.vllm())


async def test_vllm_ends_when_the_proxy_is_killed(up: Up) -> None:
    running = await listening(await up())
    running.process.kill()
    await until(lambda: gone(running.vllm()))


def test_a_dry_run_prints_the_command_its_reasons_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "Qwen2.5-tiny"
    folder.mkdir()
    assert main(["up", str(folder), "--dry-run", "--json", "--", "--seed", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["command"][:3] == ["vllm", "serve", str(folder)] and told["command"][-2:] == ["--seed", "1"]
    assert {"text": "--enable-prefix-caching", "reason": "what the proxy is for"} in told["advice"]
    assert main(["up", str(folder), "--dry-run"]) == 0
    assert "vllm serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--json"], "--json goes with --dry-run"),
        (["--upstream", "http://x"], "Leave --upstream out"),
        (["--gpu", "abacus", "--dry-run"], "--gpu is not known"),
        (["--", "--uds", "x"], "Leave --uds out"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "m", *words]) == 2
    assert says in capsys.readouterr().err
