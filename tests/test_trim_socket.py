"""Trimming over real sockets: a long chat before a model with a small context, restarts, refusals, failures."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bodies import eventually
from tests.conftest import RunningProxy, StartProxy, StartVllm
from tests.fake_engine import Rules
from tests.fake_faults import Seen
from tests.fake_replies import Raw, Reply
from tests.fake_vllm import FakeVllm

WHO = {"X_OpenWebUI_User_Id": "u", "X_OpenWebUI_Chat_Id": "c"}
CONTEXT = 1024
HEAD = {"role": "system", "content": "You help."}


def user(text: str) -> dict[str, Any]:
    """Return a user's message."""
    return {"role": "user", "content": text}


@pytest.fixture
async def fake_vllm(start_vllm: StartVllm) -> FakeVllm:
    """A fake vLLM with a small context."""
    return await start_vllm(rules=Rules(max_model_len=CONTEXT), default=Reply(text="an answer of a few words " * 4))


def chats(fake: FakeVllm) -> list[Seen]:
    """Return the chat requests that went up, without what the proxy itself asks of a template."""
    return [seen for seen in fake.of("/v1/chat/completions") if seen.body.get("max_tokens") == 100]


async def send(proxy: RunningProxy, messages: list[Any], **fields: Any) -> tuple[int, dict[str, str], bytes]:
    """Send a streamed request of the chat; return status, headers and body."""
    body = {"model": "fake", "messages": messages, "stream": True, "max_tokens": 100, **fields}
    async with proxy.post(body, **WHO) as response:
        raw = await response.read()
    await eventually(lambda: not proxy.sample("proxy_requests_in_flight"))
    return response.status, dict(response.headers), raw


def said(raw: bytes) -> str:
    """Return the content of a stream."""
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def played(proxy: RunningProxy, messages: list[Any], turns: int) -> list[int]:
    """Play so many turns; return the messages left out in each."""
    out = []
    for _ in range(turns):
        messages.append(user(f"question {len(messages)} of a long chat " * 6))
        status, headers, raw = await send(proxy, messages)
        assert status == 200, raw
        out.append(int(headers.get("X-Prefix-Proxy-Left-Out", "0")))
        messages.append({"role": "assistant", "content": said(raw)})
    return out


