"""When the client goes, vLLM stops: within 0.2 seconds, in every phase, however the client goes."""

import asyncio
import json
import logging
from typing import Any, Literal

import pytest

from tests.bodies import chat, data_of, eventually, stream
from tests.conftest import RawClient, RawConnect, RunningProxy, StartProxy
from tests.fake_faults import Seen
from tests.fake_replies import JSON_TYPE, Hang, Raw, Reply, content_event
from tests.fake_vllm import FakeVllm

LIMIT_SECONDS = 0.2
How = Literal["fin", "reset"]
# Both, since the relay must not depend on aiohttp telling its handlers that the client has gone.
HANDLER_CANCELLATION = pytest.mark.parametrize("cancels", [True, False], ids=["cancelling", "not-cancelling"])
WAYS = pytest.mark.parametrize("how", ["fin", "reset"])


async def leave(client: RawClient, how: How) -> float:
    """Close the client's connection; return the loop's time of that."""
    await (client.leave() if how == "fin" else client.reset())
    return asyncio.get_running_loop().time()


async def assert_stopped(proxy: RunningProxy, seen: Seen, left_at: float, phase: str) -> None:
    """vLLM saw its connection close in time; the exchange is counted once, as the client's departure, and is over."""
    await eventually(seen.closed.is_set)
    await eventually(lambda: not proxy.sample("proxy_requests_in_flight"))
    assert seen.aborted_at is not None
    assert seen.aborted_at - left_at < LIMIT_SECONDS
    assert proxy.sample("proxy_requests_total", outcome="client_disconnect") == 1
    assert proxy.sample("proxy_requests_total") == 1
    assert proxy.sample("proxy_aborts_total", phase=phase) == 1
    assert proxy.sample("proxy_aborts_total") == 1


def encoded(**fields: Any) -> bytes:
    """Return the bytes of a chat request."""
    return json.dumps(chat(**fields)).encode()


@HANDLER_CANCELLATION
@WAYS
@pytest.mark.parametrize("usage", [True, False])
async def test_the_stop_button_stops_vllm(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, how: How, cancels: bool, usage: bool
) -> None:
    """The client leaves after 5 of 100 events: fewer than 15 are made (CN-01)."""
    proxy = await start_proxy(handler_cancellation=cancels)
    fake_vllm.default = Reply(pieces=[f"<{k}>" for k in range(100)], gap_seconds=0.03)
    client = await raw_connect(proxy.port)
    await client.post(json.dumps(stream(usage=usage)).encode())
    await client.until(b"<4>")
    left_at = await leave(client, how)
    seen = fake_vllm.generations[0]
    await assert_stopped(proxy, seen, left_at, "stream")
    assert seen.generated < 15
    assert fake_vllm.live == 0


@HANDLER_CANCELLATION
@WAYS
async def test_a_stream_in_which_nothing_comes_is_stopped_too(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, how: How, cancels: bool
) -> None:
    """vLLM is silent after the second piece, so no write would fail: the departure itself is noticed (CN-01)."""
    proxy = await start_proxy(handler_cancellation=cancels)
    fake_vllm.default = Reply(pieces=["<0>", "<1>", "<2>"], gates={2: asyncio.Event()})
    client = await raw_connect(proxy.port)
    await client.post(encoded(stream=True))
    await client.until(b"<1>")
    await assert_stopped(proxy, fake_vllm.generations[0], await leave(client, how), "stream")


@HANDLER_CANCELLATION
@WAYS
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "plain"])
async def test_leaving_before_headers_stops_vllm(
    start_proxy: StartProxy,
    fake_vllm: FakeVllm,
    raw_connect: RawConnect,
    how: How,
    cancels: bool,
    streamed: bool,
) -> None:
    """vLLM has answered nothing yet, streamed or not (CN-02, CN-03)."""
    proxy = await start_proxy(handler_cancellation=cancels)
    fake_vllm.default = Reply(gates={"headers": asyncio.Event()})
    client = await raw_connect(proxy.port)
    await client.post(encoded(stream=streamed))
    seen = await fake_vllm.wait_for(1)
    await assert_stopped(proxy, seen, await leave(client, how), "before_headers" if streamed else "plain")


@HANDLER_CANCELLATION
@WAYS
async def test_leaving_while_vllm_prefills_stops_it(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, how: How, cancels: bool
) -> None:
    """The headers are there, the first token is not (CN-02)."""
    proxy = await start_proxy(handler_cancellation=cancels)
    fake_vllm.default = Reply(gates={0: asyncio.Event()})
    client = await raw_connect(proxy.port)
    await client.post(encoded(stream=True))
    await client.head()
    await assert_stopped(proxy, fake_vllm.generations[0], await leave(client, how), "prefill")


