"""What keeps vLLM running: counted ends, growing pauses, and a restart that fails is tried again."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from proxy.child import Child
from proxy.core.endings import CAUSES
from proxy.restart_metrics import RestartMetrics
from proxy.upkeep import Keeper
from tests.conftest import RunningProxy


async def healthy(*_args: object, **_kwargs: object) -> tuple[int, str, bytes]:
    """Answer as a vLLM that is well."""
    return 200, "", b""


async def silent(*_args: object, **_kwargs: object) -> None:
    """Answer as a vLLM that is away."""


def child(tmp_path: Path, script: str) -> Child:
    """Describe a program in Python."""
    return Child([sys.executable, "-c", script], dict(os.environ), tmp_path / "log")


async def test_ready_is_when_it_answers_and_an_early_end_is_told(tmp_path: Path) -> None:
    keeper = Keeper(child(tmp_path, "raise MemoryError('no room')"), lambda _sentence: None)
    await keeper.child.start()
    assert await keeper.wait_ready(healthy) is None
    ending = await keeper.wait_ready(silent)
    assert ending is not None and ending.cause == "host_memory"


async def test_each_end_is_counted_by_its_cause_and_followed_by_a_start(
    tmp_path: Path, proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an app; when the app ends nothing is started any more, and nothing runs."""
    monkeypatch.setattr("proxy.upkeep.pause_seconds", lambda failures: 0.02 * failures)
    told: list[str] = []
    keeper = Keeper(child(tmp_path, "print('torch.OutOfMemoryError: x'); raise SystemExit(1)"), told.append)
    await keeper.child.start()
    beside = keeper.beside(proxy.app)
    await anext(beside)
    async with asyncio.timeout(20):
        while proxy.sample("proxy_vllm_restarts_total", cause="gpu_memory") < 3:  # noqa: ASYNC110  a count of metrics
            await asyncio.sleep(0.02)
    with pytest.raises(StopAsyncIteration):
        await anext(beside)
    assert keeper.child.code is not None
    assert any(line.startswith("vLLM ended: The GPU's memory does not suffice.") for line in told)


def test_every_cause_has_its_series_from_the_start() -> None:
    """So that an alert on a rise sees the first one."""
    registry = CollectorRegistry()
    metrics = RestartMetrics(registry)
    metrics.ended("killed")
    text = generate_latest(registry).decode()
    assert all(f'proxy_vllm_restarts_total{{cause="{cause}"}}' in text for cause in CAUSES)
    assert 'cause="killed"} 1.0' in text
