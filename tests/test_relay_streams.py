"""Streams are relayed byte for byte, whatever vLLM sends and however the network cuts it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from proxy.config import Config
from tests.bodies import OK, chat, data_of, stream
from tests.conftest import RawConnect, RunningProxy, StartProxy, StartVllm
from tests.fake_replies import DONE, JSON_TYPE, Drop, Piece, Raw, Reply, content_event, event
from tests.fake_vllm import FakeVllm

TEXT = (
    'data: {"id":"x","choices":[{"index":0,"delta":{"content":"你好 🧠"},"finish_reason":null}]}\n\n'
    'data: {"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    "data: [DONE]\n\n"
).encode()
KEEPALIVE = b": keep-alive\n"
COUNTS = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
USAGE = event({"choices": [], "usage": COUNTS})


async def relayed(
    proxy: RunningProxy, fake: FakeVllm, pieces: Sequence[Piece], body: dict[str, Any] | None = None
) -> bytes:
    """Let vLLM answer with `pieces`, each its own chunk; return what the client gets."""
    fake.replies.append(Raw(body=pieces))
    async with proxy.post(body or stream()) as response:
        assert response.status == 200
        return await response.read()


def ways_to_cut(data: bytes) -> list[list[Piece]]:
    """Return `data` in two pieces cut at every position, and in single bytes."""
    halves: list[list[Piece]] = [[data[:cut], data[cut:]] for cut in range(1, len(data))]
    return [*halves, [bytes([byte]) for byte in data]]


@pytest.mark.parametrize("usage", [True, False], ids=["usage-asked", "usage-not-asked"])
async def test_any_split_of_the_stream_reaches_the_client_unchanged(
    proxy: RunningProxy, fake_vllm: FakeVllm, usage: bool
) -> None:
    """Cuts in an event, a line, `data:` or a character change no byte, with our usage filter and without (ST-01)."""
    for pieces in ways_to_cut(TEXT):
        assert await relayed(proxy, fake_vllm, pieces, stream(usage=usage)) == TEXT


@pytest.mark.parametrize("usage", [True, False])
async def test_a_character_cut_in_two_is_whole_again(proxy: RunningProxy, fake_vllm: FakeVllm, usage: bool) -> None:
    """No replacement character appears where a chunk ends inside one (ST-02)."""
    whole = content_event("北京") + DONE
    start = whole.index("北".encode())
    for inside in (1, 2):
        pieces = [whole[: start + inside], whole[start + inside :]]
        got = await relayed(proxy, fake_vllm, pieces, stream(usage=usage))
        assert got == whole
        assert "\ufffd" not in got.decode()


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_that_ends_inside_a_character_raises_nothing(
    proxy: RunningProxy, fake_vllm: FakeVllm, usage: bool
) -> None:
    """What came before is relayed, and the next request is served as ever (ST-02)."""
    whole = content_event("whole")
    got = await relayed(proxy, fake_vllm, [whole, 'data: {"a":"北'.encode()[:-1]], stream(usage=usage))
    assert got.startswith(whole)
    assert await relayed(proxy, fake_vllm, [OK]) == OK


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize(
    "data",
    [
        b'data:{"choices":[]}\r\n\r\ndata:[DONE]\r\n\r\n',
        b'data: {"a":\r\ndata: 1}\r\n\r\ndata: [DONE]\r\n\r\n',
        b"event: x\ndata: {}\nid: 1\n\ndata: [DONE]\n\n",
        b"\xef\xbb\xbfdata: {}\n\ndata: [DONE]\n\n",
        b"data: {}\r\rdata: [DONE]\r\r",
    ],
    ids=["crlf-no-space", "two-data-lines", "other-fields", "bom", "cr"],
)
async def test_line_endings_and_other_fields_survive(
    proxy: RunningProxy, fake_vllm: FakeVllm, data: bytes, usage: bool
) -> None:
    """CRLF, CR, no space after the colon, several data lines, a byte order mark: unchanged, cut anywhere (ST-03)."""
    for pieces in ways_to_cut(data):
        assert await relayed(proxy, fake_vllm, pieces, stream(usage=usage)) == data


@pytest.mark.parametrize("usage", [True, False])
async def test_comments_of_vllm_stay_comments(proxy: RunningProxy, fake_vllm: FakeVllm, usage: bool) -> None:
    """A comment is relayed as it is, never as data (ST-04)."""
    data = b': ping\n\ndata: {"choices":[]}\n\n: OPENROUTER PROCESSING\n\nretry: 3000\n\ndata: [DONE]\n\n'
    assert await relayed(proxy, fake_vllm, [data], stream(usage=usage)) == data


async def test_keep_alives_are_sent_between_events_while_vllm_prefills(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """Our comments come before the first event and between events, and all other bytes are vLLM's (ST-04)."""
    proxy = await start_proxy(relay__keepalive_seconds=0.03)
    first, second = content_event("one"), content_event("two")
    got = await relayed(proxy, fake_vllm, [0.1, first, 0.1, second, DONE])
    before, _, after = got.partition(first)
    assert before.count(KEEPALIVE) >= 2
    assert before.replace(KEEPALIVE, b"") == b""
    assert after.partition(second)[0].count(KEEPALIVE) >= 2
    assert got.replace(KEEPALIVE, b"") == first + second + DONE


