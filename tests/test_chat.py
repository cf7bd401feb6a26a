"""The generating routes from end to end, where the relay tests do not look."""

from typing import Any

import pytest

from tests.bodies import eventually
from tests.conftest import RawConnect, RunningProxy
from tests.fake_replies import Raw, Reply, json_error
from tests.fake_vllm import FakeVllm

REFUSED = json_error(400, {"error": {"message": "template", "type": "BadRequestError", "param": None, "code": 400}})
CONTINUED: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hel"}],
}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_of_what_we_made_is_followed_by_the_request_as_received(
    proxy: RunningProxy, fake_vllm: FakeVllm, stream: bool
) -> None:
    """The client sees only the second answer."""
    fake_vllm.replies.extend([REFUSED, Reply(text="lo.")])
    async with proxy.post({**CONTINUED, "stream": stream}) as response:
        assert response.status == 200
        assert b"lo" in await response.read()
    first, second = (seen.body for seen in fake_vllm.generations)
    assert first["continue_final_message"] is True
    assert "continue_final_message" not in second and second["messages"] == CONTINUED["messages"]
    assert proxy.sample("proxy_requests_total", outcome="completed") == 1


async def test_a_request_that_is_wrong_either_way_is_refused_once(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Two attempts, one answer; a request that went as received gets one attempt."""
    fake_vllm.reply_to = lambda _: REFUSED
    async with proxy.post(CONTINUED) as response:
        assert response.status == 400
    assert len(fake_vllm.generations) == 2
    async with proxy.post({**CONTINUED, "messages": CONTINUED["messages"][:1]}) as response:
        assert response.status == 400
    assert len(fake_vllm.generations) == 3
    assert proxy.sample("proxy_upstream_errors_total", kind="status_4xx") == 2


async def test_a_client_that_leaves_while_it_sends_reaches_nobody(
    proxy: RunningProxy, fake_vllm: FakeVllm, raw_connect: RawConnect
) -> None:
    """Counted as gone, not as a fault of anyone."""
    client = await raw_connect(proxy.port)
    await client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'Content-Length: 999\r\n\r\n{"model":'
    )
    await eventually(lambda: len(proxy.state.presence))
    await client.leave()
    await eventually(lambda: not len(proxy.state.presence))
    assert fake_vllm.generations == []
    assert proxy.sample("proxy_requests_in_flight") == 0
    assert proxy.sample("proxy_requests_total", outcome="failed") == 0


async def test_json_in_answer_to_a_stream_request_is_relayed(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Clients know what to do with it; an error in it is counted."""
    body = b'{"error":{"message":"boom"}}'
    fake_vllm.replies.append(Raw([body], headers={"Content-Type": "application/json"}, framing="length"))
    async with proxy.post({**CONTINUED, "stream": True}) as response:
        assert (response.status, response.content_type, await response.read()) == (200, "application/json", body)
    assert proxy.sample("proxy_upstream_errors_total", kind="in_band") == 1
