"""Whose place a newer request takes: autocompletions, pieces of one input, more text before the first token."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from proxy.aio import Tasks
from proxy.coalesce_metrics import CoalesceMetrics
from proxy.config.coalesce import Coalesce
from proxy.core.coalesce import Ask
from proxy.core.identity import Identity
from proxy.core.request import ChatRequest
from proxy.flight import Flight, Flights, Head, until
from tests.bodies import eventually
from tests.conftest import RawConnect, RunningProxy, StartProxy
from tests.fake_replies import Reply, json_error
from tests.fake_vllm import FakeVllm
from tests.flights import answer, arrived, ask, refuse_probe, runs, sharing, texts, up_to_date, who
from tests.virtual_time import at, run, soon

PIECE = who(chat="c1")
TYPING = who(chat="c1", task="autocomplete_generation")


@pytest.fixture
async def vllm(fake_vllm: FakeVllm) -> FakeVllm:
    """The fake, deaf to the proxy's probe."""
    refuse_probe(fake_vllm)
    return fake_vllm


@dataclass(eq=False)
class Client:
    """A sharer without a socket."""

    flight: Flight = field(init=False)
    at: int = 0

    def wake(self) -> None:
        """Nothing to do."""

    def cut(self) -> None:
        """Nothing to do."""

    async def open(self, head: Head) -> None:
        """Nothing to do."""

    async def push(self, data: bytes, now: float) -> None:
        """Take everything."""
        self.at += len(data)


@dataclass
class Airport:
    """Flights in virtual time whose runs only note when they began, with the newest text of their request."""

    settings: Coalesce
    task: str | None = None
    chat: str | None = "c"
    went: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.registry, self.tasks = CollectorRegistry(), Tasks()
        self.flights = Flights(self.settings, self.tasks, CoalesceMetrics(self.registry))

    async def _fly(self, flight: Flight) -> None:
        await until(flight)
        self.went[str(flight.ask.request.messages[-1]["content"])] = round(asyncio.get_running_loop().time(), 3)
        await asyncio.Event().wait()

    async def ask(self, when: float, *pieces: str, message: str | None = None) -> Client:
        """Let a request of these user messages arrive."""
        await at(when)
        messages = tuple({"role": "user", "content": piece} for piece in pieces)
        identity = Identity("t", True, self.chat, message, self.task, self.chat is not None)
        client = Client()
        request = ChatRequest(messages, {"model": "m"})
        self.flights.board(Ask(identity, "key", "m", "/v1/chat/completions", request), client, self._fly)
        return client

    def count(self, how: str) -> float:
        """Return how many requests were spared a run."""
        return self.registry.get_sample_value("proxy_coalesced_total", {"how": how}) or 0.0


def test_the_first_autocompletion_goes_at_once_and_of_the_followers_the_last() -> None:
    """Its turn comes when the keys were still for 250 ms, counted from the last; then the next burst begins anew."""

    async def story() -> None:
        airport = Airport(Coalesce(), task="autocomplete_generation", chat=None)
        clients = [
            await airport.ask(when, text) for when, text in ((0, "h"), (0.06, "he"), (0.2, "hel"), (0.4, "hell"))
        ]
        await at(1)
        assert airport.went == {"h": 0.0, "hell": 0.65} and airport.count("debounced") == 2
        for client, empty in zip(clients, (False, True, True, False), strict=True):
            plain = client.flight.head.plain if client.flight.head is not None else None
            assert (plain is not None) == empty
        await airport.ask(2, "hello")
        await at(3)
        assert airport.went["hello"] == 2.0
        await airport.tasks.close()

    run(story())


def test_without_debounce_every_autocompletion_goes() -> None:
    """`coalesce.debounce_ms = 0`."""

    async def story() -> None:
        airport = Airport(replace(Coalesce(), debounce_ms=0), task="autocomplete_generation")
        for when, text in ((0, "h"), (0.06, "he"), (0.12, "hel")):
            await airport.ask(when, text)
        await at(1)
        assert airport.went == {"h": 0.0, "he": 0.06, "hel": 0.12}
        await airport.tasks.close()

    run(story())


def test_pieces_of_one_input_within_the_window_are_one_run() -> None:
    """Each piece begins the window anew; what comes after it is a request of its own."""

    async def story() -> None:
        airport = Airport(replace(Coalesce(), window_ms=200))
        one, two, three = [await airport.ask(0.1 * n, *"abc"[: n + 1]) for n in range(3)]
        await at(1)
        assert airport.went == {"c": 0.4} and airport.count("merged") == 2
        assert one.flight is two.flight is three.flight
        await airport.ask(1.5, *"abcd")
        await at(3)
        assert airport.went == {"c": 0.4, "d": 1.7} and airport.count("merged") == 2
        await airport.tasks.close()

    run(story())