@pytest.mark.parametrize("usage", [True, False])
async def test_no_keep_alive_inside_a_half_received_event(
    start_proxy: StartProxy, fake_vllm: FakeVllm, usage: bool
) -> None:
    """While an event is incomplete there is silence, wherever it was cut (ST-04)."""
    proxy = await start_proxy(relay__keepalive_seconds=0.02)
    whole = content_event("whole")
    for cut in (3, 20, len(whole) - 1):
        got = await relayed(proxy, fake_vllm, [whole[:cut], 0.08, whole[cut:], DONE], stream(usage=usage))
        assert whole in got
        assert got.replace(KEEPALIVE, b"") == whole + DONE


async def test_nothing_is_sent_before_vllm_has_chosen_its_headers(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect
) -> None:
    """A keep-alive would fix the status at 200 while vLLM may still refuse (ST-04)."""
    proxy = await start_proxy(relay__keepalive_seconds=0.02)
    headers = asyncio.Event()
    fake_vllm.default = Reply(gates={"headers": headers})
    client = await raw_connect(proxy.port)
    await client.post(b'{"stream":true,"messages":[{"role":"user","content":"x"}]}')
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.15):
            await client.reader.read(1)
    headers.set()
    assert (await client.head()).startswith(b"HTTP/1.1 200 ")


async def test_the_headers_reach_the_client_when_vllm_sends_them(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """200 comes while the prefill still runs: Open WebUI shows that the request was taken."""
    first = asyncio.Event()
    fake_vllm.default = Reply(gates={0: first})
    async with asyncio.timeout(2), proxy.post(stream()) as response:
        assert response.status == 200
        assert fake_vllm.generations[0].generated == 0
        first.set()
        assert data_of(await response.read())[-1] == "[DONE]"


async def test_a_plain_answer_gets_no_keep_alive(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """With stream false the body is one JSON object and nothing before it (ST-04)."""
    proxy = await start_proxy(relay__keepalive_seconds=0.02)
    body = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]}'
    fake_vllm.replies.append(Raw(body=[0.1, body], headers=JSON_TYPE))
    async with proxy.post(chat(stream=False)) as response:
        assert await response.read() == body
        assert response.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("options", "sees_usage"),
    [({"include_usage": True}, True), (None, False), ({"include_usage": False}, False), ("absent", False)],
    ids=["asked", "null", "refused", "absent"],
)
@pytest.mark.parametrize("null_field", [True, False], ids=["usage-null-elsewhere", "usage-only-last"])
async def test_the_usage_event_is_for_those_who_asked(
    proxy: RunningProxy, fake_vllm: FakeVllm, options: Any, sees_usage: bool, null_field: bool
) -> None:
    """We ask vLLM for usage and take it out again; everything else is as vLLM wrote it (ST-08)."""
    extra = b',"usage":null' if null_field else b""
    told = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a, \\"usage\\":null"},"finish_reason":"stop"}]'
    body = chat(stream=True) if options == "absent" else chat(stream=True, stream_options=options)
    got = await relayed(proxy, fake_vllm, [told + extra + b"}\n\n", USAGE, DONE], body)
    assert got == (told + extra + b"}\n\n" + USAGE + DONE if sees_usage else told + b"}\n\n" + DONE)
    assert fake_vllm.generations[-1].body["stream_options"]["include_usage"] is True
    assert proxy.sample("proxy_prompt_tokens_total") == 5
    assert proxy.sample("proxy_generated_tokens_total") == 2


