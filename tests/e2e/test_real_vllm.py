"""The proxy before a real vLLM: its prefix cache is used, its requests are stopped, its restarts survived."""

import asyncio
import json
import time
from typing import Any

import pytest

from proxy.demo import chat, server
from tests.conftest import RawConnect
from tests.e2e.conftest import Gauges, StartProxyBefore, until

# The first test also makes the environment and starts vLLM: minutes, on a machine that has neither.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODEL = "smollm2"
GONE_SECONDS = 1.0
LONG_PROMPT = (
    "The quick brown fox jumps over the lazy dog near the river bank. " * 400
)  # 5,600 tokens: seconds of prefill


def body(text: str = "Write a long story about a ship.", **fields: Any) -> dict[str, Any]:
    """Return a request for an answer that does not end by itself."""
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": 600, "ignore_eos": True, "temperature": 0} | fields


def events(raw: bytes) -> list[dict[str, Any]]:
    """Return the objects of a stream, which must end with [DONE]."""
    data = [line[6:] for line in raw.splitlines() if line.startswith(b"data: ")]
    assert data[-1] == b"[DONE]"
    return [json.loads(line) for line in data[:-1]]


@pytest.mark.parametrize("headers", [{"X-OpenWebUI-Chat-Id": "a-chat-of-this-test"}, {}], ids=["header", "content"])
async def test_a_clock_in_the_system_prompt_costs_nothing(
    start_proxy_before: StartProxyBefore, headers: dict[str, str]
) -> None:
    """
    Each of turns 2 to 6 takes at least 85 % of its prompt from vLLM's cache, the chat known by header or by content.
    """
    proxy = await start_proxy_before()
    turns = await asyncio.to_thread(chat.play, chat.Line(f"{proxy.url}/v1", MODEL, headers, {}))
    assert [f"{turn.cached_share:.2f}" for turn in turns[1:] if turn.cached_share < 0.85] == []
    assert len(turns) == 6


async def test_without_the_proxy_the_same_chat_is_computed_again_each_turn(vllm: server.Child) -> None:
    """
    The control of the test above: straight to vLLM under 10 % comes from the cache.
    """
    line = chat.Line(f"{vllm.url}/v1", MODEL, {}, {"cache_salt": "straight"})
    turns = await asyncio.to_thread(chat.play, line)
    assert [f"{turn.cached_share:.2f}" for turn in turns[1:] if turn.cached_share >= 0.10] == []


async def test_stop_in_mid_stream_frees_vllm(
    start_proxy_before: StartProxyBefore, raw_connect: RawConnect, gauges: Gauges
) -> None:
    """
    When the client leaves a running stream vLLM stops generating within a second.
    """
    proxy = await start_proxy_before()
    client = await raw_connect(proxy.port)
    await client.post(json.dumps(body(stream=True)).encode())
    for _ in range(4):
        await client.until(b"data: ")
    await until(gauges.running, 1, seconds=5)
    await client.leave()
    await until(gauges.running, 0, seconds=GONE_SECONDS)
    assert await gauges.load() == 0
    assert proxy.sample("proxy_aborts_total", phase="stream") == 1


async def test_stop_during_prefill_frees_vllm(
    start_proxy_before: StartProxyBefore, raw_connect: RawConnect, gauges: Gauges
) -> None:
    """
    When the client leaves before the first token vLLM drops the request after the step that it is in.
    """
    proxy = await start_proxy_before()
    generated = await gauges.read("vllm:generation_tokens_total")
    client = await raw_connect(proxy.port)
    await client.post(json.dumps(body(f"First of two stories. {LONG_PROMPT}", stream=True)).encode())
    await client.head()
    await until(gauges.running, 1, seconds=10)
    await client.leave()
    await until(gauges.load, 0, seconds=GONE_SECONDS)
    await until(gauges.running, 0, seconds=3)
    assert await gauges.read("vllm:generation_tokens_total") == generated
    assert proxy.sample("proxy_aborts_total", phase="prefill") == 1


