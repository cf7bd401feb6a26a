"""The WebSocket: the same chats as messages, over real sockets, with two client libraries."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType

from proxy.config import Key
from proxy.downstream.auth import hash_token
from proxy.downstream.websocket import MOST_WAITING, SOCKETS
from tests.bodies import eventually
from tests.conftest import RunningProxy, StartProxy
from tests.fake_replies import Raw, Reply, content_event, json_error
from tests.fake_vllm import FakeVllm

Socket = aiohttp.ClientWebSocketResponse
Open = Callable[..., Awaitable[Socket]]
TOKEN = "sk-pp-websocket"


@pytest.fixture
async def connect() -> AsyncIterator[Open]:
    """Open a socket to a proxy: `await connect(proxy, Origin=...)`."""
    async with AsyncExitStack() as stack:

        async def opened(proxy: RunningProxy, **headers: str) -> Socket:
            fields = {name.replace("_", "-"): value for name, value in headers.items()}
            return await stack.enter_async_context(
                proxy.session.ws_connect(f"{proxy.url}/v1/chat/completions", headers=fields)
            )

        yield opened


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """Return a streamed chat request."""
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "stream": True, **fields}


async def answer(socket: Socket) -> list[Any]:
    """Read the messages of one answer, without `[DONE]`."""
    found: list[Any] = []
    while (data := await socket.receive_str(timeout=5)) != "[DONE]":
        found.append(json.loads(data))
    return found


def text_in(events: list[Any]) -> str:
    """Return what an answer says."""
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


async def refusal(proxy: RunningProxy, **headers: str) -> tuple[int, Mapping[str, Any]]:
    """Return status and error of a handshake that is refused."""
    fields = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    fields |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    async with proxy.session.get(f"{proxy.url}/v1/chat/completions", headers=fields) as response:
        return response.status, (await response.json())["error"]


async def test_the_events_of_a_stream_come_as_messages_and_done_ends_them(
    proxy: RunningProxy, fake_vllm: FakeVllm, connect: Open
) -> None:
    """One message an event, exactly vLLM's data; the usage event that the proxy asked for is taken out here too."""
    fake_vllm.default = Reply("One two three.")
    socket = await connect(proxy)
    await socket.send_json(body())
    events = await answer(socket)
    assert text_in(events) == "One two three."
    assert [event["object"] for event in events] == ["chat.completion.chunk"] * len(events)
    assert [event for event in events if not event["choices"]] == []
    await socket.send_json(body(stream_options={"include_usage": True}))
    assert (await answer(socket))[-1]["usage"]["completion_tokens"] > 0


async def test_requests_go_one_after_another_and_are_rewritten_as_posts_are(
    proxy: RunningProxy, fake_vllm: FakeVllm, connect: Open
) -> None:
    """The second turn of a chat finds what the first left in the cache, clock or not."""
    socket = await connect(proxy, X_OpenWebUI_User_Id="u", X_OpenWebUI_Chat_Id="c")
    told: list[dict[str, str]] = []
    for second in range(3):
        told.append({"role": "user", "content": f"question {second} " * 30})
        head = {"role": "system", "content": f"You help. Now: 2026-01-02 10:00:{second:02} UTC. Rules: be brief."}
        await socket.send_json({**body(), "messages": [head, *told]})
        assert text_in(await answer(socket)) == "All right."
        told.append({"role": "assistant", "content": "All right."})
    hits = [seen.hit for seen in fake_vllm.of("/v1/chat/completions")]
    assert hits[-1] > hits[-2] > 0
    assert proxy.sample("proxy_requests_total", route="/v1/chat/completions", status="200", outcome="completed") == 3
    assert proxy.sample("proxy_trail_steps_total", step="move_volatile") >= 1


async def test_a_plain_answer_and_an_error_are_one_message_each(
    proxy: RunningProxy, fake_vllm: FakeVllm, connect: Open
) -> None:
    """Ours, vLLM's, and one in the middle of a stream; the socket serves on after each."""
    socket = await connect(proxy)
    await socket.send_json(body(stream=False))
    [plain] = await answer(socket)
    assert plain["choices"][0]["message"]["content"] == "All right."
    for sent in ("no json", "[1]", json.dumps({"messages": []}), json.dumps(body(max_tokens=-1))):
        await socket.send_str(sent)
        [event] = await answer(socket)
        assert event["error"]["type"] == "invalid_request_error"
    error = {"error": {"message": "broken", "type": "InternalServerError", "param": None, "code": 500}}
    fake_vllm.replies.append(json_error(500, error))
    await socket.send_json(body())
    assert await answer(socket) == [error]
    fake_vllm.replies.append(Raw(body=[content_event("half")], end="cut"))
    await socket.send_json(body())
    first, last = await answer(socket)
    assert first["choices"][0]["delta"]["content"] == "half"
    assert last["error"]["type"] == "server_error"
    await socket.send_json(body())
    assert text_in(await answer(socket)) == "All right."


