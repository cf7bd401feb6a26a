"""Two pairs of proxy and vLLM behind a real HAProxy: who stays, who moves, and what is lost when a pair dies."""

import asyncio
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.bodies import eventually
from tests.fake_replies import Reply
from tests.scale import Pair, echoes, haproxy, pairs

PROGRAM = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin") or ""
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not PROGRAM, reason="HAProxy is not installed (Debian: haproxy)"),
]
SYSTEM = "You are the assistant of a large company and you follow these rules. " * 200


@dataclass
class Told:
    """What became of one request: begun when the head of an answer came."""

    chat: str
    begun: bool = False
    status: int = 0
    whole: bool = False


@dataclass
class Chat:
    """One chat of a user, turn after turn; its system message carries a clock."""

    name: str
    messages: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0

    async def go_on(self, session: aiohttp.ClientSession, url: str, words: int = 30) -> Told:
        """Ask the next question; a failed turn is asked again next time."""
        head = {"role": "system", "content": f"{SYSTEM}\nNow: 2026-01-02 10:{self.turn:02}:00 UTC."}
        asked = [*self.messages, {"role": "user", "content": f"{self.name} asks {self.turn} " + "about it " * words}]
        body = {"model": "fake", "messages": [head, *asked], "stream": True}
        headers = {"X-OpenWebUI-User-Id": f"user of {self.name}", "X-OpenWebUI-Chat-Id": self.name}
        told = Told(self.name)
        try:
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                told.begun, told.status = True, response.status
                told.whole = b"[DONE]" in await response.read()
        except aiohttp.ClientError:
            return told
        if told.status == 200 and told.whole:
            self.messages = [*asked, {"role": "assistant", "content": "All right."}]
            self.turn += 1
        return told


def homes(running: list[Pair], since: tuple[int, ...] = (0, 0)) -> dict[str, list[int]]:
    """Return for each chat the pairs that answered it, in order, after the first `since` requests of each."""
    found: dict[str, list[tuple[float, int]]] = {}
    for number, (pair, first) in enumerate(zip(running, since, strict=True), 1):
        for seen in pair.fake.of("/v1/chat/completions")[first:]:
            name = str(seen.body["messages"][-1]["content"]).partition(" asks")[0].rpartition("\n")[2]
            found.setdefault(name, []).append((seen.arrived_at, number))
    return {name: [number for _, number in sorted(each)] for name, each in found.items() if name.startswith("chat")}


def counts(running: list[Pair]) -> tuple[int, ...]:
    """Return how many chat requests each pair has had."""
    return tuple(len(pair.fake.of("/v1/chat/completions")) for pair in running)


@pytest.fixture
async def session() -> Any:
    """A client without a limit of connections."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as opened:
        yield opened


async def test_chats_with_one_system_prompt_spread_evenly_and_each_stays(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """MR-01: 200 chats, 5 turns each: 70 to 130 a pair, all turns of a chat on one pair, and reuse as with one pair."""
    async with pairs(2) as running, haproxy(PROGRAM, tmp_path, ports(running)) as url:
        chats = [Chat(f"chat-{number}") for number in range(200)]
        for _ in range(5):
            for part in range(0, 200, 25):
                told = await asyncio.gather(*(chat.go_on(session, url) for chat in chats[part : part + 25]))
                assert all(each.whole and each.status == 200 for each in told)
        found = homes(running)
    assert len(found) == 200 and all(len(each) == 5 and len(set(each)) == 1 for each in found.values())
    spread = Counter(each[0] for each in found.values())
    print(f"chats a pair: {dict(spread)}")
    assert all(70 <= spread[number] <= 130 for number in (1, 2))
    last = [seen for pair in running for seen in pair.fake.of("/v1/chat/completions")[-20:]]
    assert all(seen.hit >= 0.9 * seen.n for seen in last)


def ports(running: list[Pair]) -> dict[int, int]:
    """Return the port of each pair by its number."""
    return {number: pair.port for number, pair in enumerate(running, 1)}


async def test_a_pair_dies_under_load_and_only_its_chats_move(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """No request is lost that had not begun to be answered; who comes back has one cold turn at most."""
    async with pairs(2) as running, haproxy(PROGRAM, tmp_path, ports(running)) as url:
        chats = [Chat(f"chat-{number}") for number in range(60)]
        await asyncio.gather(*(chat.go_on(session, url) for chat in chats))
        home = {name: each[0] for name, each in homes(running).items()}
        for pair in running:
            pair.fake.default = Reply("All right.", gap_seconds=0.05)
        await _dies(session, url, running, chats, home)
        await _comes_back(session, url, running, chats, home)


async def _dies(
    session: aiohttp.ClientSession, url: str, running: list[Pair], chats: list[Chat], home: dict[str, int]
) -> None:
    since, told = counts(running), list[Told]()
    stop = asyncio.Event()

    async def talk(chat: Chat) -> None:
        while not stop.is_set():
            told.append(await chat.go_on(session, url))

    talking = asyncio.gather(*(talk(chat) for chat in chats))
    await eventually(lambda: len(told) > 60, 20)
    await running[0].kill()
    so_far = len(told)
    await eventually(lambda: len(told) > so_far + 150, 30)
    stop.set()
    await talking
    after = homes(running, since)
    moved = sorted(name for name, each in after.items() if each[-1] != home[name])
    cut = [each for each in told if each.begun and not each.whole]
    lost = [each for each in told if not each.begun or each.status != 200]
    print(f"{len(told)} requests; chats moved: {len(moved)} of {Counter(home.values())[1]} of the dead pair")
    print(f"answers cut in the middle: {len(cut)}; requests lost that had not begun: {len(lost)}")
    assert lost == []
    assert cut and all(home[each.chat] == 1 for each in cut)
    assert moved == sorted(name for name, number in home.items() if number == 1)
    assert all(set(after[name]) == {2} for name, number in home.items() if number == 2)


async def _comes_back(
    session: aiohttp.ClientSession, url: str, running: list[Pair], chats: list[Chat], home: dict[str, int]
) -> None:
    await running[0].start()
    probe = Chat(next(name for name, number in home.items() if number == 1))
    async with asyncio.timeout(20):
        while counts(running[:1]) == (before := counts(running[:1])):
            await probe.go_on(session, url)
            if counts(running[:1]) != before:
                break
            await asyncio.sleep(0.2)
    since = counts(running)
    for _ in range(2):
        told = await asyncio.gather(*(chat.go_on(session, url) for chat in chats if chat.name != probe.name))
        assert all(each.whole and each.status == 200 for each in told)
    after = homes(running, since)
    assert all(set(each) == {home[name]} for name, each in after.items())
    again = running[0].fake.of("/v1/chat/completions")[since[0] :]
    warm = again[len(again) // 2 :]  # each chat's second turn there
    least = min(seen.hit / seen.n for seen in warm)
    print(f"chats back: {len(again) // 2}; cached share of their second turn: {least:.2f} at least")
    assert all(seen.hit >= 0.9 * seen.n for seen in warm)


async def test_a_request_is_sent_again_while_nothing_was_answered(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Also one of 200 KB, whose pair dies between its body and the first byte of an answer."""
    async with pairs(2) as running, haproxy(PROGRAM, tmp_path, ports(running)) as url:
        chat = Chat("chat-large")
        assert (await chat.go_on(session, url)).whole
        [home] = homes(running)["chat-large"]
        dying = running[home - 1]
        dying.fake.default = Reply(gates={"headers": asyncio.Event()})
        asking = asyncio.gather(chat.go_on(session, url, words=20_000))
        await dying.fake.wait_for(2)
        await dying.kill()
        [told] = await asking
    assert (told.status, told.whole) == (200, True) or told.status == 400