@pytest.mark.parametrize(
    "usage",
    [b"null", b'{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":null}', b'{"prompt_tokens":null}'],
)
async def test_odd_usage_raises_nothing(proxy: RunningProxy, fake_vllm: FakeVllm, usage: bytes) -> None:
    """Null usage and null details are no fault (ST-08)."""
    data = content_event("a") + b'data: {"choices":[],"usage":' + usage + b"}\n\n" + DONE
    assert await relayed(proxy, fake_vllm, [data]) == data
    assert proxy.sample("proxy_requests_total", outcome="completed") == 1


async def test_profile_off_asks_for_no_usage_and_takes_nothing_out(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """What the client did not ask for is not asked for, and a usage event that comes anyway is relayed."""
    proxy = await start_proxy(profile="off")
    data = content_event("a") + USAGE + DONE
    assert await relayed(proxy, fake_vllm, [data], stream(usage=False)) == data
    assert "stream_options" not in fake_vllm.generations[0].body


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("size", [131_073, 300_000, 600_000, 5_000_000])
async def test_a_very_long_line_is_relayed(proxy: RunningProxy, fake_vllm: FakeVllm, size: int, usage: bool) -> None:
    """No limit on a line's length anywhere (ST-09)."""
    data = content_event("x" * size) + DONE
    assert await relayed(proxy, fake_vllm, [data], stream(usage=usage)) == data


@pytest.mark.parametrize("usage", [True, False])
async def test_tool_call_deltas_are_relayed_unchanged(proxy: RunningProxy, fake_vllm: FakeVllm, usage: bool) -> None:
    """Missing, reused and interleaved indexes are the client's to make sense of (ST-11)."""
    streams: list[list[dict[str, Any]]] = [
        [
            {"index": 0, "id": "c1", "function": {"name": "bash", "arguments": ""}},
            {"index": 0, "function": {"arguments": '{"x":'}},
            {"index": 1, "id": "c2", "function": {"name": "read", "arguments": "{}"}},
            {"index": 0, "function": {"arguments": "1}"}},
        ],
        [{"id": "c1", "function": {"name": "a", "arguments": "{}"}}, {"id": "c2", "function": {"name": "b"}}],
        [
            {"index": 0, "id": "c1", "function": {"name": "a"}},
            {"index": 0, "id": "c2", "function": {"name": "b"}},
        ],
    ]
    for calls in streams:
        deltas = [event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}) for call in calls]
        data = b"".join(deltas) + DONE
        assert await relayed(proxy, fake_vllm, [*deltas, DONE], stream(usage=usage)) == data


