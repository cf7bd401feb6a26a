"""A person before the page of Open WebUI: what they click and write, what they see, and what is kept of it."""

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.browser import Page

ANSWER_SECONDS = 120
QUIET_SECONDS = 1.0

# Error toasts go after some seconds: a page notes each one when it comes.
NOTE_TOASTS = """
window.errorToasts = [];
new MutationObserver(() => {
  for (const toast of document.querySelectorAll('[data-sonner-toast][data-type="error"]'))
    if (!toast.noted) { toast.noted = true; window.errorToasts.push(toast.innerText); }
}).observe(document, {childList: true, subtree: true, attributes: true, attributeFilter: ['data-type']});
"""
INPUT = "document.getElementById('chat-input')"
ANSWERS = "[...document.querySelectorAll('.chat-assistant')]"
VISIBLE = "[...document.querySelectorAll('button')].filter(b => b.getClientRects().length)"


def labelled(label: str) -> str:
    """Return the last visible button with this label for screen readers."""
    return f"{VISIBLE}.filter(b => b.ariaLabel === {json.dumps(label)}).at(-1)"


def saying(text: str) -> str:
    """Return the visible button that shows `text`."""
    return f"{VISIBLE}.find(b => b.innerText.includes({json.dumps(text)}))"


@dataclass
class Person:
    """Somebody with an account.  `quiet` waits until nothing is asked of the model any more."""

    page: Page
    session: aiohttp.ClientSession
    url: str
    proxy_url: str
    pictures: Path

    async def enter(self) -> None:
        """Open the page; the first to come makes the first account, the browser remembers who it is."""
        await self.page.call("Page.addScriptToEvaluateOnNewDocument", source=NOTE_TOASTS)
        await self.page.go(self.url)
        await self.page.until(f"{saying('Get started')} || {INPUT}", 60)
        if await self.page.value(f"!!{saying('Get started')}"):
            await self.sign_up()
            await self.picture("signed-up")
            await self.page.click(saying("Okay, Let"))
        await self.page.until(INPUT)

    async def sign_up(self) -> None:
        """Fill in the form of the first account."""
        await self.page.click(saying("Get started"))
        for name, value in (("name", "Ada"), ("email", "ada@example.test"), ("password", "Not-a-secret-1")):
            await self.page.type(f"document.getElementById('{name}')", value)
        await self.page.click(saying("Create Admin Account"))
        await self.page.until(saying("Okay, Let"), 60)

    async def api(self, method: str, path: str, body: object = None) -> Any:
        """Call Open WebUI's own API as this person."""
        headers = {"Authorization": f"Bearer {await self.page.value('localStorage.token')}"}
        async with self.session.request(method, f"{self.url}/api/{path}", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def add_models(self, models: dict[str, dict[str, Any]], base: str) -> None:
        """Add models of our own (Workspace, Models) with these parameters, which are not there yet."""
        there = {model["id"] for model in (await self.api("GET", "models"))["data"]}
        names = ("usage", "citations", "file_context", "file_upload", "builtin_tools", "status_updates")
        meta = {"capabilities": dict.fromkeys(names, True)}
        for name, params in models.items():
            entry = {"id": name, "name": name, "base_model_id": base, "params": params, "meta": meta}
            if name not in there:
                await self.api("POST", "v1/models/create", {**entry, "access_grants": [], "is_active": True})

    async def begin(self, model: str) -> None:
        """Open a new chat with `model`."""
        await self.page.go(f"{self.url}/?models={model}")
        chosen = f"document.getElementById('model-selector-model-button').innerText.includes({json.dumps(model)})"
        await self.page.until(f"{chosen} && {INPUT}")

    async def attach(self, file: Path) -> None:
        """Attach a file to the next message, and wait until it is read."""
        await self.page.choose_file("document.querySelector('input[type=file]')", file)
        await self.page.until(
            f"document.querySelector('#chat-container form').innerText.includes({json.dumps(file.name)})"
        )
        await asyncio.sleep(0.2)
        await self.page.until("!document.querySelector('#chat-container form [class*=spin]')")

    async def say(self, text: str) -> None:
        """Write a message and send it."""
        await self.page.type(INPUT, text)
        await self.page.click("document.getElementById('send-message-button')")

    async def ask(self, text: str) -> dict[str, Any]:
        """Send a message, wait for the whole answer and for what follows it; return the answer as it is kept."""
        before = len(await self.kept()) if await self.chat() else 0
        await self.say(text)
        return await self.answered(before + 2)

    async def answered(self, count: int) -> dict[str, Any]:
        """Wait until the chat keeps `count` messages, the last of them whole and in the page; return that one."""
        await self.page.until("location.pathname.startsWith('/c/')")
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(kept := await self.kept()) < count or not kept[-1].get("done"):
            assert time.monotonic() < deadline, f"{len(kept)} messages, not {count}, after {ANSWER_SECONDS} s"
            await asyncio.sleep(0.1)
        await self.quiet()
        answer: dict[str, Any] = (await self.kept())[-1]
        assert answer["role"] == "assistant"
        assert answer.get("error") is None
        assert answer["content"].strip()
        await self.sees(answer["content"])
        return answer

    async def sees(self, text: str) -> None:
        """Wait until the last answer in the page holds `text`; the page may break lines elsewhere."""
        words = " ".join(text.split())
        await self.page.until(f"{ANSWERS}.at(-1).innerText.replace(/\\s+/g, ' ').includes({json.dumps(words)})")

    async def chat(self) -> str:
        """Return the id of the chat in the page, empty before it has one."""
        path = str(await self.page.value("location.pathname"))
        return path.removeprefix("/c/") if path.startswith("/c/") else ""

    async def kept(self) -> list[dict[str, Any]]:
        """Return the messages of this chat as Open WebUI keeps them, in the order in which they began."""
        chat = (await self.api("GET", f"v1/chats/{await self.chat()}"))["chat"]
        return list(chat["history"]["messages"].values())

    async def title(self) -> str:
        """Return the title that the chat was given."""
        return str((await self.api("GET", f"v1/chats/{await self.chat()}"))["title"])

    async def quiet(self) -> None:
        """Wait until no request has been running in the proxy for a while: titles, tags, follow-ups are made."""
        deadline, since = time.monotonic() + ANSWER_SECONDS, time.monotonic()
        while time.monotonic() - since < QUIET_SECONDS:
            async with self.session.get(f"{self.proxy_url}/metrics") as response:
                lines = (await response.text()).splitlines()
            chats = 'proxy_requests_in_flight{route="/v1/chat/completions"}'
            if any(line.startswith(chats) and not line.endswith(" 0.0") for line in lines):
                since = time.monotonic()
            assert time.monotonic() < deadline, "requests still run"
            await asyncio.sleep(0.1)

    async def picture(self, name: str) -> None:
        """Keep a picture of the page."""
        await self.page.picture(self.pictures / f"{name}.png")

    async def saw_no_error(self) -> None:
        """Fail if an error was shown since the page was opened."""
        assert await self.page.value("window.errorToasts") == []
