"""What is seen of a vLLM over its socket, and `prefix-proxy doctor` before one: well set, badly set, away."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from proxy.commands import main
from proxy.config.groups import Upstream as Settings
from proxy.doctor.looking import look
from proxy.doctor.server import Server
from tests.conftest import RunningProxy
from tests.fake_engine import Rules
from tests.fake_replies import Raw, Reply, json_error
from tests.fake_vllm import FakeVllm

WATCHED = 0.5


async def seen(fake: FakeVllm, model: str | None = None, key: str | None = None) -> Server:
    """Look at a fake vLLM; its idle connections are watched for half a second."""
    settings = Settings(url=fake.url, api_key=key)
    return await look(settings, model, report=lambda _doing: None, watch_seconds=WATCHED)


async def test_all_of_a_well_set_server_is_seen(fake_vllm: FakeVllm) -> None:
    server = await seen(fake_vllm)
    assert (server.problem, server.model, server.version, server.max_model_len) == ("", "fake", "0.32.0", 8192)
    assert (server.block_tokens, server.caches_prefixes, server.kv_tokens) == (16, True, 16000)
    assert (server.tools_refused, server.tools_left_out, server.needs_key) == (False, False, False)
    assert server.cold and server.warm and server.warm.cached_tokens
    assert server.cold.prompt_tokens == server.warm.prompt_tokens > server.warm.cached_tokens > 1000
    assert server.cold.cached_tokens is not None and server.cold.cached_tokens < 32
    assert server.template is not None and server.template.traits.tools
    assert (server.idle_seconds, server.watched_seconds) == (None, WATCHED)
    assert server.beyond_loopback is not True and not server.developer_routes


async def test_it_generates_single_tokens_only(fake_vllm: FakeVllm) -> None:
    """It may be a server that people use."""
    await seen(fake_vllm)
    assert {each.body["max_tokens"] for each in fake_vllm.generations} == {1}
    assert len(fake_vllm.generations) <= 7


async def test_faults_are_seen(fake_vllm: FakeVllm) -> None:
    """Early closing, refused tools, no word on what was cached."""
    fake_vllm.keepalive_seconds = 0.2
    fake_vllm.rules = replace(fake_vllm.rules, tool_parser=False)
    await fake_vllm.stop()
    await fake_vllm.start()
    usage = {"prompt_tokens": 700, "completion_tokens": 1, "total_tokens": 701}
    fake_vllm.default = Reply(usage=usage)
    server = await seen(fake_vllm)
    assert server.tools_refused
    assert server.idle_seconds is not None and 0.1 < server.idle_seconds < WATCHED
    assert server.warm is not None and server.warm.cached_tokens is None


async def test_a_key_is_asked_for_and_open_routes_are_seen(start_vllm: Any) -> None:
    fake = await start_vllm(api_key="secret")
    bare = await seen(fake)
    assert bare.needs_key and "key" in bare.problem
    server = await seen(fake, key="secret")
    assert server.needs_key and not server.problem
    assert {"/metrics", "/invocations"} <= set(server.open_paths)


async def test_what_is_no_vllm_is_said_so(fake_vllm: FakeVllm) -> None:
    assert "does not serve other; it serves fake" in (await seen(fake_vllm, "other")).problem
    fake_vllm.answers["/v1/models"] = json_error(404, {"detail": "Not Found"})
    assert "no vLLM" in (await seen(fake_vllm)).problem
    await fake_vllm.stop()
    assert "cannot be reached" in (await seen(fake_vllm)).problem


async def test_the_proxy_itself_is_not_taken_for_vllm(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The usual mistake: its address is the one that people know."""
    assert fake_vllm.url != proxy.url
    server = await look(Settings(url=proxy.url), None, report=lambda _doing: None, watch_seconds=WATCHED)
    assert "This is the proxy" in server.problem


async def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Mapping[str, Any]]:
    """Run the command with --json; return its exit code and what it prints."""
    code = await asyncio.to_thread(main, ["doctor", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


async def test_the_command_says_what_mends_a_badly_set_server(
    start_vllm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its exit code is 1, and 2 when the server is gone."""
    fake = await start_vllm(rules=Rules(tool_parser=False), block_size=128, keepalive_seconds=1.0)
    code, report = await told(capsys, "--upstream", f"{fake.url}/v1")
    mends = {each["check"] for each in report["findings"] if each["state"] == "mend"}
    assert (code, report["result"]) == (1, "to mend")
    assert mends == {"block size", "tool parser", "keep-alive"}
    await fake.stop()
    code, report = await told(capsys, "--upstream", fake.url)
    assert (code, report["result"]) == (2, "not checked")


async def test_a_server_without_metrics_is_judged_by_its_answers(fake_vllm: FakeVllm) -> None:
    fake_vllm.answers["/metrics"] = Raw(status=404)
    server = await seen(fake_vllm)
    assert server.cache is None and server.caches_prefixes