async def test_stop_of_a_plain_request_frees_vllm(
    start_proxy_before: StartProxyBefore, raw_connect: RawConnect, gauges: Gauges
) -> None:
    """
    A client that leaves while it waits for a plain JSON answer stops vLLM as one that leaves a stream.
    """
    proxy = await start_proxy_before()
    client = await raw_connect(proxy.port)
    await client.post(json.dumps(body(stream=False)).encode())
    await until(gauges.running, 1, seconds=10)
    await client.leave()
    await until(gauges.running, 0, seconds=GONE_SECONDS)
    assert await gauges.load() == 0


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"top_p": 7}, 400), ({"model": "nobody"}, 404), ({"n": 2}, 400)],
    ids=["top_p", "model", "n"],
)
async def test_an_error_of_vllm_reaches_the_client_as_vllm_says_it(
    start_proxy_before: StartProxyBefore, vllm: server.Child, fields: dict[str, Any], status: int
) -> None:
    """
    Status and body of a refusal are the same with and without the proxy.
    """
    proxy = await start_proxy_before()
    async with proxy.session.post(f"{vllm.url}/v1/chat/completions", json=body(**fields)) as straight:
        wanted = await straight.json()
    async with proxy.post(body(**fields)) as proxied:
        assert (proxied.status, straight.status) == (status, status)
        assert await proxied.json() == wanted


async def test_a_chat_with_tools_is_answered(start_proxy_before: StartProxyBefore) -> None:
    """
    Open WebUI sends its own tools with every chat; the vLLM of the demo takes them, whatever its model does.
    """
    proxy = await start_proxy_before()
    function = {"name": "get_time", "description": "Tell the time.", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    async with proxy.post(body("What is the capital of France?", stream=True, max_tokens=8, tools=tools)) as response:
        assert response.status == 200
        seen = events(await response.read())
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in seen)


async def test_usage_is_asked_for_and_taken_out_again(start_proxy_before: StartProxyBefore) -> None:
    """
    A client that did not ask for usage sees none, although the proxy knows the tokens from it.
    """
    proxy = await start_proxy_before()
    async with proxy.post(body(stream=True, max_tokens=4)) as response:
        seen = events(await response.read())
    assert [event for event in seen if event.get("usage") or not event["choices"]] == []
    assert proxy.sample("proxy_prompt_tokens_total") > 20
    assert proxy.sample("proxy_generated_tokens_total") == 4


async def test_usage_that_the_client_asked_for_reaches_it(start_proxy_before: StartProxyBefore) -> None:
    """
    With include_usage the last event is vLLM's usage, with its cached tokens.
    """
    proxy = await start_proxy_before()
    async with proxy.post(body(stream=True, max_tokens=4, stream_options={"include_usage": True})) as response:
        last = events(await response.read())[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert "cached_tokens" in last["usage"]["prompt_tokens_details"]


async def test_a_stream_survives_a_long_prefill_on_keepalive_comments(
    start_proxy_before: StartProxyBefore, raw_connect: RawConnect
) -> None:
    """
    While vLLM prefills for seconds a comment comes every half second, and then the whole answer.
    """
    proxy = await start_proxy_before(relay__keepalive_seconds=0.5)
    client = await raw_connect(proxy.port)
    begun = time.monotonic()
    text = f"Second of two stories. {LONG_PROMPT}"
    await client.post(json.dumps(body(text, stream=True, max_tokens=4)).encode(), head="Connection: close\r\n")
    await client.head()
    silence = await client.until(b"data: ")
    waited = time.monotonic() - begun
    rest = b"data: " + await client.rest()
    assert waited > 2, "the prompt is too short for this machine"
    # One may fall short: the first counts from vLLM's headers on, not from the request.
    assert silence.count(b": keep-alive\n") >= int(waited / 0.5) - 2
    assert b"[DONE]" in rest
    assert rest.count(b'"delta":') >= 4


async def test_a_restart_of_vllm_is_survived(start_proxy_before: StartProxyBefore, vllm: server.Child) -> None:
    """
    While vLLM is away the models are still listed and a chat gets a 503; when it is back the chat works again.
    """
    proxy = await start_proxy_before()
    async with proxy.post(body(max_tokens=1)) as response:
        assert response.status == 200
    async with proxy.session.get(f"{proxy.url}/v1/models") as response:
        before = await response.json()
    await asyncio.to_thread(vllm.stop)
    try:
        async with proxy.session.get(f"{proxy.url}/v1/models") as response:
            assert (response.status, await response.json()) == (200, before)
        async with proxy.post(body(max_tokens=1)) as response:
            assert response.status == 503
            assert (await response.json())["error"]["message"]
        async with proxy.session.get(f"{proxy.url}/ready") as response:
            assert response.status == 503
    finally:
        await asyncio.to_thread(vllm.start)
        await asyncio.to_thread(vllm.wait_ready)
    async with proxy.post(body(max_tokens=1)) as response:
        assert response.status == 200
