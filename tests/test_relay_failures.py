"""What the client sees when vLLM fails: the right status, OpenAI's error shape, never a bare cut."""

import asyncio
import json
from typing import Any

import pytest

from tests.bodies import chat, data_of, stream
from tests.conftest import RunningProxy, StartProxy
from tests.fake_replies import DONE, JSON_TYPE, Hang, Raw, Scripted, content_event, json_error
from tests.fake_vllm import FakeVllm

THREE = [content_event("one"), content_event("two"), content_event("three")]
IN_BAND = b'data: {"error":{"message":"boom","type":"InternalServerError","param":null,"code":500}}\n\ndata: [DONE]\n\n'


async def answer(proxy: RunningProxy, body: dict[str, Any]) -> tuple[int, str, bytes]:
    """Return status, content type and body of what the client gets."""
    async with asyncio.timeout(5), proxy.post(body) as response:
        return response.status, response.content_type, await response.read()


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("end", ["rst", "cut"])
async def test_a_cut_in_mid_stream_is_told_after_the_partial_text(
    proxy: RunningProxy, fake_vllm: FakeVllm, end: Any, usage: bool
) -> None:
    """The events that came, one error event, [DONE]; counted once, not tried again (ST-06, MR-05)."""
    read = asyncio.Event()
    fake_vllm.replies.append(Raw(body=[*THREE, read], end=end))
    async with asyncio.timeout(5), proxy.post(stream(usage=usage)) as response:
        partial = await response.content.readexactly(sum(map(len, THREE)))
        read.set()
        rest = await response.read()
    assert partial == b"".join(THREE)
    error, done = data_of(rest)
    assert (error["error"]["type"], error["error"]["code"]) == ("server_error", 502)
    assert error["error"]["message"]
    assert rest.startswith(b'data: {"error":')
    assert rest.endswith(b"\n\ndata: [DONE]\n\n")
    assert done == "[DONE]"
    assert proxy.sample("proxy_requests_total", outcome="upstream_error") == 1
    assert proxy.sample("proxy_requests_total") == 1
    assert len(fake_vllm.generations) == 1


@pytest.mark.parametrize("usage", [True, False])
async def test_half_an_event_at_the_cut_is_not_passed_off_as_whole(
    proxy: RunningProxy, fake_vllm: FakeVllm, usage: bool
) -> None:
    """Every data line that the client parses is JSON, and the half one is not among them (ST-06)."""
    fake_vllm.replies.append(Raw(body=[*THREE, content_event("never")[:-20], 0.05], end="rst"))
    _, _, got = await answer(proxy, stream(usage=usage))
    texts = [data["choices"][0]["delta"]["content"] for data in data_of(got) if "choices" in data]
    assert texts == ["one", "two", "three"]
    assert data_of(got)[-2]["error"]["code"] == 502


