"""What is remembered of an exchange, as it shows in the next turn of its chat."""

import asyncio
import json
from pathlib import Path
from typing import Any

from proxy.core.identity import Identity
from proxy.memory import chain_of
from tests.bodies import eventually
from tests.conftest import RawConnect, RunningProxy, StartProxy
from tests.fake_replies import Raw, Reply, content_event
from tests.fake_vllm import FakeVllm
from tests.flights import arrived, ask, runs, who
from tests.told import TAGS, model, sent, system, user

RULES = "You help.\nNever say never, and say everything in as few words as can be.\n"


def head(mood: str) -> dict[str, Any]:
    """Return a system message with a line that only its changes show to be volatile."""
    return system(f"{RULES}Mood of the day is {mood}.\nBe kind to everybody, at all times and in all places.")


async def talked(proxy: RunningProxy, fake: FakeVllm, moods: list[str], **of: str) -> list[str]:
    """Play a turn for each mood; return the system text of each prompt."""
    told: list[Any] = []
    heads = []
    for turn, mood in enumerate(moods):
        told.append(user(f"question {turn}"))
        body = await sent(proxy, fake, [head(mood), *told], of=who(**of))
        heads.append(body["messages"][0]["content"])
        assert mood in json.dumps(body["messages"])
        told.append(model("All right."))
    return heads


