"""Requests of one user who is known, as the tests of coalescing send them."""

import asyncio
import json
from typing import Any

from tests.bodies import data_of
from tests.conftest import RawClient, RunningProxy
from tests.fake_faults import Seen
from tests.fake_replies import JSON_TYPE, Raw
from tests.fake_vllm import FakeVllm

CHATS = "/v1/chat/completions"


def who(user: str = "u1", **headers: str) -> dict[str, str]:
    """Return the headers of a user: `chat`, `message`, `task` by these names, others as they are."""
    names = {"chat": "X_OpenWebUI_Chat_Id", "message": "X_OpenWebUI_Message_Id", "task": "X_OpenWebUI_Task"}
    return {"X_OpenWebUI_User_Id": user, **{names.get(name, name): value for name, value in headers.items()}}


def lines(**headers: str) -> str:
    """Return the same as header lines of a raw request."""
    return "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in who(**headers).items())


def runs(fake: FakeVllm) -> list[Seen]:
    """Return the chat requests that reached vLLM (the proxy's own probe is another route)."""
    return fake.of(CHATS)


async def arrived(fake: FakeVllm, count: int) -> Seen:
    """Wait until so many of them have; return the last."""
    async with asyncio.timeout(5):
        while len(runs(fake)) < count or not runs(fake)[count - 1].raw:  # noqa: ASYNC110  a number, not an event
            await asyncio.sleep(0.002)
    return runs(fake)[count - 1]


async def answer(proxy: RunningProxy, body: dict[str, Any], **headers: str) -> tuple[int, bytes]:
    """Return status and bytes of an answer."""
    async with proxy.post(body, **headers) as response:
        return response.status, await response.read()


async def ask(client: RawClient, body: dict[str, Any], **headers: str) -> None:
    """Send `body` of a user on a raw socket."""
    await client.post(json.dumps(body).encode(), head=lines(**headers))


def texts(stream: bytes) -> list[str]:
    """Return the contents in a stream of events."""
    events = [data for data in data_of(stream) if data != "[DONE]"]
    return [c["delta"]["content"] for e in events for c in e.get("choices", ()) if c["delta"].get("content")]


def sharing(proxy: RunningProxy) -> int:
    """Return how many clients are on flights now."""
    return proxy.state.flights.table.members


def up_to_date(proxy: RunningProxy) -> int:
    """Return how many clients have all that there is of an answer that has begun."""
    return sum(len(flight.live) for flight in proxy.state.flights.table if flight.replay.end)


def refuse_probe(fake: FakeVllm) -> None:
    """Keep the proxy's own probe from using up what is scripted."""
    fake.answers["/v1/completions"] = Raw([b"{}"], status=400, headers=JSON_TYPE, framing="length")
