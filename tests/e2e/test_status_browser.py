"""The status page and the WebSocket in a real Chromium: by keyboard, in light, dark and on a phone's width."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.config import Key
from proxy.downstream.auth import hash_token
from tests.bodies import eventually
from tests.conftest import RunningProxy, StartProxy
from tests.e2e.browser import Page, chromium, installed, open_page
from tests.fake_replies import Reply
from tests.fake_vllm import FakeVllm

PROGRAM = installed() or ""
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not PROGRAM, reason="Chromium is not installed"),
]
PICTURES = os.environ.get("PREFIX_PROXY_TEST_ARTIFACTS")  # a folder: what the page looks like is written there
TOKEN = "sk-pp-admin-of-the-test"
ROW = "document.querySelector('#chats tbody tr')"
TAB, ENTER = ("Tab", 9), ("Enter", 13)


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Chromium for all tests here."""
    with chromium(PROGRAM, tmp_path_factory.mktemp("chromium")) as url:
        yield url


@pytest.fixture
async def page(devtools: str) -> AsyncIterator[Page]:
    """A tab of its own."""
    async with aiohttp.ClientSession() as session, open_page(session, devtools) as opened:
        yield opened


async def shape(page: Page, width: int, theme: str) -> None:
    """Make the tab so wide, and light or dark."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    await page.call("Emulation.setDeviceMetricsOverride", **size)
    await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])


async def ask(proxy: RunningProxy, chat: str, messages: list[dict[str, Any]]) -> None:
    """Send one streamed request of a chat."""
    headers = {"X_OpenWebUI_User_Id": "u", "X_OpenWebUI_Chat_Id": chat, "Authorization": f"Bearer {TOKEN}"}
    async with proxy.post({"model": "fake", "messages": messages, "stream": True}, **headers) as response:
        assert response.status == 200
        await response.read()


async def converse(proxy: RunningProxy, chat: str, turns: int) -> None:
    """Tell a chat whose system message changes before its last turn."""
    told = [{"role": "system", "content": "You help. " * 30}]
    for turn in range(turns):
        told.append({"role": "user", "content": f"{chat} turn {turn} " + "words that say something " * 30})
        if turn == turns - 1:
            told[0] = {"role": "system", "content": "Another one. " * 30}
        await ask(proxy, chat, told)
        told.append({"role": "assistant", "content": "All right."})


async def test_the_page_shows_what_goes_on_and_keeps_up_with_it(
    proxy: RunningProxy, fake_vllm: FakeVllm, page: Page
) -> None:
    """A chat, its reuse, its break, a request in flight; nothing loaded from elsewhere, nothing blocked."""
    await converse(proxy, "first", 3)
    await page.go(proxy.url + "/")
    await page.until(ROW)
    text = await page.value(f"{ROW}.innerText")
    assert "fake" in text and "%" in text and "system" in text
    assert "vLLM is up" in await page.value("document.querySelector('#vllm').innerText")
    end = asyncio.Event()
    fake_vllm.replies.append(Reply(gates={1: end}))
    running = proxy.state.tasks.spawn(ask(proxy, "second", [{"role": "user", "content": "hi"}]), name="test")
    await page.until("document.querySelector('#running tbody tr').innerText.includes('answering')")
    end.set()
    await running
    await page.until("document.querySelectorAll('#chats tbody tr').length === 2")
    loaded = await page.value("performance.getEntriesByType('resource').map((e) => e.name)")
    assert all(name.startswith(proxy.url) for name in loaded)
    await fake_vllm.stop()
    await page.until("document.querySelector('#vllm').innerText.includes('does not answer')")


async def test_it_is_readable_in_light_and_dark_and_fits_a_phone(proxy: RunningProxy, page: Page) -> None:
    """Background and text follow the system's choice; nothing is wider than the screen."""
    for number in range(4):
        await converse(proxy, f"chat {number}", number + 1)
    backs = {}
    for name, width, theme in (("light", 1280, "light"), ("dark", 1280, "dark"), ("phone", 360, "light")):
        await shape(page, width, theme)
        await page.go(proxy.url + "/")
        await page.until(ROW)
        backs[name] = await page.value("getComputedStyle(document.body).backgroundColor")
        assert await page.value("document.documentElement.scrollWidth") <= width
        if PICTURES:
            await asyncio.sleep(0.6)  # until the bars have grown
            await page.picture(Path(PICTURES) / f"status-{name}.png")
    assert backs["light"] == backs["phone"] != backs["dark"]
    small = "[...document.querySelectorAll('button')].filter((b) => b.offsetHeight && b.offsetHeight < 40).length"
    assert await page.value(small) == 0


async def test_with_keys_it_asks_for_one_and_goes_by_keyboard_alone(start_proxy: StartProxy, page: Page) -> None:
    """A wrong key is told as such; the right one shows the chats, Pause has the focus, and the key can be forgotten."""
    keys = (Key("boss", hash_token(TOKEN), trusted=True, admin=True),)
    proxy = await start_proxy(keys=keys)
    await converse(proxy, "c", 2)
    await page.go(proxy.url + "/")
    await page.until("document.activeElement.id === 'key'")
    await page.call("Input.insertText", text="wrong")
    await page.press(*ENTER)
    await page.until("document.querySelector('#why').innerText.includes('not known')")
    await page.call("Input.insertText", text=TOKEN)
    await page.press(*ENTER)
    await page.until(ROW)
    assert await page.value("document.body.innerHTML.includes('sk-pp')") is False
    assert await page.value("document.activeElement.id") == "pause"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert await page.value(outline) == "solid"
    await page.press(*ENTER)
    await page.until("document.querySelector('#live').innerText === 'Paused'")
    await page.press(*TAB)
    await page.press(*ENTER)
    await page.until("document.activeElement.id === 'key'")


SOCKET = """
new Promise((resolve, reject) => {
  const socket = new WebSocket(location.origin.replace('http', 'ws') + '/v1/chat/completions');
  let text = '';
  socket.onopen = () => socket.send(JSON.stringify(
    {model: 'fake', stream: true, messages: [{role: 'user', content: 'hi'}]}));
  socket.onmessage = (event) => {
    if (event.data === '[DONE]') { socket.close(); resolve(text); return; }
    const choice = JSON.parse(event.data).choices[0];
    text += (choice && choice.delta.content) || '';
  };
  socket.onerror = () => reject(new Error('socket'));
})
"""


async def test_a_page_of_the_proxy_chats_through_a_websocket_and_closing_it_stops_vllm(
    proxy: RunningProxy, fake_vllm: FakeVllm, page: Page
) -> None:
    """In the browser's own WebSocket, with its Origin; a tab that is closed in mid-answer stops vLLM at once."""
    await page.go(proxy.url + "/v1/models")
    await page.until("location.pathname === '/v1/models'")
    assert await page.value(SOCKET) == "All right."
    fake_vllm.replies.append(Reply("a b c", gates={1: asyncio.Event()}))
    begun = SOCKET.replace("text +=", "resolve('begun'); text +=")
    assert await page.value(begun) == "begun"
    await page.go("about:blank")
    await eventually(lambda: fake_vllm.live == 0, 5)


async def test_a_page_of_another_origin_is_refused_the_websocket(proxy: RunningProxy, page: Page) -> None:
    """Another port is another origin."""
    await page.go("data:text/html,<title>elsewhere</title>")
    await page.until("document.title === 'elsewhere'")
    script = SOCKET.strip().replace("location.origin.replace('http', 'ws')", f"'ws://127.0.0.1:{proxy.port}'")
    assert await page.value(f"({script}).catch((error) => error.message)") == "socket"