def test_pieces_without_end_do_not_keep_the_first_waiting_for_ever() -> None:
    """Eight windows, then what there is goes."""

    async def story() -> None:
        airport = Airport(replace(Coalesce(), window_ms=200))
        for number in range(30):
            await airport.ask(0.1 * number, *(str(n) for n in range(number + 1)))
        await at(9)
        assert min(airport.went.values()) == pytest.approx(1.6, abs=0.11)
        await airport.tasks.close()

    run(story())


def test_other_words_other_message_ids_and_answers_between_are_not_merged() -> None:
    """Only further messages of the user, to the very same ones."""

    async def story() -> None:
        airport = Airport(replace(Coalesce(), window_ms=200, supersede=True))
        await airport.ask(0, "a", "b")
        await airport.ask(0.05, "a", "x", "c")
        await airport.ask(0.06, "a", "b", "d", message="m2")
        await at(1)
        assert airport.went == {"b": 0.2, "c": 0.25, "d": 0.26}
        await airport.tasks.close()

    run(story())


def body(*pieces: str, **fields: Any) -> dict[str, Any]:
    """Return a request of these user messages."""
    return {"model": "fake", "messages": [{"role": "user", "content": piece} for piece in pieces], **fields}


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "plain"])
async def test_more_text_before_the_first_token_takes_the_place_of_the_older_request(
    start_proxy: StartProxy, vllm: FakeVllm, streamed: bool
) -> None:
    """Both callers get the newer answer, as a 200; the older run is stopped."""
    proxy = await start_proxy(coalesce__supersede=True)
    old, new = Reply(gates={0: asyncio.Event()} if streamed else {"headers": asyncio.Event()}), Reply(pieces=["<new>"])
    vllm.reply_to = lambda sent: new if len(sent["messages"]) == 2 else old
    first = soon(answer(proxy, body("a", stream=streamed), **PIECE))
    seen = await arrived(vllm, 1)
    if streamed:
        await eventually(lambda: any(flight.live for flight in proxy.state.flights.table))
    second = await answer(proxy, body("a", "b", stream=streamed), **PIECE)
    assert await first == second and second[0] == 200 and b"<new>" in second[1]
    await eventually(seen.closed.is_set)
    assert len(runs(vllm)) == 2 and seen.aborted_at is not None
    assert proxy.sample("proxy_coalesced_total", how="superseded") == 1
    assert proxy.sample("proxy_requests_total", outcome="completed") == 2


async def test_after_the_first_token_nothing_is_superseded(start_proxy: StartProxy, vllm: FakeVllm) -> None:
    """The older caller has begun to read; the newer one has a run of its own."""
    proxy = await start_proxy(coalesce__supersede=True)
    gate = asyncio.Event()
    vllm.reply_to = lambda sent: Reply(pieces=[f"<{len(sent['messages'])}>", "."], gates={1: gate})
    first = soon(answer(proxy, body("a", stream=True), **PIECE))
    await eventually(lambda: up_to_date(proxy))
    second = soon(answer(proxy, body("a", "b", stream=True), **PIECE))
    await arrived(vllm, 2)
    gate.set()
    assert texts((await first)[1]) == ["<1>", "."] and texts((await second)[1]) == ["<2>", "."]


@pytest.mark.parametrize(
    ("older", "newer", "fields"),
    [
        (who(chat="c1", message="m1"), who(chat="c1", message="m2"), {}),
        (who(chat="c1"), who(chat="c2"), {}),
        (who(), who(), {}),
        (who("u1", chat="c1"), who("u2", chat="c1"), {}),
        ({"X_OpenWebUI_Chat_Id": "c1"}, {"X_OpenWebUI_Chat_Id": "c1"}, {}),
        (who(chat="c1"), who(chat="c1"), {"temperature": 0.1}),
    ],
    ids=["message", "chat", "no chat", "user", "nobody", "field"],
)
async def test_no_other_request_is_superseded(
    start_proxy: StartProxy, vllm: FakeVllm, older: dict[str, str], newer: dict[str, str], fields: dict[str, Any]
) -> None:
    """Never between message ids, chats, users or differing fields, nor without a chat id."""
    proxy = await start_proxy(coalesce__supersede=True)
    gate = asyncio.Event()
    vllm.default = Reply(gates={"headers": gate})
    first = soon(answer(proxy, body("a"), **older))
    await arrived(vllm, 1)
    second = soon(answer(proxy, body("a", "b", **fields), **newer))
    await arrived(vllm, 2)
    gate.set()
    await asyncio.gather(first, second)
    assert proxy.sample("proxy_coalesced_total") == 0


async def test_it_is_off_by_default(proxy: RunningProxy, vllm: FakeVllm) -> None:
    """Open WebUI stops and queues by itself."""
    gate = asyncio.Event()
    vllm.default = Reply(gates={"headers": gate})
    both = [soon(answer(proxy, body(*pieces), **PIECE)) for pieces in ("a", "ab")]
    await arrived(vllm, 2)
    gate.set()
    await asyncio.gather(*both)