async def test_a_long_chat_never_fails_and_its_cut_moves_rarely(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """No 400, every prompt within the context; the reply header and the metrics tell what was left out."""
    left_out = await played(proxy, [HEAD], 40)
    assert all(seen.n <= CONTEXT - 100 for seen in chats(fake_vllm))
    cuts = len(set(left_out) - {0})
    assert 0 < cuts <= 10
    assert left_out == sorted(left_out)
    assert proxy.sample("proxy_trims_total") == cuts
    assert proxy.sample("proxy_messages_left_out_total") == left_out[-1]
    reused = sum(seen.hit for seen in chats(fake_vllm)) / sum(seen.n for seen in chats(fake_vllm))
    assert reused > 0.7


async def test_counts_that_decide_are_vllms_own(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The room that the prompt leaves is exact: an answer is allowed what fits, to the token."""
    messages: list[Any] = [HEAD]
    await played(proxy, messages, 12)
    messages.append(user("one more"))
    async with proxy.post({"model": "fake", "messages": messages, "max_tokens": 1000}, **WHO) as response:
        assert response.status == 200
    last = fake_vllm.of("/v1/chat/completions")[-1]
    assert last.body["max_tokens"] == min(1000, CONTEXT - last.n)
    assert proxy.sample("proxy_token_counts_total", how="vllm") > 0


async def test_a_restart_keeps_the_cut(start_proxy: StartProxy, fake_vllm: FakeVllm, tmp_path: Path) -> None:
    """A new process with the same database sends the next prompt from the same place."""
    settings = {"database": str(tmp_path / "sessions.sqlite3"), "store__write_delay_seconds": 0.05}
    first = await start_proxy(**settings)
    messages: list[Any] = [HEAD]
    before = await played(first, messages, 12)
    assert before[-1] > 0
    await first.runner.cleanup()
    kept = [m for m in chats(fake_vllm)[-1].body["messages"] if m["role"] != "system"]
    second = await start_proxy(**settings)
    after = await played(second, messages, 1)
    sent = [m for m in chats(fake_vllm)[-1].body["messages"] if m["role"] != "system"]
    assert after[0] == before[-1]
    assert sent[: len(kept) - 1] == kept[:-1]


async def test_two_requests_at_once_move_the_cut_once(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The same model picked twice: two answers, one cut, one prefix."""
    messages: list[Any] = [HEAD]
    left_out = [0]
    while not left_out[-1]:
        told = [*messages, user(f"question {len(messages)} of a long chat " * 6)]
        both = await asyncio.gather(send(proxy, told, seed=1), send(proxy, told, seed=2))
        assert [status for status, _, _ in both] == [200, 200]
        seen = {int(headers.get("X-Prefix-Proxy-Left-Out", "0")) for _, headers, _ in both}
        assert len(seen) == 1
        left_out.append(seen.pop())
        messages = [*told, {"role": "assistant", "content": said(both[0][2])}]
    assert proxy.sample("proxy_trims_total") == 1
    assert proxy.sample("proxy_messages_left_out_total") == left_out[-1]


async def test_what_cannot_fit_is_refused_with_the_numbers(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Before vLLM sees it: 400, the code that clients know, the three numbers in plain words."""
    status, _, raw = await send(proxy, [HEAD, user("word " * 1200)])
    error = json.loads(raw)["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert str(CONTEXT) in error["message"]
    assert chats(fake_vllm) == []
    numbers = [int(word.strip(",.")) for word in error["message"].split() if word.strip(",.").isdigit()]
    assert numbers[0] > 1200


async def test_without_tokenize_the_chat_goes_on_by_bounds(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Cut earlier than need be, never refused by vLLM; the metric says so."""
    fake_vllm.answers["/tokenize"] = Raw(
        b'{"detail":"Not Found"}', status=404, headers={"Content-Type": "application/json"}
    )
    left_out = await played(proxy, [HEAD], 20)
    assert left_out[-1] > 0
    assert left_out == sorted(left_out)
    assert all(seen.n <= CONTEXT - 100 for seen in chats(fake_vllm))
    assert proxy.sample("proxy_token_counts_total", how="estimate") > 0
    assert proxy.sample("proxy_token_counts_total", how="vllm") == 0


async def longest_pause(end: asyncio.Event) -> float:
    """Return for how long, in seconds, the loop did nothing else, until `end`."""
    loop, longest = asyncio.get_running_loop(), 0.0
    while not end.is_set():
        begun = loop.time()
        await asyncio.sleep(0.005)
        longest = max(longest, loop.time() - begun)
    return longest


async def test_a_message_of_5_mb_holds_up_nobody(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """It is refused, and others are answered meanwhile."""
    proxy = await start_proxy()
    await played(proxy, [HEAD], 1)
    text = "wörter " * 700_000
    body = json.dumps({"model": "fake", "messages": [HEAD, user(text)], "max_tokens": 100}).encode()
    answered = asyncio.Event()

    async def ask() -> None:
        url, headers = f"{proxy.url}/v1/chat/completions", {"Content-Type": "application/json"}
        async with proxy.session.post(url, data=io.BytesIO(body), headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "context_length_exceeded"
        answered.set()

    _, longest = await asyncio.gather(ask(), longest_pause(answered))
    assert longest < 1.0
    assert await played(proxy, [HEAD], 1) == [0]


@pytest.mark.parametrize("on", [True, False])
async def test_a_stream_can_begin_with_what_was_left_out(
    start_proxy: StartProxy, fake_vllm: FakeVllm, on: bool
) -> None:
    """As a comment, which clients that follow the standard pass over."""
    proxy = await start_proxy(trim__stream_comment=on)
    messages: list[Any] = [HEAD]
    await played(proxy, messages, 12)
    messages.append(user("more"))
    _, headers, raw = await send(proxy, messages)
    count = headers["X-Prefix-Proxy-Left-Out"]
    assert raw.startswith(f": left out {count} messages\n\ndata: ".encode() if on else b"data: ")


async def test_a_fallback_after_a_refusal_keeps_salt_and_limits(start_proxy: StartProxy, start_vllm: StartVllm) -> None:
    """Also where its own counts were open: the second try is cut and salted as the first."""
    fake = await start_vllm(rules=Rules(max_model_len=CONTEXT), default=Reply(text="an answer of a few words " * 4))
    proxy = await start_proxy(upstream__url=fake.url, salt__isolation="tenant")
    clock = {"role": "system", "content": "You help.\nThe current time is 10:00:01 PM."}
    messages: list[Any] = [clock]
    await played(proxy, messages, 12)
    messages.append(user("more"))
    refusing = [Raw(b'{"error":{"message":"no","code":400}}', status=400, headers={"Content-Type": "application/json"})]
    fake.reply_to = lambda body: refusing.pop() if "messages" in body and refusing else None
    messages[0] = {"role": "system", "content": "You help.\nThe current time is 11:00:01 PM."}
    status, _, _ = await send(proxy, messages)
    assert status == 200
    last, before = chats(fake)[-1], chats(fake)[-2]
    assert last.body["cache_salt"] == before.body["cache_salt"]
    assert last.n <= CONTEXT - 100
