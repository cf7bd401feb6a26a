"""Comments in a silent stream, over a real socket."""

import asyncio

from aiohttp import ClientSession, web

from proxy.aio import Tasks
from proxy.core.sse import KEEP_ALIVE, EventGate
from proxy.downstream.keepalive import KeepAlive

EVENT = b"data: {}\n\n"


async def streamed(seconds: float, script: list[bytes | float]) -> bytes:
    """Return what a client gets of a stream that writes the bytes and sleeps the numbers of `script`."""
    tasks = Tasks()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        gate = EventGate()
        pulse = KeepAlive(response, gate, tasks, seconds)
        pulse.start()
        for each in script:
            if isinstance(each, float):
                await asyncio.sleep(each)
                continue
            await response.write(gate.feed(each))
            pulse.last = asyncio.get_running_loop().time()
        pulse.stop()
        await response.write(gate.close())
        return response

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as answer:
            return await answer.read()
    finally:
        await runner.cleanup()
        await tasks.close()


async def test_silence_brings_comments_before_and_between_events() -> None:
    """One line feed each, so that no SDK reads an empty event."""
    got = await streamed(0.03, [0.05, EVENT, 0.05, EVENT])
    assert got.replace(KEEP_ALIVE, b"") == EVENT * 2
    first, second, _ = got.split(EVENT)
    assert first.startswith(KEEP_ALIVE) and second.startswith(KEEP_ALIVE)


async def test_silence_within_an_event_brings_none() -> None:
    """The rest of the event has to come first."""
    assert await streamed(0.02, [EVENT[:4], 0.06, EVENT[4:]]) == EVENT


async def test_events_in_time_bring_none() -> None:
    """Time counts from the last event, not from the last comment."""
    assert await streamed(0.2, [EVENT, 0.01] * 30) == EVENT * 30


async def test_zero_turns_it_off() -> None:
    """For those who have a reason."""
    assert await streamed(0, [EVENT, 0.03, EVENT]) == EVENT * 2
