"""Noticing that a client has gone, and ending what is in flight."""

import asyncio
import json

from tests.conftest import RawConnect, RunningProxy, StartProxy
from tests.fake_replies import Hang, Reply
from tests.fake_vllm import FakeVllm

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi."}]}


async def test_the_end_of_a_drain_is_told_in_running_streams(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """What came stays, then an error event and [DONE]: never a bare cut."""
    fake_vllm.default = Reply(pieces=["<0>", "<1>"], gates={1: asyncio.Event()})
    async with proxy.post({**CHAT, "stream": True}) as response:
        text = await response.content.readuntil(b"<0>")
        assert proxy.state.presence.end_all() == 1
        text += await response.content.read()
    events = text.decode().split("\n\n")
    error = json.loads(events[-3].removeprefix("data: "))["error"]
    assert (error["type"], error["code"], events[-2:]) == ("server_error", 503, ["data: [DONE]", ""])
    assert proxy.sample("proxy_requests_total", outcome="drained") == 1
    assert proxy.sample("proxy_aborts_total") == 0
    await asyncio.wait_for(fake_vllm.generations[0].closed.wait(), 1)
    assert fake_vllm.generations[0].aborted_at is not None


async def test_the_end_of_a_drain_is_a_503_where_nothing_was_answered(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Streamed or not."""
    fake_vllm.reply_to = lambda _: Hang()
    for number, stream in enumerate((True, False), 1):
        asking = asyncio.get_running_loop().create_task(_status(proxy, stream))
        await fake_vllm.wait_for(number)
        proxy.state.presence.end_all()
        assert await asking == (503, "server_error", True)
    assert proxy.sample("proxy_requests_total", outcome="drained") == 2


async def _status(proxy: RunningProxy, stream: bool) -> tuple[int, str, bool]:
    async with proxy.post({**CHAT, "stream": stream}) as response:
        return response.status, (await response.json())["error"]["type"], "Retry-After" in response.headers


async def test_nothing_is_watched_once_all_have_ended(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Also after an exchange whose client went."""
    fake_vllm.default = Reply()
    async with proxy.post(CHAT) as response:
        await response.read()
    assert len(proxy.state.presence) == 0


async def test_half_closing_counts_as_leaving(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect
) -> None:
    """As it does for vLLM."""
    proxy = await start_proxy(handler_cancellation=False)
    fake_vllm.reply_to = lambda _: Hang()
    client = await raw_connect(proxy.port)
    await client.post(json.dumps(CHAT).encode())
    seen = await fake_vllm.wait_for(1)
    client.writer.write_eof()
    await asyncio.wait_for(seen.closed.wait(), 0.2)
    assert proxy.sample("proxy_aborts_total", phase="plain") == 1