async def test_closing_the_socket_stops_vllm_at_once(proxy: RunningProxy, fake_vllm: FakeVllm, connect: Open) -> None:
    """Within 0.2 s: before headers, before the first token, in the stream, and for a plain answer."""
    for gate, fields in ((("headers"), {}), (0, {}), (1, {}), (0, {"stream": False})):
        fake_vllm.replies.append(Reply("a b c", gates={gate: asyncio.Event()}))  # type: ignore[dict-item]  # a gate
        socket = await connect(proxy)
        seen_before = len(fake_vllm.generations)
        await socket.send_json(body(str(gate), **fields))
        seen = await fake_vllm.wait_for(seen_before + 1)
        if gate == 1:
            await socket.receive_str(timeout=5)
        async with asyncio.timeout(0.2):
            await socket.close()
            await seen.closed.wait()
        assert seen.aborted_at is not None
    await eventually(lambda: proxy.sample("proxy_requests_in_flight") == 0)
    assert proxy.sample("proxy_requests_total", outcome="client_disconnect", route="/v1/chat/completions") == 4


async def test_a_connection_that_breaks_without_a_goodbye_stops_vllm_too(
    proxy: RunningProxy, fake_vllm: FakeVllm, connect: Open
) -> None:
    """The TCP connection closes; no frame says so."""
    fake_vllm.replies.append(Reply("a b c", gates={1: asyncio.Event()}))
    socket = await connect(proxy)
    await socket.send_json(body())
    seen = await fake_vllm.wait_for(1)
    await socket.receive_str(timeout=5)
    connection = socket._conn
    assert connection is not None and connection.transport is not None
    connection.transport.abort()
    async with asyncio.timeout(0.5):
        await seen.closed.wait()


