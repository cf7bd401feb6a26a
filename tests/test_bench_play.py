"""The bench plays both ways in turn and keeps them apart."""

import uuid
from itertools import pairwise

from proxy.bench.client import Way, open_session
from proxy.bench.play import Part, Player
from proxy.bench.scenarios import SIZES
from tests.conftest import RunningProxy
from tests.fake_replies import Reply, json_error
from tests.fake_vllm import FakeVllm

CLOCK = Part("clock", 3, 4, 16, SIZES["small"])


def ways(fake: FakeVllm, proxy: RunningProxy) -> tuple[Way, Way]:
    salt = {"cache_salt": uuid.uuid4().hex}
    return Way("straight", fake.url, None, salt), Way("proxied", proxy.url, None, {})


async def test_the_ways_take_turns_and_go_first_in_turn(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """All users of a turn on one way, then all on the other; the other one begins the next turn."""
    heard = []
    async with open_session() as session:
        player = Player(session, ways(fake_vllm, proxy), "fake", "run")
        await player.play(CLOCK, heard=lambda: heard.append(1))
    order = [(each.turn, each.way) for each in player.played.samples]
    assert order == sorted(order, key=lambda each: each[0]) and len(order) == len(heard) == 24
    assert [way for (_, way), (_, then) in pairwise([*order, (0, "")]) if way != then] == [
        "straight", "proxied", "straight", "proxied", "straight",
    ]  # fmt: skip
    assert not any(each.failure for each in player.played.samples)
    assert set(player.played.seconds) == {("clock", "straight"), ("clock", "proxied")}


async def test_neither_way_finds_what_the_other_left(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The first turn of one user is cold on both ways, and they differ near the front, equally long."""
    async with open_session() as session:
        player = Player(session, ways(fake_vllm, proxy), "fake", "run")
        await player.warm_up()
        await player.play(Part("document", 1, 1, 16, SIZES["small"]))
    assert [each.cached_tokens for each in player.played.samples] == [0, 0]
    heads = [str(seen.body["messages"][0]["content"])[:60] for seen in fake_vllm.generations[-2:]]
    assert len(set(heads)) == 2 and len({head.index(".") for head in heads}) == 1


async def test_the_proxy_knows_chat_user_and_task(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """By Open WebUI's headers: each user has one session, and tasks have none."""
    async with open_session() as session:
        player = Player(session, ways(fake_vllm, proxy), "fake", "run")
        await player.play(Part("tasks", 2, 2, 16, SIZES["small"]))
    assert proxy.sample("proxy_sessions_live") == 2
    assert sum(bool(each.task) for each in player.played.samples) == 2 * 2 * 4


async def test_a_scenario_that_fails_for_all_is_given_up_after_a_turn(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """What was sent until then is in the samples."""
    fake_vllm.reply_to = lambda body: json_error(400, {"error": {"message": "no"}}) if body else Reply()
    async with open_session() as session:
        player = Player(session, ways(fake_vllm, proxy), "fake", "run")
        await player.play(CLOCK)
    assert [each.failure for each in player.played.samples] == ["status 400: no"] * 3