@HANDLER_CANCELLATION
@WAYS
async def test_leaving_in_the_middle_of_a_plain_body_stops_vllm(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, how: How, cancels: bool
) -> None:
    """The headers and half of the body have come from vLLM (CN-03)."""
    proxy = await start_proxy(handler_cancellation=cancels)
    sent = asyncio.Event()
    fake_vllm.replies.append(Raw(body=[b'{"id":', sent], headers=JSON_TYPE, end="hang"))
    sent.set()
    client = await raw_connect(proxy.port)
    await client.post(encoded())
    seen = await fake_vllm.wait_for(1)
    await asyncio.sleep(0.05)  # so that the half body has arrived; also without that the exchange must end
    await assert_stopped(proxy, seen, await leave(client, how), "plain")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/tokenize", "/v1/messages"])
async def test_leaving_a_passed_through_request_stops_it(
    proxy: RunningProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, path: str
) -> None:
    """The other routes cost vLLM's time too."""
    fake_vllm.answers[path] = Hang()
    client = await raw_connect(proxy.port)
    await client.post(b'{"model":"fake","input":"x","prompt":"x","messages":[]}', path)
    await eventually(lambda: fake_vllm.of(path))
    left_at = await leave(client, "fin")
    await eventually(fake_vllm.of(path)[0].closed.is_set)
    aborted_at = fake_vllm.of(path)[0].aborted_at
    assert aborted_at is not None
    assert aborted_at - left_at < LIMIT_SECONDS


@WAYS
@pytest.mark.parametrize("when", ["before-headers", "between-writes", "before-the-end"])
async def test_a_departure_is_no_error_in_the_log(
    proxy: RunningProxy,
    fake_vllm: FakeVllm,
    raw_connect: RawConnect,
    caplog: pytest.LogCaptureFixture,
    how: How,
    when: str,
) -> None:
    """No traceback, nothing at error level, no 5xx counted, whenever the client goes (CN-05)."""
    gate = asyncio.Event()
    gates: dict[str, Any] = {"before-headers": "headers", "between-writes": 1, "before-the-end": "end"}
    fake_vllm.default = Reply(pieces=["<0>", "<1>"], gates={gates[when]: gate})
    client = await raw_connect(proxy.port)
    await client.post(encoded(stream=True))
    seen = await fake_vllm.wait_for(1)
    if when != "before-headers":
        await client.until(b"<0>" if when == "between-writes" else b"<1>")
    await leave(client, how)
    gate.set()  # vLLM goes on at the same moment, so that the proxy may be writing
    await eventually(seen.closed.is_set)
    await eventually(lambda: not proxy.sample("proxy_requests_in_flight"))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    statuses = [name for name in proxy.samples() if name.startswith("proxy_requests_total") and "('status', '5" in name]
    assert statuses == []


async def test_a_departure_between_two_requests_of_one_connection_is_nothing(
    proxy: RunningProxy, raw_connect: RawConnect, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing an idle connection is how clients say goodbye: nothing is counted as aborted."""
    client = await raw_connect(proxy.port)
    await client.post(encoded(stream=True))
    await client.until(b"data: [DONE]\n\n")
    await client.until(b"0\r\n\r\n")
    await client.leave()
    await eventually(lambda: not proxy.sample("proxy_requests_in_flight"))
    assert proxy.sample("proxy_aborts_total") == 0
    assert proxy.sample("proxy_requests_total", outcome="completed") == 1
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_one_of_several_equal_askers_leaves(
    proxy: RunningProxy, fake_vllm: FakeVllm, raw_connect: RawConnect
) -> None:
    """The others get their whole stream from its start; when the last has left, vLLM is free in a second (CN-07)."""
    gate = asyncio.Event()
    fake_vllm.default = Reply(pieces=["<0>", "<1>", "<2>"], gates={1: gate})
    body = encoded(stream=True, temperature=0)
    leader, follower = await raw_connect(proxy.port), await raw_connect(proxy.port)
    await leader.post(body)
    await leader.until(b"<0>")
    await follower.post(body)
    await leader.leave()
    late = await raw_connect(proxy.port)
    await late.post(body)
    beginning = await late.until(b"<0>")
    assert beginning.count(b"data: ") <= 2
    await late.leave()
    gate.set()
    whole = await follower.until(b"data: [DONE]\n\n")
    texts = [data["choices"][0]["delta"].get("content") for data in data_of(whole) if data != "[DONE]"]
    assert [text for text in texts if text] == ["<0>", "<1>", "<2>"]
    await eventually(lambda: not fake_vllm.live, within_seconds=1)


async def test_an_aborted_stream_costs_the_next_request_nothing(
    proxy: RunningProxy, fake_vllm: FakeVllm, raw_connect: RawConnect
) -> None:
    """After fifty departures the proxy serves, and nothing is left behind."""
    fake_vllm.reply_to = lambda body: Raw(body=[content_event("x")], end="hang") if body.get("stream") else None
    for _ in range(50):
        client = await raw_connect(proxy.port)
        await client.post(encoded(stream=True))
        await client.until(b"\n\n")
        await client.leave()
    await eventually(lambda: not fake_vllm.live and not proxy.sample("proxy_requests_in_flight"))
    async with proxy.post(chat()) as response:
        assert response.status == 200
    assert proxy.sample("proxy_aborts_total") == 50
