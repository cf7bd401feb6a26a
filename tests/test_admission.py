"""Places at vLLM: so many at once, tasks give way, tenants take turns, and nobody waits for ever."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from proxy.admission import Admission
from proxy.aio import Tasks
from proxy.config.traffic import Admission as Settings
from proxy.core.reject import Reject
from proxy.metrics import Metrics
from tests.bodies import chat, eventually, stream
from tests.conftest import RawConnect, StartProxy
from tests.fake_replies import Reply
from tests.fake_vllm import FakeVllm

TASK = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history."


def hold(fake: FakeVllm, gate: asyncio.Event) -> None:
    """Hold every answer to a chat at `gate`; what the proxy itself asks is answered at once."""
    fake.reply_to = lambda body: Reply(gates={0: gate}) if "messages" in body else None


def chats(fake: FakeVllm) -> int:
    """Return how many chat requests have come."""
    return len(fake.of("/v1/chat/completions"))


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    """Tasks of a test."""
    tasks = Tasks()
    yield tasks
    await tasks.close()


class Visitors:
    """Requests that take a place and keep it until they are told to go."""

    def __init__(self, tasks: Tasks, **settings: float) -> None:
        self.admission = Admission(Settings(**{"concurrent": 1, **settings}), Metrics())  # type: ignore[arg-type]  # by name
        self.inside: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self._tasks = tasks

    async def come(self, tenant: str, name: str = "", *, task: bool = False) -> "asyncio.Task[object]":
        """Begin one request, and let it go as far as it can."""
        visit = self._tasks.spawn(self._visit(tenant, name or tenant, task), name="visitor")
        for _ in range(3):
            await asyncio.sleep(0)
        return visit

    async def go(self, name: str) -> None:
        """Let one inside end."""
        self.gates[name].set()
        for _ in range(5):
            await asyncio.sleep(0)

    async def _visit(self, tenant: str, name: str, task: bool) -> None:
        async with self.admission.place(tenant, task=task):
            self.inside.append(name)
            self.gates[name] = asyncio.Event()
            await self.gates[name].wait()


async def test_tenants_take_turns_in_line(tasks: Tasks) -> None:
    """One with ten requests does not make the other wait for all of them."""
    visitors = Visitors(tasks)
    for tenant, name in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("a", "a4"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        await visitors.come(tenant, name)
    assert visitors.inside == ["a1"] and visitors.admission.waiting == 6
    for name in ("a1", "a2", "b1", "c1", "a3", "b2", "a4"):
        assert visitors.inside[-1] == name
        await visitors.go(name)
    assert visitors.admission.waiting == 0
    await visitors.come("d")
    assert visitors.inside[-1] == "d"


async def test_a_task_is_refused_where_a_chat_waits(tasks: Tasks) -> None:
    """Open WebUI shows nothing for a title that failed."""
    visitors = Visitors(tasks)
    await visitors.come("a")
    refused, waits = await visitors.come("a", task=True), await visitors.come("b")
    assert isinstance(refused.exception(), Reject) and not waits.done()
    await visitors.go("a")
    assert visitors.inside == ["a", "b"]
    await visitors.go("b")
    await visitors.come("t", task=True)
    assert visitors.inside == ["a", "b", "t"]


async def test_the_line_has_an_end_and_so_has_the_wait(tasks: Tasks) -> None:
    """Then 503 with Retry-After, for clients that come back."""
    visitors = Visitors(tasks, queue_seconds=0.05, queue_requests=1)
    await visitors.come("a")
    slow, many = await visitors.come("b"), await visitors.come("c")
    error = many.exception()
    assert isinstance(error, Reject) and (error.status, error.code) == (503, "overloaded")
    assert error.headers == {"Retry-After": "5"}
    await asyncio.wait((slow,))
    assert isinstance(slow.exception(), Reject) and visitors.admission.waiting == 0
    await visitors.go("a")
    await visitors.come("d")
    assert visitors.inside == ["a", "d"]


async def test_one_that_leaves_the_line_or_the_place_leaves_it_to_others(tasks: Tasks) -> None:
    """Also in the very moment in which its turn has come."""
    visitors = Visitors(tasks)
    inside, leaves, stays = [await visitors.come(name) for name in ("a", "b", "c")]
    leaves.cancel()
    await asyncio.wait((leaves,))
    assert visitors.admission.waiting == 1
    late = await visitors.come("d")
    visitors.gates["a"].set()
    await asyncio.sleep(0)
    assert inside.done()
    stays.cancel()  # its turn was given to it, and it has not run yet
    await asyncio.wait((stays,))
    await asyncio.sleep(0)
    assert visitors.inside == ["a", "d"] and not late.done()
    late.cancel()
    await asyncio.wait((late,))
    await visitors.come("e")
    assert visitors.inside[-1] == "e"


async def test_without_a_number_of_places_nobody_waits(tasks: Tasks) -> None:
    """vLLM has a queue of its own."""
    visitors = Visitors(tasks, concurrent=None)  # type: ignore[arg-type]  # a number elsewhere
    for i in range(5):
        await visitors.come("a", str(i), task=bool(i % 2))
    assert len(visitors.inside) == 5 and not visitors.admission.on


async def test_chats_wait_and_tasks_are_refused_on_the_wire(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """What vLLM sees is never more than the places there are."""
    gate = asyncio.Event()
    hold(fake_vllm, gate)
    proxy = await start_proxy(admission__concurrent=1)
    tasks = proxy.state.tasks

    async def ask(text: str) -> int:
        async with proxy.post(chat(text)) as answer:
            await answer.read()
            return answer.status

    first = tasks.spawn(ask("one"), name="first")
    await eventually(lambda: chats(fake_vllm))
    second = tasks.spawn(ask("two"), name="second")
    await eventually(lambda: proxy.state.admission.waiting)
    async with proxy.post(chat(TASK)) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        assert (await answer.json())["error"]["code"] == "overloaded"
    assert proxy.sample("proxy_admission_waiting") == 1 and chats(fake_vllm) == 1
    gate.set()
    assert (await first, await second) == (200, 200)
    assert proxy.sample("proxy_admission_refused_total", kind="task") == 1
    assert proxy.sample("proxy_admission_wait_seconds_count") == 1
    assert proxy.sample("proxy_requests_total", outcome="rejected", status="503") == 1


async def test_a_client_that_leaves_the_line_frees_its_turn(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect
) -> None:
    """Nobody computes an answer for it later."""
    gate = asyncio.Event()
    hold(fake_vllm, gate)
    proxy = await start_proxy(admission__concurrent=1)
    async with proxy.post(stream("one")):
        client = await raw_connect(proxy.port)
        await client.post(b'{"model":"fake","messages":[{"role":"user","content":"two"}]}')
        await eventually(lambda: proxy.state.admission.waiting)
        await client.leave()
        await eventually(lambda: not proxy.state.admission.waiting)
        gate.set()
    assert chats(fake_vllm) == 1


async def test_the_end_of_a_drain_ends_the_line_too(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Who waits is told that the proxy stops."""
    hold(fake_vllm, asyncio.Event())
    proxy = await start_proxy(admission__concurrent=1)
    async with proxy.post(stream("one")):

        async def ask() -> tuple[int, str]:
            async with proxy.post(chat("two")) as answer:
                return answer.status, (await answer.json())["error"]["message"]

        waiting = proxy.state.tasks.spawn(ask(), name="waiting")
        await eventually(lambda: proxy.state.admission.waiting)
        proxy.state.presence.end_all()
        assert await waiting == (503, "The proxy is stopping and had to end this answer. Try again in a moment.")
    assert proxy.state.admission.waiting == 0