async def test_a_stream_says_that_it_must_not_be_buffered(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """nginx reads X-Accel-Buffering; without it the whole answer waits there (ST-12)."""
    async with proxy.post(stream()) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "Content-Length" not in response.headers


@pytest.mark.parametrize("usage", [True, False])
async def test_each_event_reaches_the_client_before_the_next_is_made(
    proxy: RunningProxy, fake_vllm: FakeVllm, usage: bool
) -> None:
    """No batching: vLLM writes event k + 1 only after the client has event k (ST-12)."""
    gates = [asyncio.Event() for _ in range(5)]
    events = [content_event(f"<{position}>") for position in range(5)]
    script: list[Piece] = []
    for gate, data in zip(gates, events, strict=True):
        script += [gate, data]
    fake_vllm.replies.append(Raw(body=[*script, DONE]))
    async with asyncio.timeout(5), proxy.post(stream(usage=usage)) as response:
        for gate, data in zip(gates, events, strict=True):
            gate.set()
            assert await response.content.readexactly(len(data)) == data


@pytest.mark.parametrize("idle_seconds", [0.05, 0.2, 0.25, 0.6])
async def test_an_idle_connection_is_given_up_before_vllm_closes_it(
    start_vllm: StartVllm, start_proxy: StartProxy, idle_seconds: float
) -> None:
    """Idle for less than, as long as, and longer than vLLM keeps it: no error, one generation each (ST-13, scaled)."""
    vllm = await start_vllm(keepalive_seconds=0.25)
    proxy = await start_proxy(upstream__url=vllm.url, upstream__pool_idle_seconds=0.15)
    for _ in range(3):
        async with proxy.post(chat()) as response:
            assert response.status == 200
        await asyncio.sleep(idle_seconds)
    assert len(vllm.generations) == 3


def test_the_pool_gives_up_sockets_before_vllm_does() -> None:
    """vLLM keeps an idle connection for 5 seconds; there is no limit on connecting above 10 (ST-13, ST-14)."""
    assert Config().upstream.pool_idle_seconds < 5
    assert Config().upstream.connect_seconds <= 10


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_connection_that_closes_as_the_request_is_written_costs_one_retry(
    proxy: RunningProxy, fake_vllm: FakeVllm, streamed: bool
) -> None:
    """A reused connection that turns out closed: once more on a fresh one, and vLLM generates once (ST-13)."""
    async with proxy.post(chat()) as response:
        assert response.status == 200
    fake_vllm.drop_reused = 1
    async with proxy.post(chat(stream=streamed)) as response:
        assert response.status == 200
        await response.read()
    assert fake_vllm.drop_reused == 0
    _, dropped, retried = fake_vllm.generations
    assert dropped.on_connection > 1
    assert retried.on_connection == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_fresh_connection_that_closes_is_not_tried_again(
    start_proxy: StartProxy, fake_vllm: FakeVllm, streamed: bool
) -> None:
    """vLLM may have been at work: asking twice would make it work twice (ST-13)."""
    proxy = await start_proxy(upstream__pool_idle_seconds=0)  # else the connection of another request is there
    fake_vllm.replies.append(Drop())
    async with proxy.post(chat(stream=streamed)) as response:
        assert response.status == 502
    assert len(fake_vllm.generations) == 1


async def test_a_reused_connection_that_breaks_after_the_first_byte_is_not_tried_again(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """Part of an answer has come, so the request was at work (ST-13)."""
    async with proxy.post(chat()) as response:
        assert response.status == 200
    fake_vllm.replies.append(Raw(body=[b'{"id":'], headers=JSON_TYPE, framing="length", content_length=99, end="rst"))
    async with proxy.post(chat()) as response:
        assert response.status == 502
    assert len(fake_vllm.generations) == 2


async def test_a_long_prefill_and_a_long_answer_are_not_cut(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Only silence counts, never the whole: here both last longer than the idle limit or near it (ST-14, scaled)."""
    proxy = await start_proxy(upstream__idle_seconds=0.5)
    fake_vllm.replies.append(Raw(body=[0.3, OK]))
    slow: list[Piece] = [0.04, content_event("t")] * 20
    fake_vllm.replies.append(Raw(body=[*slow, DONE]))
    for _ in range(2):
        async with proxy.post(stream()) as response:
            got = data_of(await response.read())
        assert got[-1] == "[DONE]"
        assert not any("error" in data for data in got)


async def test_silence_above_the_idle_limit_ends_the_stream_with_an_error(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """One token, then nothing: the client is told so, and vLLM's connection is closed (ST-14)."""
    proxy = await start_proxy(upstream__idle_seconds=0.2)
    fake_vllm.replies.append(Raw(body=[content_event("one")], end="hang"))
    async with asyncio.timeout(3), proxy.post(stream()) as response:
        got = data_of(await response.read())
    assert got[0]["choices"][0]["delta"] == {"content": "one"}
    assert got[1]["error"]["type"] == "server_error"
    assert got[2] == "[DONE]"
    async with asyncio.timeout(1):
        await fake_vllm.generations[0].closed.wait()
    assert fake_vllm.generations[0].aborted_at is not None
