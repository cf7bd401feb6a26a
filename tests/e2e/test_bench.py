"""`prefix-proxy bench` on a real vLLM: what Open WebUI does costs less through the proxy, and the table says so."""

import asyncio
import json
from typing import Any

import pytest

from proxy.commands import main
from proxy.demo import server
from tests.e2e.conftest import StartProxyBefore

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("vllm", ["qwen2tiny"], indirect=True, scope="session"),
]


async def test_the_bench_on_a_real_vllm(
    start_proxy_before: StartProxyBefore, vllm: server.Child, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Every scenario is measured on both ways; a clock, a document, a memory and a long chat compute at most two thirds.
    """
    proxy = await start_proxy_before()
    words = ["--size", "small", "--users", "2", "--turns", "4", "--output", "24", "--max-seconds", "600", "--json"]
    code = await asyncio.to_thread(main, ["bench", "--upstream", vllm.url, "--proxy", proxy.url, *words])
    told = json.loads(capsys.readouterr().out)
    assert (code, told["problems"]) == (0, [])
    found: dict[str, Any] = {each["scenario"]: each for each in told["scenarios"]}
    assert all(each[way]["first_token_p99_seconds"] > 0 for each in found.values() for way in ("straight", "proxied"))
    assert all(each[way]["cached_tokens"] is not None for each in found.values() for way in ("straight", "proxied"))
    ratios = {name: each["ratio"]["computed_tokens"] for name, each in found.items()}
    assert {name: value for name, value in ratios.items() if value < 0.95} == {}
    assert all(ratios[name] > 1.5 for name in ("clock", "document", "memory", "long")), ratios
