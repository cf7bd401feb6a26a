"""`prefix-proxy doctor --openwebui` against a real Open WebUI: what it says of a bare one, and after `--fix`."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.commands import main
from proxy.demo.needs import Missing
from tests.conftest import RunningProxy
from tests.e2e import openwebui
from tests.e2e.conftest import cache_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Findings = Mapping[str, Mapping[str, Any]]
ADMIN = {"name": "Admin", "email": "admin@example.org", "password": "only for this test 1"}


@dataclass
class Bare:
    """An Open WebUI that names nobody, and where it thinks the proxy is."""

    url: str
    proxy: str


@pytest.fixture
def bare(proxy: RunningProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bare]:
    """One without custom headers that forwards no users, before a proxy with the fake vLLM behind it."""
    try:
        python = openwebui.ensure(cache_folder())
    except Missing as error:
        pytest.fail(str(error), pytrace=False)
    monkeypatch.setattr(openwebui, "HEADERS", {})
    monkeypatch.setitem(openwebui.SETTINGS, "ENABLE_FORWARD_USER_INFO_HEADERS", "false")
    with ExitStack() as running:
        embeddings = running.enter_context(openwebui.embeddings())
        page = running.enter_context(openwebui.open_webui(python, proxy.url, embeddings, tmp_path))
        page.wait_ready()
        yield Bare(page.url, proxy.url)


async def told(capsys: pytest.CaptureFixture[str], bare: Bare, token: str, *words: str) -> tuple[int, Findings]:
    """Run the command as a user does; return its exit code and the findings by check."""
    common = ["doctor", "--openwebui", bare.url, "--openwebui-key", token, "--proxy", bare.proxy, *words]
    code = await asyncio.to_thread(main, [*common, "--json"])
    captured = capsys.readouterr()
    findings = json.loads(captured.out)["findings"]
    with capsys.disabled():
        print("", captured.err, *(f"{each['state']:6} {each['check']}: {each['says']}" for each in findings), sep="\n")
    return code, {each["check"]: each for each in findings}


async def test_a_bare_open_webui_is_told_what_it_lacks_and_fix_sets_it(
    bare: Bare, capsys: pytest.CaptureFixture[str]
) -> None:
    """The headers it sends from then on are seen by the proxy's own eyes: they are in its configuration."""
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{bare.url}/api/v1/auths/signup", json=ADMIN) as response:
            token = (await response.json())["token"]
        code, found = await told(capsys, bare, token)
        assert code == 1 and found["connection"]["state"] == "well"
        assert {check for check, each in found.items() if each["state"] == "mend"} == {
            "message and task", "user and chat",
        }  # fmt: skip
        assert found["user and chat"]["says"] == "They are not named."
        assert {"task model", "documents"} <= found.keys()
        code, found = await told(capsys, bare, token, "--fix", "--yes")
        assert code == 0 and found["user and chat"]["state"] == found["message and task"]["state"] == "well"
        async with session.get(f"{bare.url}/openai/config", headers={"Authorization": f"Bearer {token}"}) as response:
            config = await response.json()
    assert config["OPENAI_API_CONFIGS"]["0"]["headers"]["X-OpenWebUI-Chat-Id"] == "{{CHAT_ID}}"
    assert config["OPENAI_API_BASE_URLS"] == [f"{bare.proxy}/v1"]
