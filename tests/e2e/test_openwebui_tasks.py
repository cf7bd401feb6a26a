"""A person in a real browser, a real Open WebUI, the proxy: what its tasks make stands in the page.

The upstream is the fake vLLM, because a model of random weights writes no JSON that Open WebUI could read.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.core.rehang_task import POINTER
from proxy.core.text import text_of
from proxy.demo import server
from proxy.demo.needs import Missing
from tests.conftest import StartVllm
from tests.e2e import browser, openwebui
from tests.e2e.conftest import cache_folder
from tests.e2e.person import INPUT, Person, labelled
from tests.fake_engine import Rules
from tests.fake_replies import Reply
from tests.fake_vllm import FakeVllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]  # it may also make the environment

PASTE_BYTES = 38_000
ANSWER = "The gate is made of oak, and it opens with the tide."
LEADS = {
    "title": "### Task:\nGenerate a concise title",
    "tags": "### Task:\nGenerate 1-3 broad tags",
    "follow_ups": "### Task:\nPredict 3-5 useful messages",
}
"""The first words of Open WebUI's instructions, by the name that it reads in the answer."""


@dataclass(frozen=True)
class Chat:
    """What is said in a chat, a word that stands in no other one, and what its tasks are to make."""

    word: str
    question: str
    title: str
    tag: str
    follow_ups: tuple[str, ...]

    def answer(self, task: str) -> str:
        """Return the answer to a task, as Open WebUI wants it."""
        made = {"title": self.title, "tags": [self.tag], "follow_ups": self.follow_ups}
        return json.dumps({task: made[task]})


LINES = (
    f"Chapter {n}. Quay {n} was dredged in 1{n} and took {7 * n} ships a year; its gate opens with the tide."
    for n in range(100, 600)
)
PASTE = "What is the gate made of?\n" + "\n".join(LINES)[:PASTE_BYTES].rpartition("\n")[0]
LONG = Chat("dredged", PASTE, "Gate of Oak", "Harbours", ("Who built it?", "When?"))
SHORT = Chat("lighthouse", "Who keeps the lighthouse?", "Keeper of the Light", "Lights", ("Is it still lit?",))


def task_of(body: dict[str, Any]) -> str | None:
    """Return the name of the task that a body asks for; None for a chat."""
    said = text_of(body["messages"][-1])
    return next((name for name, lead in LEADS.items() if said.startswith(lead)), None)


def chat_of(body: dict[str, Any]) -> Chat:
    """Return the chat that a body belongs to, by what it tells of it."""
    said = "\n".join(text_of(message) for message in body["messages"])
    return next(chat for chat in (LONG, SHORT) if chat.word in said)


def reply(body: dict[str, Any]) -> Reply:
    """Answer a task with JSON, a chat with a sentence."""
    task = task_of(body)
    return Reply(chat_of(body).answer(task) if task else ANSWER)


@pytest.fixture
async def fake_vllm(start_vllm: StartVllm) -> FakeVllm:
    """A fake vLLM that answers tasks, with room for the paste."""
    return await start_vllm(rules=Rules(max_model_len=65_536), reply_to=reply)


def start(running: ExitStack, upstream: str, program: str, folder: Path) -> tuple[str, str, str]:
    """Start the proxy, Open WebUI and a browser; return their addresses.  It blocks, while the upstream must answer."""
    python = openwebui.ensure(cache_folder())
    proxy = running.enter_context(server.proxy(upstream, log=folder / "proxy.log"))
    page = running.enter_context(openwebui.open_webui(python, proxy.url, upstream, folder))
    devtools = running.enter_context(browser.chromium(program, folder / "chromium"))
    for child in (proxy, page):
        child.wait_ready()
    return proxy.url, page.url, devtools


