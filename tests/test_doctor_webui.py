"""`prefix-proxy doctor --openwebui`: what is read from Open WebUI's API, and what `--fix` changes there."""

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from proxy.commands import main
from tests.conftest import RunningProxy
from tests.fake_webui import KEY, FakeWebUI

REPOSITORY = Path(__file__).parent.parent
HEADERS = {"X-OpenWebUI-Message-Id": "{{MESSAGE_ID}}", "X-OpenWebUI-Task": "{{TASK}}"}
USERS = {"X-OpenWebUI-User-Id": "{{USER_ID}}", "X-OpenWebUI-Chat-Id": "{{CHAT_ID}}"}


def config_of(url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a configuration with one connection, and what else stands in it."""
    settings = {"enable": True, "tags": [], **({"headers": dict(headers)} if headers is not None else {})}
    return {
        "ENABLE_OPENAI_API": True,
        "OPENAI_API_BASE_URLS": [f"{url}/v1"],
        "OPENAI_API_KEYS": ["k"],
        "OPENAI_API_CONFIGS": {"0": settings},
    }


async def told(
    capsys: pytest.CaptureFixture[str], webui: FakeWebUI, *words: str, key: str = KEY
) -> tuple[int, dict[str, Any]]:
    """Run the command with --json; return its exit code and the findings by check."""
    with_key = ["--openwebui-key", key] if key else []
    code = await asyncio.to_thread(main, ["doctor", "--openwebui", webui.url, *with_key, "--json", *words])
    return code, {each["check"]: each for each in json.loads(capsys.readouterr().out)["findings"]}


async def test_a_well_set_one_has_nothing_to_mend(proxy: RunningProxy, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether users are named is seen by having it call us: that setting is in its environment only."""
    async with FakeWebUI(config_of(proxy.url, HEADERS), forwards=True).running() as webui:
        code, found = await told(capsys, webui, "--proxy", proxy.url)
    assert code == 0
    assert {check for check, each in found.items() if each["state"] == "well"} == {
        "reachable", "connection", "message and task", "user and chat", "task model",
    }  # fmt: skip


async def test_what_is_lacking_is_named_with_the_setting(
    proxy: RunningProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeWebUI(config_of(proxy.url)).running() as webui:
        webui.tasks = {"TASK_MODEL_EXTERNAL": "small", "ENABLE_AUTOCOMPLETE_GENERATION": True}
        webui.documents = {"RAG_TEMPLATE": "Read this: {{CONTEXT}}", "RAG_FULL_CONTEXT": True}
        code, found = await told(capsys, webui, "--proxy", proxy.url)
    assert code == 1
    assert (
        '{"X-OpenWebUI-Message-Id": "{{MESSAGE_ID}}", "X-OpenWebUI-Task": "{{TASK}}"}'
        in found["message and task"]["mend"]
    )
    assert "ENABLE_FORWARD_USER_INFO_HEADERS=true" in found["user and chat"]["mend"]
    assert "history.document_leads" in found["document template"]["mend"]
    assert "RAG_SYSTEM_CONTEXT=true" in found["documents"]["mend"]
    assert (found["task model"]["state"], found["autocompletion"]["state"]) == ("note", "note")


async def test_a_connection_that_passes_the_proxy_by_or_fails_is_told(
    proxy: RunningProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    vllm = proxy.state.config.upstream.url
    async with FakeWebUI(config_of(vllm, HEADERS)).running() as webui:
        _, found = await told(capsys, webui, "--proxy", proxy.url, "--upstream", vllm)
        assert "straight to vLLM" in found["connection"]["says"]
        webui.config = config_of("http://127.0.0.1:1")
        code, found = await told(capsys, webui, "--proxy", "http://127.0.0.1:1")
        assert code == 1 and "gets no models" in found["connection"]["says"]
        code, found = await told(capsys, webui, "--proxy", proxy.url)
        assert code == 1 and "No connection goes to the proxy" in found["connection"]["says"]


async def test_without_the_right_key_the_rest_is_not_checked(
    proxy: RunningProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeWebUI(config_of(proxy.url)).running() as webui:
        assert (await told(capsys, webui, key=""))[0] == 2
        code, found = await told(capsys, webui, key="wrong")
        assert code == 2 and "does not take this key (it answers 401)" in found["reachable"]["says"]
    code, found = await told(capsys, webui)
    assert code == 2 and "cannot be reached" in found["reachable"]["says"]


async def test_fix_sets_the_lacking_headers_and_nothing_else(
    proxy: RunningProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Headers that were there stay; keys and other settings too; a second time there is nothing to do."""
    async with FakeWebUI(config_of(proxy.url, {"X-Own": "1"})).running() as webui:
        before = json.loads(json.dumps(webui.config))
        code, found = await told(capsys, webui, "--proxy", proxy.url, "--fix", "--yes")
        before["OPENAI_API_CONFIGS"]["0"]["headers"] = {"X-Own": "1", **HEADERS, **USERS}
        assert code == 0 and webui.config == before and found["user and chat"]["state"] == "well"
        await told(capsys, webui, "--proxy", proxy.url, "--fix", "--yes")
        assert webui.updates == 1


async def test_fix_shows_a_diff_and_does_nothing_without_a_yes(proxy: RunningProxy) -> None:
    """On a terminal it asks; the default is no."""
    async with FakeWebUI(config_of(proxy.url)).running() as webui:
        shown = await asyncio.to_thread(_on_terminal, b"\n", webui.url, proxy.url)
        assert '+  "X-OpenWebUI-Task": "{{TASK}}"' in shown and "[y/N]" in shown
        assert webui.updates == 0
        await asyncio.to_thread(_on_terminal, b"y\n", webui.url, proxy.url)
        assert webui.updates == 1


def _on_terminal(typed: bytes, webui: str, proxy: str) -> str:
    parent, child = pty.openpty()
    words = [sys.executable, "-m", "proxy", "doctor", "--openwebui", webui, "--openwebui-key", KEY, "--proxy", proxy]
    with subprocess.Popen(
        [*words, "--fix"], cwd=REPOSITORY, stdin=child, stdout=child, stderr=child, env={**os.environ, "TERM": "dumb"}
    ) as process:
        os.close(child)
        os.write(parent, typed)
        shown = bytearray()
        with suppress(OSError):
            while part := os.read(parent, 65536):
                shown += part
        os.close(parent)
        process.wait()
    return shown.decode()