async def test_half_a_plain_answer_is_an_error(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """A body shorter than its Content-Length is never a 200 (ST-06)."""
    fake_vllm.replies.append(
        Raw(
            body=[b'{"choices":[{"index":0,"message":{"content":"ha'],
            headers=JSON_TYPE,
            framing="length",
            content_length=500,
            end="cut",
        )
    )
    status, content_type, got = await answer(proxy, chat())
    assert (status, content_type) == (502, "application/json")
    assert (json.loads(got)["error"]["type"], json.loads(got)["error"]["code"]) == ("server_error", 502)
    assert proxy.sample("proxy_requests_total", outcome="upstream_error") == 1


@pytest.mark.parametrize("usage", [True, False])
async def test_an_error_inside_a_stream_is_relayed_and_counted(
    proxy: RunningProxy, fake_vllm: FakeVllm, usage: bool
) -> None:
    """vLLM's own late error reaches the client as it is, and is no success in the metrics (ST-07)."""
    fake_vllm.replies.append(Raw(body=[IN_BAND]))
    assert await answer(proxy, stream(usage=usage)) == (200, "text/event-stream", IN_BAND)
    assert proxy.sample("proxy_requests_total", outcome="upstream_error") == 1
    assert proxy.sample("proxy_requests_total", outcome="completed") == 0
    assert proxy.sample("proxy_upstream_errors_total", kind="in_band") == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_timeout_before_headers_is_a_504(start_proxy: StartProxy, fake_vllm: FakeVllm, streamed: bool) -> None:
    """A hung vLLM is a server's fault, so that clients know they may try again (MR-05)."""
    proxy = await start_proxy(upstream__idle_seconds=0.1)
    fake_vllm.replies.append(Hang())
    status, content_type, got = await answer(proxy, chat(stream=streamed))
    assert (status, content_type) == (504, "application/json")
    assert json.loads(got)["error"]["type"] == "server_error"
    async with asyncio.timeout(1):
        await fake_vllm.generations[0].closed.wait()
    assert len(fake_vllm.generations) == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_refused_connection_is_a_503_with_retry_after(
    proxy: RunningProxy, fake_vllm: FakeVllm, streamed: bool
) -> None:
    """vLLM is restarting: the client is told when to come back, and served when it is there (MR-05)."""
    await fake_vllm.stop()
    async with proxy.post(chat(stream=streamed)) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        assert (await response.json())["error"]["type"] == "server_error"
    assert proxy.sample("proxy_upstream_errors_total", kind="connect") == 1
    await fake_vllm.start()
    assert (await answer(proxy, chat(stream=streamed)))[0] == 200


TOO_LONG = {"error": {"message": "too long", "type": "BadRequestError", "param": "input_tokens", "code": 400}}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("scripted", "status"),
    [
        (json_error(400, TOO_LONG), 400),
        (json_error(401, {"error": "Unauthorized"}), 401),
        (json_error(429, {"error": {"message": "busy"}}, retry_after="7"), 429),
        (Raw(status=500, headers={}, framing="length"), 500),
        (Raw(body=[b"<html>oops</html>"], status=502, headers={"Content-Type": "text/html"}, framing="length"), 502),
        (Raw(body=[IN_BAND], status=500), 500),
    ],
    ids=["400", "401-string", "429", "500-empty", "502-html", "500-event-stream"],
)
async def test_an_error_status_stays_what_it_is(
    proxy: RunningProxy, fake_vllm: FakeVllm, scripted: Scripted, status: int, streamed: bool
) -> None:
    """The status of vLLM, always JSON, always an error object with words in it (LL-09)."""
    fake_vllm.reply_to = lambda _: scripted
    got_status, content_type, got = await answer(proxy, chat(stream=streamed))
    assert (got_status, content_type) == (status, "application/json")
    error = json.loads(got)["error"]
    assert error["message"]
    assert b"<html>" not in got
    if status >= 500:
        assert (error["type"], error["code"]) in (("server_error", status), ("InternalServerError", status))


async def test_the_words_of_vllms_400_are_kept(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Type, param and the integer code reach the client unchanged, to the byte (LL-09)."""
    fake_vllm.reply_to = lambda _: json_error(400, TOO_LONG)
    _, _, got = await answer(proxy, stream())
    assert got == json.dumps(TOO_LONG).encode()


async def test_a_string_error_becomes_an_object(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """vLLM's 401 is `{"error":"Unauthorized"}`; the proxy relays or wraps it and does not fall over (LL-09)."""
    fake_vllm.reply_to = lambda _: json_error(401, {"error": "Unauthorized"})
    status, _, got = await answer(proxy, stream())
    assert status == 401
    assert json.loads(got) == {"error": "Unauthorized"} or json.loads(got)["error"]["code"] == 401


async def test_retry_after_is_relayed(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """A busy vLLM says when to come back (LL-09)."""
    fake_vllm.reply_to = lambda _: json_error(429, {"error": {"message": "busy"}}, retry_after="7")
    async with proxy.post(stream()) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "7")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_page_instead_of_an_answer_is_a_502(proxy: RunningProxy, fake_vllm: FakeVllm, streamed: bool) -> None:
    """Something else listens on vLLM's port: its page does not reach the client as an answer."""
    page = Raw(body=[b"<html>welcome</html>"], headers={"Content-Type": "text/html"}, framing="length")
    fake_vllm.replies.append(page)
    status, content_type, got = await answer(proxy, chat(stream=streamed))
    assert (status, content_type) == (502, "application/json")
    assert json.loads(got)["error"]["type"] == "server_error"


async def test_no_fault_of_vllm_is_called_the_clients(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """invalid_request_error would keep clients from trying again (MR-05)."""
    proxy = await start_proxy(upstream__idle_seconds=0.1)
    faults: list[Scripted] = [
        Hang(),
        Raw(body=THREE, end="cut"),
        Raw(body=THREE, end="hang"),
        Raw(body=[DONE], status=503),
    ]
    for fault in faults:
        fake_vllm.replies.append(fault)
        _, _, got = await answer(proxy, stream())
        assert b"invalid_request_error" not in got