async def test_stop_reaches_vllm_through_the_balancer(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """HAProxy notices with the next bytes of the answer: at once in a stream, with a keep-alive in a silence."""
    async with pairs(2) as running, haproxy(PROGRAM, tmp_path, ports(running)) as url:
        for pair in running:
            pair.fake.default = Reply("word " * 2000, gap_seconds=0.05)
        asking = asyncio.gather(Chat("chat-left").go_on(session, url), return_exceptions=True)
        await eventually(lambda: sum(pair.fake.live for pair in running) == 1, 10)
        await asyncio.sleep(0.3)
        asking.cancel()
        await eventually(lambda: sum(pair.fake.live for pair in running) == 0, 3.0)


async def placed(session: aiohttp.ClientSession, url: str, names: list[str], header: str) -> dict[str, str]:
    """Return which stand-in answers each name."""

    async def one(name: str) -> str:
        async with session.post(f"{url}/v1/chat/completions", headers={header: name}, data=b"{}") as response:
            return await response.text()

    found: dict[str, str] = {}
    for part in range(0, len(names), 100):
        some = names[part : part + 100]
        found |= dict(zip(some, await asyncio.gather(*map(one, some)), strict=True))
    return found


async def test_adding_a_pair_moves_a_third_of_the_chats_and_order_none(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """MR-04: all moves go to the new pair; a pair that was away has its chats again."""
    names, header = [f"session-{number}" for number in range(3000)], "X-OpenWebUI-Chat-Id"
    async with echoes(3) as at:
        orders: dict[str, tuple[int, ...]] = {"two": (1, 2), "swapped": (2, 1), "three": (1, 2, 3), "one": (1,)}
        found = {}
        for name, order in orders.items():
            async with haproxy(PROGRAM, tmp_path, at, order) as url:
                found[name] = await placed(session, url, names, header)
        async with haproxy(PROGRAM, tmp_path, at) as url:
            back = await placed(session, url, names, header)
    assert found["swapped"] == found["two"] == back
    moved = {name for name in names if found["three"][name] != found["two"][name]}
    print(f"moved by a third pair: {len(moved) / len(names):.3f}")
    assert 0.28 <= len(moved) / len(names) <= 0.39
    assert {found["three"][name] for name in moved} == {"3"}
    assert set(found["one"].values()) == {"1"}


async def test_without_a_chat_id_a_user_stays_with_one_pair_and_nothing_internal_is_reached(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Users spread as chats do; sessions, metrics and status pages are asked of the pair itself."""
    names = [f"user-{number}" for number in range(200)]
    async with echoes(2) as at, haproxy(PROGRAM, tmp_path, at) as url:
        first = await placed(session, url, names, "X-OpenWebUI-User-Id")
        assert first == await placed(session, url, names, "X-OpenWebUI-User-Id")
        assert 70 <= Counter(first.values())["1"] <= 130
        for path in ("/", "/metrics", "/v1/internal/sessions"):
            async with session.get(url + path) as response:
                assert response.status == 404
