"""The status page and its events: who may see them, and that the page needs nothing but itself."""

import asyncio
import json
import re
from pathlib import Path

import aiohttp

import proxy.downstream
from proxy.config import Key
from proxy.downstream.auth import hash_token
from proxy.downstream.status import MOST_VIEWERS, VIEWERS
from tests.bodies import eventually
from tests.conftest import RunningProxy, StartProxy
from tests.fake_vllm import FakeVllm

PAGE = Path(proxy.downstream.__file__).with_name("status.html")
EVENTS = "/v1/internal/events"


async def first_event(proxy: RunningProxy, **headers: str) -> dict[str, object]:
    """Return what the first event tells."""
    async with proxy.session.get(proxy.url + EVENTS, headers=headers) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        line = await response.content.readline()
    return dict(json.loads(line.removeprefix(b"data: ")))


async def test_the_page_is_one_file_that_may_load_nothing_else(proxy: RunningProxy) -> None:
    """Its policy allows its own style and script by digest, and calls to the proxy itself."""
    async with proxy.session.get(proxy.url + "/") as response:
        text, policy = await response.text(), response.headers["Content-Security-Policy"]
        assert (response.status, response.content_type) == (200, "text/html")
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert policy.count("'sha256-") == len(re.findall(r"<(?:script|style)>", text)) == 2
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", text) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert " style=" not in text and "onclick" not in text


async def test_events_come_once_a_second_and_end_when_the_proxy_drains(proxy: RunningProxy) -> None:
    """A viewer must not hold up the end."""
    async with proxy.session.get(proxy.url + EVENTS) as response:
        await response.content.readuntil(b"\n\n")
        await response.content.readuntil(b"\n\n")
        proxy.state.draining = True
        async with asyncio.timeout(3):
            assert (await response.read()).endswith(b"event: end\ndata: {}\n\n")
    assert len(proxy.app[VIEWERS]) == 0


async def test_with_keys_the_page_is_open_and_the_events_need_an_admin(start_proxy: StartProxy) -> None:
    """The page holds no data and asks for the key itself."""
    keys = (Key("user", hash_token("sk-pp-user")), Key("boss", hash_token("sk-pp-boss"), admin=True))
    proxy = await start_proxy(keys=keys)
    async with proxy.session.get(proxy.url + "/") as response:
        assert response.status == 200
    for headers, status in (({}, 401), ({"Authorization": "Bearer sk-pp-user"}, 403)):
        async with proxy.session.get(proxy.url + EVENTS, headers=headers) as response:
            assert response.status == status
    assert (await first_event(proxy, Authorization="Bearer sk-pp-boss"))["profile"] == "balanced"


async def test_pages_of_other_origins_and_names_get_no_events(proxy: RunningProxy) -> None:
    """As for all internal routes."""
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "rebound.example"}):
        async with proxy.session.get(proxy.url + EVENTS, headers=headers) as response:
            assert response.status == 403


async def test_a_viewer_that_leaves_is_forgotten_and_too_many_are_refused(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:  # fmt: skip
    """Each costs a write a second."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        opened = [await session.get(proxy.url + EVENTS) for _ in range(MOST_VIEWERS)]
        async with session.get(proxy.url + EVENTS) as response:
            assert response.status == 503
        for each in opened:
            each.close()
    await eventually(lambda: not proxy.app[VIEWERS], 5)