async def test_a_line_that_changes_each_turn_moves_out_of_the_head(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Three values in three turns prove it; from then on the head is the same in each prompt."""
    heads = await talked(proxy, fake_vllm, ["one", "two", "three", "four", "five"], chat="c")
    assert [("Mood" in text) for text in heads] == [True, True, False, False, False]
    assert heads[3] == heads[4] and heads[3].startswith(RULES)


async def test_a_line_that_was_edited_once_stays(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Nor does a chat that only its content tells learn anything."""
    assert all("Mood" in text for text in await talked(proxy, fake_vllm, ["one", "one", "two", "two", "two"], chat="c"))
    assert all("Mood" in text for text in await talked(proxy, fake_vllm, ["one", "two", "three", "four"]))


async def test_profile_max_knows_the_line_in_the_next_chat(
    start_proxy: StartProxy, fake_vllm: FakeVllm, tmp_path: Path
) -> None:
    """Of the same tenant, at once, and after a restart; another tenant learns it by itself."""
    settings = {"database": str(tmp_path / "sessions.sqlite3"), "store__write_delay_seconds": 0.05, "profile": "max"}
    first = await start_proxy(**settings)
    await talked(first, fake_vllm, ["one", "two", "three"], chat="c")
    assert "Mood" not in (await talked(first, fake_vllm, ["four"], chat="d"))[0]
    assert "Mood" in (await talked(first, fake_vllm, ["four"], user="u2", chat="d"))[0]
    await first.runner.cleanup()
    second = await start_proxy(**settings)
    assert "Mood" not in (await talked(second, fake_vllm, ["five"], chat="e"))[0]
    assert "Mood" in (await talked(second, fake_vllm, ["five"], user="u3", chat="e"))[0]


async def test_a_restart_keeps_what_a_chat_learned(
    start_proxy: StartProxy, fake_vllm: FakeVllm, tmp_path: Path
) -> None:
    """In profile balanced too, for the chat itself and for no other."""
    settings = {"database": str(tmp_path / "sessions.sqlite3"), "store__write_delay_seconds": 0.05}
    first = await start_proxy(**settings)
    heads = await talked(first, fake_vllm, ["one", "two", "three"], chat="c")
    await first.runner.cleanup()
    second = await start_proxy(**settings)
    told = [head("four"), user("question 0"), model("All right."), user("on")]
    assert (await sent(second, fake_vllm, told))["messages"][0]["content"] == heads[-1]
    assert "Mood" in (await talked(second, fake_vllm, ["four"], chat="d"))[0]


async def test_thoughts_come_back_only_where_the_settings_say_so(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Clients tell replies without them; they cost room in every later prompt."""
    for thinking in (False, True):
        proxy = await start_proxy(history__thinking=thinking)
        fake_vllm.default = Reply("Yes.", reasoning="Let me see.")
        await sent(proxy, fake_vllm, [user("hi")])
        again = await sent(proxy, fake_vllm, [user("hi"), model("Yes."), user("on")])
        assert ("Let me see." in json.dumps(again["messages"])) is thinking


async def test_thoughts_in_the_text_come_back_only_where_the_settings_say_so(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """A vLLM without a reasoning parser leaves them in the content; Open WebUI takes them out."""
    for thinking in (False, True):
        proxy = await start_proxy(history__thinking=thinking)
        fake_vllm.default = Reply("<think>\nLet me see.\n</think>\n\nYes.")
        await sent(proxy, fake_vllm, [user("hi")])
        again = await sent(proxy, fake_vllm, [user("hi"), model("Yes."), user("on")])
        assert ("Let me see." in json.dumps(again["messages"])) is thinking


async def test_a_reply_that_the_client_stopped_is_remembered_as_cut(
    proxy: RunningProxy, fake_vllm: FakeVllm, raw_connect: RawConnect
) -> None:
    """It may have seen less, or more, than we relayed: either way the turns before it go as they went."""
    fake_vllm.replies.append(Reply(pieces=["The Nile ", "is long ", "and wide."], gates={2: asyncio.Event()}))
    clock = system(f"{RULES}Now: 2026-01-02 10:00:01 UTC.")
    client = await raw_connect(proxy.port)
    first = {"model": "fake", "messages": [clock, user("hi")], "stream": True}
    await ask(client, first, user="u1", chat="c")
    await arrived(fake_vllm, 1)
    await client.until(b"is long ")
    await client.leave()
    await eventually(lambda: proxy.sample("proxy_aborts_total", phase="stream") == 1)
    before = runs(fake_vllm)[0].body["messages"]
    (session,) = proxy.state.sessions._live.values()
    await eventually(lambda: [n.cut for n in _nodes(session.ledger.root) if n.role == "assistant"] == [True])
    later = system(f"{RULES}Now: 2026-01-02 10:09:01 UTC.")
    again = await sent(proxy, fake_vllm, [later, user("hi"), model("The Nile"), user("on")])
    assert again["messages"][: len(before) + 1] == [*before, model("The Nile")]


def _nodes(root: Any) -> list[Any]:
    """Return every node under `root`."""
    return [each for child in root.children for each in (child, *_nodes(child))]


async def test_a_reply_that_ended_is_not_cut(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """One that the model's limit ended is whole; one that broke off is cut."""
    await sent(proxy, fake_vllm, [user("hi")], stream=True, max_tokens=2)
    fake_vllm.reply_to = lambda body: Raw([content_event("The Nile is")], end="cut")
    await sent(proxy, fake_vllm, [user("hi there")], stream=True)
    (session,) = proxy.state.sessions._live.values()
    assert [node.cut for node in _nodes(session.ledger.root) if node.role == "assistant"] == [False, True]


async def test_tasks_are_not_part_of_a_chat(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Neither their words nor their answers, however many come."""
    await sent(proxy, fake_vllm, [user("hi")])
    for number in range(3):
        await sent(proxy, fake_vllm, [user(f"Tags {number}.")], of=who(chat="c", task=TAGS))
    (session,) = proxy.state.sessions._live.values()
    assert (session.turns, len(_nodes(session.ledger.root))) == (1, 2)


def test_a_chain_tells_tenants_models_and_system_texts_apart() -> None:
    """But not the time in the latter; a request of nothing but a head has a chain too."""
    of = Identity("t", True, None, None, None, False)
    told = (system("You help. Now: 2026-01-02 10:00:01."), user("a"), model("b"), user("c"))
    chain = chain_of((), of, "m", told)
    assert len(chain) == 3 and chain_of((), of, "m", told[:3]) == chain[:2]
    later = (system("You help. Now: 2026-01-02 11:11:11."), *told[1:])
    assert chain_of((), of, "m", later) == chain
    others = [
        chain_of((), Identity("s", True, None, None, None, False), "m", told),
        chain_of((), of, "n", told),
        chain_of((), of, "m", (system("You do not help."), *told[1:])),
    ]
    assert not any(set(other) & set(chain) for other in others)
    assert len(chain_of((), of, "m", told[:1])) == 1
