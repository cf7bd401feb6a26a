"""Every query of dashboard and rules, asked of a real Prometheus; every alert is made to fire by what it warns of."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from proxy.upstream.vllm import Models
from tests.bodies import eventually
from tests.conftest import RunningProxy, StartProxy
from tests.fake_replies import Reply, json_error
from tests.fake_vllm import FakeVllm
from tests.prometheus import Gpu, Prometheus, alerts, dashboard_queries, filled_in, rule_queries, running

PROGRAM = shutil.which("prometheus") or ""
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PROGRAM, reason="Prometheus is not installed (Debian: prometheus)"),
]
WINDOW = "20s"
SCRAPES_SECONDS = 0.6
TITLE = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history."


class Scene:
    """A proxy before a fake vLLM, a GPU, and a Prometheus that watches all three."""

    def __init__(self, proxy: RunningProxy, fake: FakeVllm, gpu: Gpu, prometheus: Prometheus, database: Path) -> None:
        self.proxy, self.fake, self.gpu, self.prometheus, self.database = proxy, fake, gpu, prometheus, database
        self.number = 0
        self.fired: set[str] = set()

    def name(self) -> str:
        """Return a chat id that nobody else has."""
        self.number += 1
        return f"chat-{self.number}"

    async def ask(self, name: str, messages: list[dict[str, Any]], **fields: Any) -> int:
        """Send one request of a chat; return its status."""
        headers = {"X_OpenWebUI_User_Id": "u", "X_OpenWebUI_Chat_Id": name}
        headers |= {key: fields.pop(key) for key in list(fields) if key.startswith("X_")}
        body = {"model": "fake", "messages": messages, "stream": True, **fields}
        async with self.proxy.post(body, **headers) as response:
            await response.read()
            return response.status

    async def chat(self, turns: int, words: int = 60) -> None:
        """Tell a chat of some turns, each of which goes on from the last."""
        name, told = self.name(), list[dict[str, Any]]()
        for turn in range(turns):
            told.append({"role": "user", "content": f"{name} turn {turn}: " + "some words " * words})
            await self.ask(name, told)
            told.append({"role": "assistant", "content": "All right."})

    async def traffic(self) -> None:
        """Let every kind of thing happen once."""
        await asyncio.gather(*(self.chat(3) for _ in range(6)))
        name = self.name()
        await self.ask(name, [{"role": "user", "content": "hi " * 20}], max_tokens=5000)
        await self.ask(name, [{"role": "user", "content": f"{TITLE} {name}"}], X_OpenWebUI_Task="title_generation")
        await self.ask(self.name(), [{"role": "user", "content": f"{name} " + "word " * 4000}, *_pairs(60)])
        async with self.proxy.session.get(f"{self.proxy.url}/nothing") as response:
            await response.read()

    async def fires(self, name: str, again: Callable[[], Awaitable[None]] | None = None) -> None:
        """Wait until an alert fires; `again` makes what it warns of happen once more."""
        async with asyncio.timeout(60):
            while name not in await self.prometheus.firing():
                if again is not None:
                    await again()
                await asyncio.sleep(SCRAPES_SECONDS)
        self.fired.add(name)


def _pairs(count: int) -> list[dict[str, Any]]:
    told = ({"role": ("assistant", "user")[at % 2], "content": f"{at} " + "word " * 100} for at in range(count))
    return [*told, {"role": "user", "content": "and now?"}]


@pytest.fixture
async def scene(start_proxy: StartProxy, fake_vllm: FakeVllm, tmp_path: Path) -> AsyncIterator[Scene]:
    """Everything running, and traffic before and after several scrapes."""
    gpu, database = Gpu(), tmp_path / "sessions.sqlite3"
    settings = {"admission__concurrent": 3, "admission__queue_requests": 100, "models__refresh_seconds": 0.3}
    proxy = await start_proxy(database=str(database), **settings)
    fake_vllm.default = Reply("All right.", gap_seconds=0.001)
    async with gpu.serving() as address:
        targets = {
            "prefix-proxy:9100": f"127.0.0.1:{proxy.port}",
            "vllm:8000": f"127.0.0.1:{fake_vllm.port}",
            "dcgm-exporter:9400": address,
        }
        async with running(PROGRAM, tmp_path, targets) as prometheus:
            scene = Scene(proxy, fake_vllm, gpu, prometheus, database)
            await scene.traffic()
            await asyncio.sleep(SCRAPES_SECONDS)
            await scene.traffic()
            await asyncio.sleep(SCRAPES_SECONDS)
            yield scene


async def test_every_query_of_the_dashboard_and_every_recorded_one_has_data(scene: Scene) -> None:
    """A panel that stays empty for ever would say that all is well."""
    queries = [(name, filled_in(query, WINDOW)) for name, query in dashboard_queries()]
    queries += [(name, query) for name, query in rule_queries() if name not in alerts()]
    found = {name: await scene.prometheus.query(query) for name, query in queries}
    for name, values in found.items():
        print(f"{name} | {len(values)} series | {', '.join(f'{value:.4g}' for value in values[:3])}")
    assert [name for name, values in found.items() if not values] == []


async def test_every_alert_fires_when_that_happens_which_it_warns_of_and_none_before(scene: Scene) -> None:
    """Fourteen failures, one after another, each made at the fake vLLM, the GPU or the database."""
    assert await scene.prometheus.firing() == set()
    await _queues(scene)
    await _forgets(scene)
    await _refuses(scene)
    await _locks(scene)
    await _slows(scene)
    await _restarts(scene)
    await scene.fake.stop()
    await scene.fires("VllmDown")
    await scene.proxy.runner.cleanup()
    await scene.fires("ProxyDown")
    assert scene.fired == alerts()


async def _queues(scene: Scene) -> None:
    gauges = scene.fake.gauges
    gauges.waiting, scene.gpu.use_percent = 1000, 10.0
    gauges.preemptions += 3
    for name in ("RequestsQueueing", "GpuIdleWhileRequestsWait", "VllmPreempting"):
        await scene.fires(name)


async def _forgets(scene: Scene) -> None:
    """vLLM loses its cache after every turn."""

    async def once() -> None:
        name, told = scene.name(), [{"role": "user", "content": "some words " * 400}]
        await scene.ask(name, told)
        scene.fake.cache.hashes.clear()
        more = [{"role": "assistant", "content": "All right."}, {"role": "user", "content": "and now?"}]
        await scene.ask(name, [*told, *more])
        scene.fake.cache.hashes.clear()

    async def only_new() -> None:
        await asyncio.gather(*(scene.chat(1, words=2000) for _ in range(10)))

    await scene.fires("ReuseFalling", only_new)
    await scene.fires("ReuseBelowPrediction", once)


async def _refuses(scene: Scene) -> None:
    """The template refuses what the proxy made; then vLLM fails altogether."""
    rules = scene.fake.rules

    async def once() -> None:
        scene.fake.rules = replace(rules, template_refuses_late_system=True)
        lines = "You help.\n<memory_context>\n- likes tea\n</memory_context>"
        await scene.ask(
            scene.name(), [{"role": "system", "content": lines}, {"role": "user", "content": "a question " * 20}]
        )
        scene.fake.rules = rules

    async def fails() -> None:
        error = {"error": {"message": "CUDA error", "type": "InternalServerError", "param": None, "code": 500}}
        scene.fake.replies.extend(json_error(500, error) for _ in range(5))
        await asyncio.gather(*(scene.chat(1) for _ in range(5)))

    await scene.fires("StepFailing", once)
    await scene.fires("UpstreamFailing", fails)


async def _locks(scene: Scene) -> None:
    """Another process holds the database."""
    other = sqlite3.connect(scene.database, isolation_level=None)
    try:
        other.execute("BEGIN EXCLUSIVE")
        await scene.fires("StoreFailing", lambda: scene.chat(1))
    finally:
        other.close()


async def _slows(scene: Scene) -> None:
    """A prompt that is cached is answered late."""
    name, told = scene.name(), [{"role": "user", "content": "some words " * 200}]
    await scene.ask(name, told)
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(11.0, late.set)
    scene.fake.replies.append(Reply(gates={0: late}))
    more = [{"role": "assistant", "content": "All right."}, {"role": "user", "content": "and now?"}]
    await scene.ask(name, [*told, *more])
    await scene.fires("FirstTokenSlow")


async def _restarts(scene: Scene) -> None:
    """vLLM's process ends and another one begins, four times; `up`, which watches over it, knows why."""
    models = scene.proxy.state.models
    for generation in range(models.generation, models.generation + 4):
        await scene.fake.stop()
        await eventually(lambda: models.stale, 10)
        scene.proxy.state.metrics.restarts.ended("gpu_memory")
        scene.fake.gauges.started += 60
        await scene.fake.start()
        await eventually(partial(_beyond, models, generation), 10)
        await asyncio.sleep(SCRAPES_SECONDS)
    for name in ("VllmOutOfMemory", "VllmRestarting"):
        await scene.fires(name)


def _beyond(models: Models, generation: int) -> bool:
    return models.generation > generation
