"""A real Prometheus for tests: the project's own configuration and rules, only quicker, on a free port."""

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

DEPLOY = Path(__file__).parent.parent / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "prefix-proxy.json"
RULES = DEPLOY / "prometheus" / "rules.yml"
CONFIG = DEPLOY / "prometheus" / "prometheus.yml"
GPU_NAMES = frozenset({"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"})
START_SECONDS = 30


def panels() -> Iterator[dict[str, Any]]:
    """Yield the panels of the dashboard that show something."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Yield each query of the dashboard under the name of its panel and series."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']}: {target['legendFormat']}", target["expr"]


def rule_queries() -> Iterator[tuple[str, str]]:
    """Yield each rule's expression under its name; the file is plain enough to be read without a YAML library."""
    blocks = re.split(r"^      - (?=alert|record)", RULES.read_text(), flags=re.MULTILINE)[1:]
    for block in blocks:
        name = block.split("\n", 1)[0].split(": ", 1)[1]
        found = re.search(r"^        expr: (?:>-\n((?:          .*\n)+)|(.+)\n)", block, re.MULTILINE)
        assert found, name
        yield name, " ".join((found[1] or found[2]).split())


def alerts() -> set[str]:
    """Return the names of all alerts."""
    return set(re.findall(r"- alert: (\w+)", RULES.read_text()))


def filled_in(query: str, window: str) -> str:
    """Return a query of the dashboard as Grafana would send it, for all pairs."""
    return query.replace("$__rate_interval", window).replace("$pair", ".*")


def write_files(folder: Path, targets: Mapping[str, str]) -> Path:
    """Write configuration and rules as they are, but for the targets, the intervals, and alerts that need not last."""
    text = re.sub(r"_interval: \w+", "_interval: 250ms", CONFIG.read_text())
    for name, target in targets.items():
        assert f'"{name}"' in text
        text = text.replace(f'"{name}"', f'"{target}"')
    (folder / "rules.yml").write_text(re.sub(r"for: \w+", "for: 0s", RULES.read_text()))
    (folder / "prometheus.yml").write_text(text)
    return folder / "prometheus.yml"


class Prometheus:
    """A running one."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def query(self, query: str) -> list[float]:
        """Return the values that a query has now, those that are no number left out."""
        async with self._session.get(f"{self._url}/api/v1/query", params={"query": query}) as response:
            told = json.loads(await response.text())  # "Service Unavailable" while it starts
        assert told["status"] == "success", (query, told)
        values = [float(each["value"][1]) for each in told["data"]["result"]]
        return [value for value in values if value == value]

    async def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        async with self._session.get(f"{self._url}/api/v1/alerts") as response:
            told = await response.json()
        return {each["labels"]["alertname"] for each in told["data"]["alerts"] if each["state"] == "firing"}


@asynccontextmanager
async def running(program: str, folder: Path, targets: Mapping[str, str]) -> AsyncIterator[Prometheus]:
    """Run a Prometheus that scrapes `targets` (address in the configuration: address here)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = (
        program, f"--config.file={write_files(folder, targets)}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}", "--log.level=warn",
    )  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=subprocess.STDOUT)
    try:
        async with aiohttp.ClientSession() as session:
            prometheus = Prometheus(session, f"http://{address}")
            await _ready(prometheus, process, folder, len(targets))
            yield prometheus
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ready(prometheus: Prometheus, process: asyncio.subprocess.Process, folder: Path, targets: int) -> None:
    """Wait until every target is scraped; Prometheus takes five seconds to find them."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            assert process.returncode is None, (folder / "prometheus.log").read_text()
            try:
                if sum(await prometheus.query("up")) == targets:
                    return
            except (aiohttp.ClientError, ValueError):
                pass
            await asyncio.sleep(0.1)


class Gpu:
    """Stands in for NVIDIA's dcgm-exporter: three of its gauges."""

    def __init__(self) -> None:
        self.use_percent = 90.0
        self.port = 0

    async def _metrics(self, request: web.Request) -> web.Response:
        values = {"DCGM_FI_DEV_GPU_UTIL": self.use_percent, "DCGM_FI_DEV_FB_USED": 6e4, "DCGM_FI_DEV_FB_FREE": 2e4}
        lines = [f'# TYPE {name} gauge\n{name}{{gpu="0"}} {value}' for name, value in values.items()]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen; yield the address."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
