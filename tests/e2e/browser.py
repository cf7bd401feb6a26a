"""Drives Chromium over its DevTools protocol: a few calls, so that no driver has to be installed for them."""

import asyncio
import base64
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_SECONDS = 60
WAIT_SECONDS = 30
POLL_SECONDS = 0.05
SIZE = (1280, 1100)


def installed() -> str | None:
    """Return the path of a Chromium of this machine; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium(program: str, profile: Path) -> Iterator[str]:
    """Run a headless Chromium with the folder `profile` for its files; yield the URL of its DevTools."""
    width, height = SIZE
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--lang=en-US", "--mute-audio",
               "--remote-debugging-port=0", f"--user-data-dir={profile}", f"--window-size={width},{height}",
               "about:blank"]  # fmt: skip
    profile.mkdir(parents=True, exist_ok=True)
    with (profile / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{_port(process, profile)}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], profile: Path) -> int:
    """Wait for the file that tells the port which Chromium chose."""
    told = profile / "DevToolsActivePort"
    deadline = time.monotonic() + START_SECONDS
    while not (told.exists() and (lines := told.read_text().split())):
        log = profile / "chromium.log"
        assert process.poll() is None, f"Chromium ended: {log.read_text(errors='replace')[-500:]}"
        assert time.monotonic() < deadline, f"Chromium was not ready after {START_SECONDS} s"
        time.sleep(POLL_SECONDS)
    return int(lines[0])


class Page:
    """A tab.  What is given as `script` is JavaScript; where an element is meant, an expression that yields it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call one method of the protocol and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:  # events come between, and nothing here needs them
            message = json.loads(await self._socket.receive_str(timeout=WAIT_SECONDS))
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result

    async def go(self, url: str) -> None:
        """Open `url`; it is not loaded yet."""
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Return what `script` (an expression, a promise too) evaluates to, as JSON can tell it."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails'].get('exception')}"
        return found["result"].get("value")

    async def until(self, script: str, seconds: float = WAIT_SECONDS) -> Any:
        """Wait until `script` is true and return its value; while a page loads an error in it counts as false."""
        deadline = time.monotonic() + seconds
        found_in = f"try {{ const v = {script}; return v instanceof Node || v }} catch (e) {{ return null }}"
        while True:
            found = await self.value(f"(() => {{ {found_in} }})()")
            if found:
                return found
            assert time.monotonic() < deadline, f"not within {seconds} s: {script}"
            await asyncio.sleep(POLL_SECONDS)

    async def click(self, element: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait for `element` to be visible and still, and click in its middle."""
        middle = "(r => r.width > 0 && r.height > 0 && [r.x + r.width / 2, r.y + r.height / 2])"
        place = f"{middle}({element}.getBoundingClientRect())"
        await self.until(f"({element}.scrollIntoView({{block: 'nearest'}}), true)", seconds)
        before = None
        while before != (at := await self.until(place, seconds)):
            before = at
            await asyncio.sleep(POLL_SECONDS)
        x, y = at
        for kind, buttons in (("mouseMoved", 0), ("mousePressed", 1), ("mouseReleased", 0)):
            button = "none" if kind == "mouseMoved" else "left"
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=1
            )  # fmt: skip

    async def type(self, element: str, text: str) -> None:
        """Put the cursor into `element` and write `text` there."""
        await self.until(f"({element}.focus(), true)")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        """Press and release a key, e.g. "Enter", 13."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    async def choose_file(self, element: str, path: Path) -> None:
        """Give `path` to the file input `element`."""
        found = await self.call("Runtime.evaluate", expression=element)
        await self.call("DOM.setFileInputFiles", files=[str(path)], objectId=found["result"]["objectId"])

    async def picture(self, path: Path) -> None:
        """Write what the tab shows to the PNG file `path`."""
        shot = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))


@asynccontextmanager
async def open_page(session: aiohttp.ClientSession, devtools: str) -> AsyncIterator[Page]:
    """Open a tab in the Chromium whose DevTools are at `devtools`, and close it in the end."""
    async with session.put(f"{devtools}/json/new?about:blank") as response:
        target = await response.json(content_type=None)
    async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
        page = Page(socket)
        await page.call("Page.enable")
        yield page
    async with session.get(f"{devtools}/json/close/{target['id']}"):
        pass
