"""How long tasks wait for their chat's answer, in virtual time."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from proxy.coalesce_metrics import CoalesceMetrics
from proxy.config.coalesce import Coalesce
from proxy.core.identity import Identity
from proxy.holding import MOST_CHATS, Held, Holding
from tests.virtual_time import at, run, soon

CHAT = Identity("t", True, "c", "m", None, True)
TITLE = replace(CHAT, message=None, task="title_generation")
TAGS = replace(TITLE, task="tags_generation")


def holding(**settings: float) -> Holding:
    """Return a table of chats with these settings."""
    return Holding(replace(Coalesce(), **settings), CoalesceMetrics(CollectorRegistry()))  # type: ignore[arg-type]  # by name


async def answered(table: Holding, begins: float, ends: float, who: Identity = CHAT, *, tools: bool = False) -> None:
    """Answer a chat between two times."""
    await at(begins)
    with table.answering(who) as answer:
        await at(ends)
        answer.called_tools = tools


async def asked(table: Holding, when: float, who: Identity = TITLE) -> tuple[float, bool]:
    """Let a task arrive; return when it went (milliseconds exact), and what it was told of the answer."""
    await at(when)
    held = await table.hold(who)
    return round(asyncio.get_running_loop().time(), 3), held.answered


def test_a_first_title_waits_for_its_chat_to_begin_and_to_end() -> None:
    """It comes up to 300 ms before the chat request; it goes the moment that the answer has ended."""

    async def story() -> None:
        table = holding()
        title, _ = await asyncio.gather(asked(table, 0.0), answered(table, 0.3, 4.0))
        assert title == (4.0, True)

    run(story())


def test_a_title_whose_chat_never_begins_goes_after_a_moment() -> None:
    """1.5 seconds; no longer, since nobody may come."""
    assert run(asked(holding(), 2.0)) == (3.5, False)


def test_after_ten_seconds_a_task_goes_whatever_its_chat_does() -> None:
    """It learns that the answer has not ended."""

    async def story() -> None:
        table = holding()
        title, tags, _ = await asyncio.gather(asked(table, 0.0), asked(table, 5.0, TAGS), answered(table, 0.1, 60.0))
        assert title == (10.0, False) and tags == (15.0, False)

    run(story())


def test_tasks_after_the_answer_go_at_once() -> None:
    """The usual tags and follow-ups, and a title that was asked for anew."""

    async def story() -> None:
        table = holding()
        await answered(table, 0.0, 2.0)
        assert await asked(table, 2.5, TAGS) == (2.5, True)
        assert await asked(table, 9.0) == (9.0, True)

    run(story())


def test_tags_of_an_unknown_chat_go_at_once() -> None:
    """Only a title comes before its chat."""
    assert run(asked(holding(), 1.0, TAGS)) == (1.0, False)


def test_a_task_waits_for_every_answer_of_its_chat_and_for_no_other() -> None:
    """Two models in one chat; another chat, another user with the same chat id, and tasks keep nobody."""

    async def story() -> None:
        table = holding()
        tags, *_ = await asyncio.gather(
            asked(table, 1.0, TAGS),
            answered(table, 0.0, 2.0),
            answered(table, 0.5, 3.0),
            answered(table, 0.0, 8.0, replace(CHAT, chat="other")),
            answered(table, 0.0, 8.0, replace(CHAT, tenant="other")),
            answered(table, 0.0, 8.0, TITLE),
        )
        assert tags == (3.0, True)

    run(story())


def test_a_title_waits_from_round_to_round_of_a_tool_loop() -> None:
    """An answer that called tools is not the end; if the next round does not come, the title goes."""

    async def story() -> None:
        table = holding()
        title, *_ = await asyncio.gather(
            asked(table, 0.0), answered(table, 0.1, 1.0, tools=True), answered(table, 2.0, 3.0)
        )
        assert title == (3.0, True)
        await answered(table, 20.0, 21.0, tools=True)
        assert await asked(table, 21.2, TAGS) == (22.5, True)

    run(story())


@pytest.mark.parametrize(
    "who", [CHAT, replace(TITLE, task="query_generation"), replace(TITLE, chat=None), replace(TITLE, explicit=False)]
)
def test_nothing_else_waits(who: Identity) -> None:
    """Chats, tasks that are acted on, and tasks of which nobody said whose they are."""

    async def story() -> None:
        table = holding()
        other = soon(answered(table, 0.0, 5.0))
        assert await asked(table, 1.0, who) == (1.0, False)
        await other

    run(story())


def test_switched_off_nothing_waits() -> None:
    """`coalesce.hold_seconds = 0`, and `task_head_seconds = 0` for the wait before a chat alone."""

    async def story() -> None:
        for table in (holding(hold_seconds=0), holding(task_head_seconds=0)):
            assert await table.hold(TITLE) == Held(0.0, False)

    run(story())


def test_one_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    """Nor does it end the waiting of others."""

    async def story() -> None:
        table = holding()
        gone, stays = soon(table.hold(TITLE)), soon(asked(table, 0.0))
        chat = soon(answered(table, 0.0, 5.0))
        await at(1.0)
        assert len(table) == 2
        gone.cancel()
        await asyncio.wait([gone])
        assert len(table) == 1
        assert await stays == (5.0, True)
        await chat
        assert len(table) == 0 and not table._waiting

    run(story())


def test_chats_are_forgotten_oldest_first_but_never_while_they_run() -> None:
    """The table is bounded."""

    async def story() -> None:
        table = holding()
        with table.answering(CHAT):
            for number in range(MOST_CHATS + 10):
                with table.answering(replace(CHAT, chat=str(number))):
                    pass
            assert len(table._chats) == MOST_CHATS
            assert ("t", "c") in table._chats and ("t", "0") not in table._chats

    run(story())
