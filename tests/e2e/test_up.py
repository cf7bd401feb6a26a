"""`prefix-proxy up` with a real vLLM: our template in place of one that wastes the cache, a restart after a kill."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from proxy.demo import server
from tests.e2e.conftest import environment
from tests.test_child import gone

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

READY_SECONDS = 300.0
CHAT = {"messages": [{"role": "user", "content": "Which river is long?"}], "max_tokens": 4}
FLAGS = (
    "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--load-format", "dummy", "--max-num-seqs", "16",
    "--max-model-len", "4096",
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tiny Qwen2.5 with a template that strips what was generated."""
    made = environment("qwen2tiny").model("qwen2tiny")
    folder = tmp_path / "strips-Qwen2.5"
    folder.mkdir()
    for path in made.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    settings = json.loads((made / "tokenizer_config.json").read_text())
    steady = settings["chat_template"]
    # Qwen2.5's own renders a reply where it renders users and systems: there it is stripped now.
    settings["chat_template"] = steady.replace(
        "message.content + '<|im_end|>'", "message.content | trim + '<|im_end|>'"
    )
    assert settings["chat_template"] != steady
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment for the CPU, with a `vllm` on its PATH that notes its process id."""
    python = environment("qwen2tiny").python
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    command = f'echo $$ >> "{tmp_path}/pids"\nexec "{python}" -m vllm.entrypoints.cli.main "$@"'
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o755)
    made = {**server._inherited(), **server.VLLM_SETTINGS, "LD_PRELOAD": server._preloaded(python.parent.parent)}
    return {**made, "PATH": f"{program.parent}:{python.parent}:{os.environ['PATH']}"}


@pytest.fixture
async def up(model: Path, environ: dict[str, str], tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, with that model."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "up", str(model), "--port", "0", "--vllm-log", str(tmp_path / "vllm.log"),
        "--", *FLAGS, stdout=asyncio.subprocess.PIPE, env=environ, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    yield process
    with suppress(ProcessLookupError):
        process.terminate()
    await process.communicate()


async def line(process: asyncio.subprocess.Process, says: str) -> str:
    """Read until a line says so; return it."""
    assert process.stdout is not None
    async with asyncio.timeout(READY_SECONDS):
        while told := (await process.stdout.readline()).decode():
            if says in told:
                return told
    raise AssertionError(f"it ended without saying {says!r}")


async def test_it_serves_by_our_template_and_survives_a_killed_vllm(
    up: asyncio.subprocess.Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's own template is not stable and ours fits; after SIGKILL the same address answers chats again."""
    chosen = await line(up, "template")
    assert "qwen2.5.jinja takes its place" in chosen
    url = (await line(up, "prefix-proxy listens on")).split()[3].rstrip(",")
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/chat/completions", json=CHAT) as response:
            assert response.status == 200
        first = int((tmp_path / "pids").read_text())
        killed = time.monotonic()
        os.kill(first, signal.SIGKILL)
        ended = await line(up, "vLLM ended: ")
        async with session.get(f"{url}/v1/models") as response:
            assert response.status == 200
        back = await line(up, "vLLM is back")
        async with session.post(f"{url}/v1/chat/completions", json=CHAT) as response:
            assert response.status == 200
        async with session.get(f"{url}/metrics") as response:
            assert 'proxy_vllm_restarts_total{cause="killed"} 1.0' in await response.text()
    with capsys.disabled():
        print(f"\n{chosen}{ended}{back}answered again {time.monotonic() - killed:.0f} s after the kill")
    up.terminate()
    assert await asyncio.wait_for(up.wait(), 60) == 0
    last = (tmp_path / "pids").read_text().split()[-1]
    assert gone(int(last))
