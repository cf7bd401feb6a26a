"""What Open WebUI sends: chat and user headers, tasks beside chats, names with odd characters."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bodies import chat, eventually
from tests.conftest import RawConnect, RunningProxy, StartProxy
from tests.fake_engine import Rules
from tests.fake_replies import Reply
from tests.fake_vllm import FakeVllm


async def live_after(proxy: RunningProxy, body: dict[str, Any], **identity: str) -> float:
    """Send `body` as this user and chat; return how many sessions live when it has been recorded."""
    async with proxy.post(body, **{f"X_OpenWebUI_{name}_Id": value for name, value in identity.items()}) as response:
        assert response.status == 200, await response.text()
        await response.read()
    await eventually(lambda: not proxy.sample("proxy_requests_in_flight"))
    return proxy.sample("proxy_sessions_live")


def told(*texts: str) -> dict[str, Any]:
    """Return a chat request: a system message, then user and assistant in turn."""
    roles = ["system", *["user", "assistant"] * len(texts)]
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


async def test_a_chat_is_known_by_user_and_chat_id_else_by_its_content(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """Equal ids of two users are two sessions, a temporary chat is one, without an id the first words tell (OW-05)."""
    fake_vllm.default = Reply(text="r")
    assert await live_after(proxy, chat("one"), Chat="c1", User="u1") == 1
    assert await live_after(proxy, chat("two"), Chat="c1", User="u2") == 2
    assert await live_after(proxy, chat("three"), Chat="local:abc", User="u1") == 3
    assert await live_after(proxy, told("s", "first"), User="u1") == 4
    assert await live_after(proxy, told("s", "first", "r", "second"), User="u1") == 4
    assert await live_after(proxy, told("s", "first", "r", "second"), User="u2") == 5
    assert await live_after(proxy, chat("one"), Chat="c1", User="u1") == 5


async def test_a_chat_id_of_absurd_length_is_no_id(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The header is ignored and the request served: two such ids with the same words are one session (OW-05)."""
    assert await live_after(proxy, chat("one"), Chat="x" * 5000, User="u1") == 1
    assert await live_after(proxy, chat("one"), Chat="y" * 5000, User="u1") == 1


TASK = "### Task:\nGenerate 1-3 broad tags categorizing the main themes.\n<chat_history>\nUSER: hi\n</chat_history>"


def task(text: str = TASK) -> dict[str, Any]:
    """Return a task request as Open WebUI sends it."""
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "stream": False, "max_tokens": 1000}


async def test_a_task_gets_one_json_object_and_its_whole_instruction(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Never a stream, and the message reaches vLLM as it was (OW-06)."""
    async with proxy.post(task(), Accept="text/event-stream", X_OpenWebUI_Chat_Id="c1") as response:
        assert response.content_type == "application/json"
        assert json.loads(await response.read())["choices"][0]["message"]["content"]
    assert fake_vllm.generations[0].body["messages"] == task()["messages"]


async def test_a_task_is_no_turn_of_its_chat(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """A chat makes a session (the positive control), its task neither a second one nor a turn (OW-06)."""
    assert await live_after(proxy, chat("hi"), Chat="c1", User="u1") == 1
    assert await live_after(proxy, task(), Chat="c1", User="u1") == 1
    assert await live_after(proxy, task(), User="u1") == 1
    history = [
        *chat("hi")["messages"],
        {"role": "assistant", "content": "All right."},
        {"role": "user", "content": "x"},
    ]
    assert await live_after(proxy, {"messages": history}, Chat="c1", User="u1") == 1
    sent = fake_vllm.generations[-1].prompt
    assert "Task" not in sent
    assert fake_vllm.generations[-1].hit >= fake_vllm.generations[0].n // 16 * 16


async def test_a_running_task_does_not_delay_the_next_message(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The task is still generating when the user's next message is answered (OW-06)."""
    held = asyncio.Event()
    fake_vllm.reply_to = lambda body: Reply(gates={"headers": held}) if body["messages"] == task()["messages"] else None

    async def send_task() -> int:
        async with proxy.post(task(), X_OpenWebUI_Chat_Id="c1", X_OpenWebUI_User_Id="u1") as response:
            return response.status

    async with asyncio.TaskGroup() as group:
        sent = group.create_task(send_task())
        await fake_vllm.wait_for(1)
        async with asyncio.timeout(2):
            await live_or_fail(proxy)
        assert not sent.done()
        held.set()
    assert sent.result() == 200


async def live_or_fail(proxy: RunningProxy) -> None:
    """Send a chat message and read its answer."""
    async with proxy.post(chat("next"), X_OpenWebUI_Chat_Id="c1", X_OpenWebUI_User_Id="u1") as response:
        assert response.status == 200
        await response.read()


async def test_a_task_that_does_not_fit_is_refused_whole(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Its one message is never shortened by us: what vLLM refuses is refused (OW-06)."""
    fake_vllm.rules = Rules(max_model_len=64)
    async with proxy.post(task(TASK + " word" * 200)) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]
    assert all(TASK in seen.body["messages"][0]["content"] for seen in fake_vllm.generations)


NAMES = ["F%C3%A1bian", "100% real", "F\xe1bian", "", "%", "\xff\xfe\x80"]


@pytest.mark.parametrize("name", NAMES, ids=["encoded", "percent", "latin-1", "empty", "lone-percent", "odd-bytes"])
async def test_any_name_is_served_and_means_nothing(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, tmp_path: Path, name: str
) -> None:
    """The user's id is the identity; the name is neither stored nor a label nor sent on (OW-08)."""
    database = tmp_path / "sessions.sqlite3"
    proxy = await start_proxy(database=str(database))
    for sent in (name, "Someone Else"):
        client = await raw_connect(proxy.port)
        head = f"X-OpenWebUI-User-Name: {sent}\r\nX-OpenWebUI-User-Id: u1\r\nX-OpenWebUI-Chat-Id: c1\r\n"
        await client.post(json.dumps(chat()).encode(), head=head)
        assert (await client.head()).startswith(b"HTTP/1.1 200")
    await eventually(lambda: not proxy.sample("proxy_requests_in_flight"))
    assert proxy.sample("proxy_sessions_live") == 1
    assert "X-OpenWebUI-User-Name" not in fake_vllm.generations[0].headers
    metrics = proxy.state.metrics.render()
    await proxy.runner.cleanup()
    for place in (metrics, *stored(tmp_path)):
        assert b"Someone Else" not in place
        assert len(name) < 3 or name.encode("latin-1") not in place


def stored(folder: Path) -> list[bytes]:
    """Return what the files of the store hold."""
    return [file.read_bytes() for file in folder.iterdir()]
