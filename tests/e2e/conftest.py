"""One real vLLM on the CPU for all end-to-end tests, and a proxy before it."""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.demo import recipe, server
from proxy.demo.needs import Missing, check_machine
from tests.conftest import RunningProxy, StartProxy

# Small steps: vLLM finishes the step that it is in before it lets an abandoned request go.
VLLM_FLAGS = ("--max-num-batched-tokens", "256", "--enable-server-load-tracking")

StartProxyBefore = Callable[..., Awaitable[RunningProxy]]


@pytest.fixture(scope="session")
def environment() -> recipe.Environment:
    """The environment with vLLM: $PREFIX_PROXY_VLLM_CACHE, itself or as a cache folder, else the demo's own.

    It is made here when it is not there (3 minutes); where it cannot be, the tests fail with what is missing.
    """
    named = os.environ.get("PREFIX_PROXY_VLLM_CACHE")
    folder = Path(named).absolute() if named else None
    if folder and (found := recipe.existing(folder)):
        return found
    try:
        check_machine()
        return recipe.ensure(folder)
    except Missing as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def vllm(environment: recipe.Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Child]:
    """A real vLLM that serves SmolLM2-135M-Instruct as `smollm2`, started once."""
    with server.vllm(environment, log=tmp_path_factory.mktemp("vllm") / "vllm.log", flags=VLLM_FLAGS) as child:
        child.wait_ready()
        yield child


@pytest.fixture
def start_proxy_before(vllm: server.Child, start_proxy: StartProxy) -> StartProxyBefore:
    """Start a proxy before the real vLLM, with settings by path as `start_proxy` takes them."""

    async def start(**settings: Any) -> RunningProxy:
        return await start_proxy(upstream__url=vllm.url, **settings)

    return start


class Gauges:
    """What vLLM says of itself."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def read(self, name: str) -> float:
        """Return the sum of a metric's samples, 0 when it has none."""
        async with self._session.get(f"{self._url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    async def running(self) -> float:
        """Return how many requests vLLM works on, as of its last step."""
        return await self.read("vllm:num_requests_running")

    async def load(self) -> float:
        """Return how many requests are connected to vLLM: exact, where the metrics lag by a step."""
        async with self._session.get(f"{self._url}/load") as response:
            return float((await response.json())["server_load"])


@pytest.fixture
async def gauges(vllm: server.Child) -> AsyncIterator[Gauges]:
    """What the real vLLM says of itself."""
    async with aiohttp.ClientSession() as session:
        yield Gauges(session, vllm.url)


async def until(value: Callable[[], Awaitable[float]], wanted: float, *, seconds: float) -> float:
    """Ask for `value` until it is `wanted`; return the seconds that took, and fail when they pass `seconds`."""
    begun = time.monotonic()
    while True:
        found = await value()
        taken = time.monotonic() - begun
        if found == wanted:
            return taken
        assert taken < seconds, f"still {found}, not {wanted}, after {taken:.1f} s"