async def test_pings_are_answered_while_an_answer_is_awaited(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:  # fmt: skip
    """So that neither side takes the other for dead during a long prefill."""
    begun = asyncio.Event()
    fake_vllm.replies.append(Reply(gates={0: begun}))
    async with proxy.session.ws_connect(f"{proxy.url}/v1/chat/completions", autoping=False) as socket:
        await socket.send_json(body())
        await fake_vllm.wait_for(1)
        await socket.ping(b"there?")
        message = await socket.receive(timeout=5)
        assert (message.type, bytes(message.data)) == (WSMsgType.PONG, b"there?")
        begun.set()
        assert text_in(await answer(socket)) == "All right."


async def test_requests_sent_ahead_wait_in_order_and_too_many_close_the_socket(
    proxy: RunningProxy, fake_vllm: FakeVllm, connect: Open
) -> None:
    """Four may wait; 1008 for more, and what ran is stopped."""
    begun = asyncio.Event()
    fake_vllm.reply_to = lambda sent: Reply(f"to {sent['messages'][-1]['content']}", gates={0: begun})
    socket = await connect(proxy)
    for number in range(1 + MOST_WAITING):
        await socket.send_json(body(f"n{number}"))
        await fake_vllm.wait_for(1)
    begun.set()
    assert [text_in(await answer(socket)) for _ in range(1 + MOST_WAITING)] == [f"to n{n}" for n in range(5)]
    fake_vllm.reply_to = lambda sent: Reply(gates={0: asyncio.Event()})
    for number in range(2 + MOST_WAITING):
        await socket.send_json(body(f"m{number}"))
        await fake_vllm.wait_for(6)
    assert (await socket.receive(timeout=5)).type is WSMsgType.CLOSE
    assert socket.close_code == 1008
    await eventually(lambda: fake_vllm.live == 0)


async def test_what_is_too_large_or_no_text_closes_the_socket(start_proxy: StartProxy, connect: Open) -> None:
    """1009 and 1003; the limit is that of bodies."""
    proxy = await start_proxy(limits__body_bytes=2048)
    large = await connect(proxy)
    await large.send_str("x" * 4000)
    await large.receive(timeout=5)
    assert large.close_code == 1009
    binary = await connect(proxy)
    await binary.send_bytes(b"{}")
    await binary.receive(timeout=5)
    assert binary.close_code == 1003


async def test_pages_of_other_origins_and_names_are_refused(start_proxy: StartProxy, connect: Open) -> None:
    """No preflight asks before a WebSocket; `cors.origins` names who may."""
    proxy = await start_proxy(cors__origins=("https://chat.example",))
    assert (await refusal(proxy, Origin="https://evil.example"))[0] == 403
    assert (await refusal(proxy, Origin="null"))[0] == 403
    assert (await refusal(proxy, Host="rebound.example"))[0] == 403
    assert (await refusal(proxy, Host="rebound.example", Origin="https://chat.example"))[0] == 403
    for origin in (proxy.url, "https://chat.example"):
        socket = await connect(proxy, Origin=origin)
        await socket.send_json(body())
        assert text_in(await answer(socket)) == "All right."


async def test_keys_hold_and_a_page_may_give_its_own_as_a_subprotocol(start_proxy: StartProxy) -> None:
    """As OpenAI's clients do it; what was offered stands in no log."""
    proxy = await start_proxy(keys=(Key("page", hash_token(TOKEN)),))
    assert (await refusal(proxy))[0] == 401
    assert (await refusal(proxy, Sec_WebSocket_Protocol="prefix-proxy, openai-insecure-api-key.wrong"))[0] == 401
    url, key = f"{proxy.url}/v1/chat/completions", f"openai-insecure-api-key.{TOKEN}"
    async with proxy.session.ws_connect(url, protocols=("prefix-proxy", key)) as socket:
        assert socket.protocol == "prefix-proxy"
        await socket.send_json(body())
        assert text_in(await answer(socket)) == "All right."
    async with proxy.session.ws_connect(url, headers={"Authorization": f"Bearer {TOKEN}"}) as socket:
        await socket.send_json(body())
        assert text_in(await answer(socket)) == "All right."


async def test_an_unknown_subprotocol_is_refused_without_being_logged(
    proxy: RunningProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp alone would write the whole offer into its log, and it may hold a key."""
    status, error = await refusal(proxy, Sec_WebSocket_Protocol=f"openai-insecure-api-key.{TOKEN}")
    assert (status, error["code"]) == (400, "bad_request")
    assert TOKEN not in caplog.text


async def test_a_get_that_is_no_handshake_is_told_to_post(proxy: RunningProxy) -> None:
    """405 as before there was a WebSocket; 400 for a broken handshake."""
    async with proxy.session.get(f"{proxy.url}/v1/chat/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
    assert (await refusal(proxy, Sec_WebSocket_Version="1"))[0] == 400


async def test_a_stopping_proxy_lets_an_answer_end_and_closes_the_idle_sockets(
    proxy: RunningProxy, fake_vllm: FakeVllm, connect: Open
) -> None:
    """1001: who waits goes at once, who is answered after that."""
    begun = asyncio.Event()
    fake_vllm.replies.append(Reply(gates={0: begun}))
    idle, busy = await connect(proxy), await connect(proxy)
    await busy.send_json(body())
    await fake_vllm.wait_for(1)
    proxy.state.draining = True
    proxy.app[SOCKETS].release()
    assert (await idle.receive(timeout=5)).type is WSMsgType.CLOSE
    begun.set()
    assert text_in(await answer(busy)) == "All right."
    await busy.receive(timeout=5)
    assert (idle.close_code, busy.close_code) == (1001, 1001)


async def test_rates_hold_for_messages_too(start_proxy: StartProxy, connect: Open) -> None:
    """Each message is a request of its key."""
    proxy = await start_proxy(keys=(Key("few", hash_token(TOKEN), requests_per_minute=2),))
    socket = await connect(proxy, Authorization=f"Bearer {TOKEN}")
    told = []
    for _ in range(3):
        await socket.send_json(body())
        told.append(await answer(socket))
    assert [text_in(each) for each in told[:2]] == ["All right."] * 2
    assert told[2][0]["error"]["code"] == "rate_limit_exceeded"


async def test_another_client_library_speaks_with_it(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The library `websockets`, which shares no code with the server."""
    websockets = pytest.importorskip("websockets.asyncio.client")
    async with websockets.connect(f"ws://127.0.0.1:{proxy.port}/v1/chat/completions") as socket:
        for _ in range(2):
            await socket.send(json.dumps(body()))
            events = []
            while (data := await asyncio.wait_for(socket.recv(), 5)) != "[DONE]":
                events.append(json.loads(data))
            assert text_in(events) == "All right."
        await (await socket.ping())