@pytest.fixture
async def person(fake_vllm: FakeVllm, tmp_path: Path) -> AsyncIterator[Person]:
    """A person before the page, signed in, with a model that has Open WebUI's tools; an error toast fails the test."""
    program = browser.installed()
    if program is None:
        pytest.skip("There is no Chromium here: apt-get install chromium.")
    pictures = Path(os.environ.get("PREFIX_PROXY_TEST_ARTIFACTS") or tmp_path / "pictures")
    await asyncio.to_thread(pictures.mkdir, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        running = ExitStack()
        stack.push_async_callback(asyncio.to_thread, running.close)
        try:
            proxy, url, devtools = await asyncio.to_thread(start, running, fake_vllm.url, program, tmp_path)
        except Missing as error:
            pytest.fail(str(error), pytrace=False)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        page = await stack.enter_async_context(browser.open_page(session, devtools))
        someone = Person(page, session, url, proxy, pictures)
        try:
            await someone.enter()
            await someone.add_models({"keeper": {"system": "You answer in one sentence."}}, "fake")
            yield someone
            await someone.saw_no_error()
        finally:
            await someone.picture("end-of-tasks")


async def paste(person: Person, text: str) -> None:
    """Paste `text` into the message, as from the clipboard, and send it."""
    await person.page.until(f"({INPUT}.focus(), true)")
    await person.page.value(
        "(text => { const told = new DataTransfer(); told.setData('text/plain', text); "
        "const pasted = new ClipboardEvent('paste', {clipboardData: told, bubbles: true, cancelable: true}); "
        f"{INPUT}.dispatchEvent(pasted); }})({json.dumps(text)})"
    )
    await person.page.click("document.getElementById('send-message-button')")


async def sees_what_the_tasks_made(person: Person, chat: Chat, name: str) -> None:
    """Wait for the title, in the sidebar and of the window, for the follow-ups as buttons, and for the tag."""
    await person.picture(f"tasks-{name}")
    if await person.page.value(f"!!{labelled('Open Sidebar')}"):
        await person.page.click(labelled("Open Sidebar"))
    items = "[...document.querySelectorAll('#sidebar-chat-item')]"
    await person.page.until(f"{items}.some(item => item.innerText.includes({json.dumps(chat.title)}))")
    await person.page.until(f"document.title.includes({json.dumps(chat.title)})")
    for asked in chat.follow_ups:
        await person.page.until(labelled(f"Follow up: {asked}"))
    await person.picture(f"tasks-{name}-with-the-sidebar")
    tags = await person.api("GET", f"v1/chats/{await person.chat()}/tags")
    assert [tag["name"] for tag in tags] == [chat.tag]
    assert await person.title() == chat.title


def tasks_of(fake: FakeVllm, chat: Chat) -> dict[str, dict[str, Any]]:
    """Return the bodies of a chat's tasks as they went up, by name; each must have been asked once."""
    bodies = [seen.body for seen in fake.of("/v1/chat/completions") if chat_of(seen.body) is chat]
    asked = Counter(task_of(body) for body in bodies)
    assert asked == dict.fromkeys((None, *LEADS), 1)
    return {name: body for body in bodies if (name := task_of(body)) is not None}


def said_in(fake: FakeVllm, chat: Chat) -> dict[str, Any]:
    """Return the body of the chat's own request as it went up."""
    bodies = [seen.body for seen in fake.of("/v1/chat/completions")]
    return next(body for body in bodies if chat_of(body) is chat and task_of(body) is None)


async def test_titles_tags_and_follow_ups_appear(person: Person, fake_vllm: FakeVllm) -> None:
    """
    They do after a long paste, whose title and tags are asked for on the chat's prompt, and in a short chat, as sent.
    """
    await person.begin("keeper")
    await paste(person, LONG.question)
    await person.answered(2)
    await sees_what_the_tasks_made(person, LONG, "long")
    await person.begin("keeper")
    await person.ask(SHORT.question)
    await sees_what_the_tasks_made(person, SHORT, "short")

    chat, tasks = said_in(fake_vllm, LONG), tasks_of(fake_vllm, LONG)
    hung = {name: body for name, body in tasks.items() if POINTER in text_of(body["messages"][-1])}
    print(len(text_of(chat["messages"][-1])), sorted(hung))
    assert len(text_of(chat["messages"][-1])) >= len(PASTE)
    assert chat["tools"], "the model was meant to have Open WebUI's tools"
    assert {"title", "tags"} <= set(hung)
    for body in hung.values():
        assert body["messages"][:-2] == chat["messages"]
        assert [message["role"] for message in body["messages"][-2:]] == ["assistant", "user"]
        assert text_of(body["messages"][-2]) == ANSWER
        assert "Quay 101 was" not in text_of(body["messages"][-1]), "the paste is quoted all the same"
        assert body["tools"] == chat["tools"]
        assert body["tool_choice"] == "none"
    for body in tasks_of(fake_vllm, SHORT).values():
        assert [message["role"] for message in body["messages"]] == ["system", "user"], "the model's prompt and a task"
        assert SHORT.question in text_of(body["messages"][1])
        assert POINTER not in text_of(body["messages"][1])
        assert "tools" not in body