@pytest.mark.parametrize("begun", [True, False])
async def test_the_older_caller_shares_the_newer_ones_failure(
    start_proxy: StartProxy, vllm: FakeVllm, begun: bool
) -> None:
    """As a status where its head is not out yet, else as an error event in its stream."""
    proxy = await start_proxy(coalesce__supersede=True)
    error = json_error(500, {"error": {"message": "boom", "type": "x", "param": None, "code": 500}})
    old = Reply(gates={0 if begun else "headers": asyncio.Event()})
    vllm.reply_to = lambda sent: error if len(sent["messages"]) == 2 else old
    first = soon(answer(proxy, body("a", stream=True), **PIECE))
    await arrived(vllm, 1)
    if begun:
        await eventually(lambda: any(flight.live for flight in proxy.state.flights.table))
    assert (await answer(proxy, body("a", "b", stream=True), **PIECE))[0] == 500
    status, got = await first
    assert status == (200 if begun else 500) and b"boom" in got
    assert got.endswith(b"data: [DONE]\n\n") == begun


async def test_the_newer_caller_may_leave_and_the_older_one_still_has_the_answer(
    start_proxy: StartProxy, vllm: FakeVllm, raw_connect: RawConnect
) -> None:
    """They share the newer run like any two."""
    proxy = await start_proxy(coalesce__supersede=True)
    gate = asyncio.Event()
    vllm.reply_to = lambda sent: Reply(pieces=["<new>"], gates={"headers": gate})
    first = soon(answer(proxy, body("a", stream=True), **PIECE))
    await arrived(vllm, 1)
    newer = await raw_connect(proxy.port)
    await ask(newer, body("a", "b", stream=True), chat="c1")
    await arrived(vllm, 2)
    await newer.leave()
    await eventually(lambda: sharing(proxy) == 1)
    gate.set()
    assert texts((await first)[1]) == ["<new>"]


async def test_an_autocompletion_flood_costs_two_runs(start_proxy: StartProxy, vllm: FakeVllm) -> None:
    """The first key and the last; the others are told nothing, with a 200 that no SDK repeats (CO-05)."""
    proxy = await start_proxy(coalesce__debounce_ms=200)
    vllm.default = Reply(pieces=["!"])

    async def key(text: str) -> tuple[int, str, bytes]:
        async with proxy.post(body(text), **TYPING) as response:
            return response.status, response.headers.get("x-should-retry", ""), await response.read()

    typed = []
    for text in ("h", "he", "hel", "hell", "hello"):
        typed.append(soon(key(text)))
        await eventually(lambda: proxy.sample("proxy_requests_in_flight") or typed[-1].done())
        await asyncio.sleep(0.02)
    answers = await asyncio.gather(*typed)
    assert [status for status, _, _ in answers] == [200] * 5
    assert [seen.body["messages"][-1]["content"] for seen in runs(vllm)] == ["h", "hello"]
    said = [json.loads(got)["choices"][0] for _, _, got in answers]
    assert [choice["message"]["content"] for choice in said] == ["!", "", "", "", "!"]
    assert [again for _, again, _ in answers] == ["", "false", "false", "false", ""]
    assert {choice["finish_reason"] for choice in said} == {"stop"}
    assert proxy.sample("proxy_coalesced_total", how="debounced") == 3


async def test_a_title_held_by_its_chat_costs_nothing_when_its_client_leaves(
    proxy: RunningProxy, vllm: FakeVllm, raw_connect: RawConnect
) -> None:
    """It never reaches vLLM; one that stays goes when the answer has ended."""
    gate = asyncio.Event()
    vllm.reply_to = lambda sent: Reply(gates={"end": gate}) if sent.get("stream") else Reply(pieces=["title"])
    gone = await raw_connect(proxy.port)
    title = who(chat="c1", task="title_generation")
    await ask(gone, body("gone"), chat="c1", task="title_generation")
    stays = soon(answer(proxy, body("stays"), **title))
    twin = soon(answer(proxy, body("stays"), **title))
    chat = soon(answer(proxy, body("a", stream=True), **who(chat="c1", message="m")))
    await arrived(vllm, 1)
    await eventually(lambda: len(proxy.state.holding) == 2 and sharing(proxy) == 4)
    await gone.leave()
    await eventually(lambda: len(proxy.state.holding) == 1)
    assert len(runs(vllm)) == 1
    gate.set()
    await chat
    assert (await stays) == (await twin) and b"title" in (await stays)[1]
    assert [seen.body["messages"][-1]["content"] for seen in runs(vllm)] == ["a", "stays"]
    assert proxy.sample("proxy_task_held_seconds_count") == 2
