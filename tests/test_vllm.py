"""What the proxy itself asks of vLLM: how often, for how long, and what it makes of the answers."""

import asyncio
from dataclasses import dataclass, field

import pytest

from proxy.aio import Tasks
from proxy.upstream.vllm import TOKENIZE_BYTES, Models, Vllm, parse_block_size, parse_models
from tests.conftest import StartProxy
from tests.fake_replies import Raw
from tests.fake_vllm import FakeVllm

LIST = b'{"object":"list","data":[{"id":"a","max_model_len":4096},{"id":"org/b"}]}'
Answer = tuple[int, str, bytes] | None


@dataclass
class Upstream:
    """Answers by path, and remembers what was asked; `gate` holds every answer."""

    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None

    async def fetch(
        self, method: str, path: str, *, body: bytes | None = None, seconds: float, limit_bytes: int
    ) -> Answer:
        self.asked.append(path)
        if self.gate is not None:
            await self.gate.wait()
        return self.answers.get(path)


def ok(body: bytes) -> Answer:
    return 200, "application/json", body


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"data":1}', b'{"data":[1]}', b'{"data":[{}]}', b"null"])
def test_what_is_no_model_list_is_none(body: bytes) -> None:
    """A page of something in between must not replace the list."""
    assert parse_models(body) is None


def test_a_model_list_keeps_its_bytes_and_tells_ids_and_lengths() -> None:
    """The client gets what vLLM wrote."""
    found = parse_models(LIST)
    assert found is not None
    assert found.body is LIST and set(found.models) == {"a", "org/b"}
    assert found.max_model_len == {"a": 4096}


def test_the_block_size_is_read_from_cache_config_info() -> None:
    """Other block sizes in the same line are not it."""
    line = b'x 1\nvllm:cache_config_info{a="b",mamba_block_size="7",block_size="32",engine="0"} 1.0\n'
    assert parse_block_size(line) == 32
    assert parse_block_size(b'vllm:cache_config_info{block_size="16"} 1.0') == 16
    assert parse_block_size(b'vllm:cache_config_info{mamba_block_size="7"} 1.0') is None
    assert parse_block_size(b"") is None


async def test_polls_are_single_flight_and_at_most_one_per_interval() -> None:
    """However many ask, vLLM is asked once."""
    upstream, tasks = Upstream({"/v1/models": ok(LIST)}, gate=asyncio.Event()), Tasks()
    models = Models(upstream.fetch, tasks, refresh_seconds=0.1)
    for _ in range(100):
        models.refresh()
        models.poke()
        await asyncio.sleep(0)
    assert upstream.asked == ["/v1/models"]
    assert upstream.gate is not None
    upstream.gate.set()
    assert await models.get(wait_seconds=1) is not None
    models.refresh()
    assert upstream.asked.count("/v1/models") == 1
    await asyncio.sleep(0.12)
    models.refresh()
    await asyncio.sleep(0)
    assert upstream.asked.count("/v1/models") == 2
    await tasks.close()


async def test_a_failed_poll_keeps_the_list_and_marks_it_stale_and_the_next_good_one_is_a_new_generation() -> None:
    """What was learned of a vLLM that restarted may be wrong."""
    upstream, tasks = Upstream({"/v1/models": ok(LIST)}), Tasks()
    models = Models(upstream.fetch, tasks, refresh_seconds=0.01)
    assert models.known() == frozenset() and models.stale and models.max_model_len("a") is None
    for answer, stale, generation in (
        (ok(LIST), False, 1),
        (None, True, 1),
        ((500, "text/html", b"x"), True, 1),
        (ok(LIST), False, 2),
    ):
        upstream.answers["/v1/models"] = answer
        await asyncio.sleep(0.02)
        models.refresh()
        await asyncio.sleep(0.005)
        assert (models.stale, models.generation, models.known()) == (stale, generation, frozenset({"a", "org/b"}))
    assert models.max_model_len("a") == 4096
    await tasks.close()


async def test_block_size_and_lengths_come_from_a_real_exchange(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """They are asked for once, when vLLM is found."""
    proxy = await start_proxy(models__refresh_seconds=0.05)
    await asyncio.sleep(0.3)
    models = proxy.state.models
    assert (models.block_size, models.max_model_len("fake"), models.generation) == (16, 8192, 1)
    assert len(fake_vllm.of("/metrics")) == 1
    assert 3 <= len(fake_vllm.of("/v1/models")) <= 7


async def test_health_is_asked_once_a_second_however_many_want_to_know() -> None:
    """An orchestrator and a load balancer may both ask often."""
    upstream, tasks = Upstream({"/health": (200, "", b"")}), Tasks()
    vllm = Vllm(upstream.fetch, tasks)
    assert await asyncio.gather(*(vllm.healthy() for _ in range(50))) == [True] * 50
    assert await vllm.healthy()
    assert upstream.asked == ["/health"]
    await tasks.close()


async def test_the_one_who_asked_first_may_leave_without_the_others_losing_the_answer() -> None:
    """Single-flight: the first caller does not own the exchange."""
    upstream, tasks = Upstream({"/health": (200, "", b"")}, gate=asyncio.Event()), Tasks()
    vllm = Vllm(upstream.fetch, tasks)
    first, second = (tasks.spawn(vllm.healthy(), name="caller") for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    assert upstream.gate is not None
    upstream.gate.set()
    assert await second is True
    await tasks.close()


async def test_tokenize_counts_and_says_none_where_it_cannot(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """A count that is not there is not an error: the caller has its upper bound."""
    vllm = (await start_proxy()).state.vllm
    assert await vllm.tokenize({"prompt": "one two three"}) == 3
    asked = len(fake_vllm.of("/tokenize"))
    assert await vllm.tokenize({"prompt": "x" * TOKENIZE_BYTES}) is None
    assert len(fake_vllm.of("/tokenize")) == asked
    for raw in (Raw([b"{}"]), Raw([b"nonsense"]), Raw([b'{"count":"3"}']), Raw([b"{}"], status=404), Raw(end="cut")):
        fake_vllm.answers["/tokenize"] = raw
        assert await vllm.tokenize({"prompt": "one"}) is None
