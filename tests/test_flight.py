"""Who shares a run with whom, over sockets: one call to vLLM, and each client's whole answer from its start."""

import asyncio
import logging
from typing import Any

import pytest

from tests.bodies import chat, eventually, stream
from tests.conftest import RawClient, RawConnect, RunningProxy, StartProxy
from tests.fake_replies import Raw, Reply, json_error
from tests.fake_vllm import FakeVllm
from tests.flights import answer, arrived, ask, refuse_probe, runs, sharing, texts, up_to_date, who
from tests.virtual_time import soon

LIMIT_SECONDS = 0.2
DETERMINED: dict[str, Any] = {"temperature": 0, "seed": 1}


@pytest.fixture(autouse=True)
def quiet_probe(fake_vllm: FakeVllm) -> None:
    """The proxy's probe of priorities takes no scripted answer."""
    refuse_probe(fake_vllm)


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "plain"])
async def test_the_same_question_sent_twice_is_one_run(
    proxy: RunningProxy, fake_vllm: FakeVllm, streamed: bool
) -> None:
    """Both get the same bytes: one id, one [DONE] each (CO-01)."""
    gate = asyncio.Event()
    fake_vllm.default = Reply(pieces=["<0>", "<1>"], gates={1: gate} if streamed else {"headers": gate})
    body = stream(**DETERMINED) if streamed else chat(**DETERMINED)
    first = soon(answer(proxy, body, **who()))
    await arrived(fake_vllm, 1)
    second = soon(answer(proxy, body, **who()))
    await eventually(lambda: sharing(proxy) == 2)
    gate.set()
    one, other = await first, await second
    assert one == other and one[0] == 200 and b"<1>" in one[1]
    assert one[1].count(b"[DONE]") == (1 if streamed else 0)
    assert len(runs(fake_vllm)) == 1
    assert proxy.sample("proxy_coalesced_total", how="joined") == 1
    assert proxy.sample("proxy_requests_total", outcome="completed") == 2
    assert proxy.sample("proxy_prompt_tokens_total") == runs(fake_vllm)[0].n


async def test_switched_off_every_request_is_a_run(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """`coalesce.single_flight` (CO-01), and profile off changes nothing at all."""
    for settings in ({"coalesce__single_flight": False}, {"profile": "off"}):
        proxy = await start_proxy(**settings)
        gate = asyncio.Event()
        fake_vllm.default = Reply(gates={"headers": gate})
        before = len(runs(fake_vllm))
        both = [soon(answer(proxy, chat(**DETERMINED), **who())) for _ in range(2)]
        await arrived(fake_vllm, before + 2)
        gate.set()
        await asyncio.gather(*both)
        assert proxy.sample("proxy_coalesced_total") == 0


async def test_nothing_crosses_users_keys_or_message_ids(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Equal bodies of other users, of nobody, under other message ids or Idempotency-Keys: each its own run (CO-04)."""
    gate = asyncio.Event()
    fake_vllm.default = Reply(gates={"headers": gate})
    callers = [
        who("u1"), who("u2"), {}, {}, who("u1", message="m1"), who("u1", message="m2"),
        who("u1", Idempotency_Key="a"), who("u1", Idempotency_Key="b"), who("u1", chat="c1"), who("u1", chat="c2"),
    ]  # fmt: skip
    asked = [soon(answer(proxy, chat(**DETERMINED), **headers)) for headers in callers]
    await arrived(fake_vllm, len(callers))
    gate.set()
    assert {status for status, _ in await asyncio.gather(*asked)} == {200}
    assert proxy.sample("proxy_coalesced_total") == 0


@pytest.mark.parametrize(
    ("headers", "body", "shared"),
    [
        (who(message="m1"), {}, True),
        (who(Idempotency_Key="k"), {}, True),
        (who(task="title_generation"), {}, True),
        (who(), {"seed": 5}, True),
        (who(), {}, False),
        (who(), {"temperature": None}, False),
        (who(), {"temperature": 0.7}, False),
        (who(), {"temperature": 0, "n": 2}, False),
    ],
)
async def test_what_makes_two_equal_questions_one(
    start_proxy: StartProxy, fake_vllm: FakeVllm, headers: dict[str, str], body: dict[str, Any], shared: bool
) -> None:
    """A message id, an Idempotency-Key, a task, a determined answer; nothing else does."""
    proxy = await start_proxy(coalesce__task_head_seconds=0)
    gate = asyncio.Event()
    fake_vllm.default = Reply(gates={"headers": gate})
    first = soon(answer(proxy, chat(**body), **headers))
    await arrived(fake_vllm, 1)
    second = soon(answer(proxy, chat(**body), **headers))
    if shared:
        await eventually(lambda: proxy.sample("proxy_coalesced_total", how="joined"))
    else:
        await arrived(fake_vllm, 2)
    gate.set()
    await asyncio.gather(first, second)
    assert len(runs(fake_vllm)) == (1 if shared else 2)


async def test_an_sdk_that_repeats_itself_joins_what_still_runs(
    proxy: RunningProxy, fake_vllm: FakeVllm, raw_connect: RawConnect
) -> None:
    """The question has no determined answer and no id; that it is a repetition says that one answer is wanted."""
    gate = asyncio.Event()
    fake_vllm.default = Reply(pieces=["<0>", "<1>"], gates={1: gate})
    client = await raw_connect(proxy.port)
    await ask(client, stream(usage=False))
    await client.until(b"<0>")
    again = soon(answer(proxy, stream(usage=False), **who(X_Stainless_Retry_Count="1")))
    await eventually(lambda: sharing(proxy) == 2)
    gate.set()
    assert texts((await again)[1]) == ["<0>", "<1>"]
    assert len(runs(fake_vllm)) == 1


@pytest.mark.parametrize("cancels", [True, False], ids=["cancelling", "not-cancelling"])
async def test_one_of_several_sharers_leaves(
    start_proxy: StartProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, cancels: bool
) -> None:
    """The leader goes, a follower gets all, a late one gets it from its start, the last one stops vLLM (CN-07)."""
    proxy = await start_proxy(handler_cancellation=cancels)
    gates = {1: asyncio.Event(), 2: asyncio.Event(), "end": asyncio.Event()}
    fake_vllm.default = Reply(pieces=["<0>", "<1>", "<2>"], gates=gates)  # type: ignore[arg-type]  # int and str keys
    body = stream(**DETERMINED)
    leader, first, late = [await raw_connect(proxy.port) for _ in range(3)]
    await ask(leader, body)
    await leader.until(b"<0>")
    await ask(first, body)
    await first.until(b"<0>")
    await leader.leave()
    await eventually(lambda: sharing(proxy) == 1)
    assert proxy.sample("proxy_aborts_total", phase="stream") == 1
    gates[1].set()
    await first.until(b"<1>")
    await ask(late, body)
    beginning = (await late.head(), await late.until(b"<1>"))[1]
    assert b"<0>" in beginning and beginning.count(b'"role"') == 1
    await first.reset()
    await eventually(lambda: sharing(proxy) == 1)
    gates[2].set()
    await late.until(b"<2>")
    left_at = asyncio.get_running_loop().time()
    await late.leave()
    seen = runs(fake_vllm)[0]
    await eventually(seen.closed.is_set)
    assert seen.aborted_at is not None and seen.aborted_at - left_at < LIMIT_SECONDS
    assert len(runs(fake_vllm)) == 1
    await eventually(lambda: not proxy.sample("proxy_requests_in_flight"))
    assert len(proxy.state.flights.table) == 0 and proxy.state.flights.kept_bytes == 0


@pytest.mark.parametrize("when", ["headers", 0])
async def test_the_last_one_to_leave_stops_vllm_before_any_token(
    proxy: RunningProxy, fake_vllm: FakeVllm, raw_connect: RawConnect, when: Any
) -> None:
    """The first one to leave does not."""
    fake_vllm.default = Reply(gates={when: asyncio.Event()})
    clients = [await raw_connect(proxy.port) for _ in range(2)]
    for client in clients:
        await ask(client, stream(**DETERMINED))
    await eventually(lambda: sharing(proxy) == 2)
    seen = await arrived(fake_vllm, 1)
    await clients[0].leave()
    await eventually(lambda: sharing(proxy) == 1)
    assert not seen.closed.is_set()
    left_at = asyncio.get_running_loop().time()
    await clients[1].leave()
    await eventually(seen.closed.is_set)
    assert seen.aborted_at is not None and seen.aborted_at - left_at < LIMIT_SECONDS
    assert proxy.sample("proxy_aborts_total", phase="before_headers" if when == "headers" else "prefill") == 2


async def test_a_failed_flight_fails_for_all_and_is_not_remembered(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Each gets its own copy, with `Retry-After`; nothing is tried again; the next request is a new one (CO-08)."""
    gate = asyncio.Event()
    busy = json_error(503, {"error": {"message": "busy", "type": "x", "param": None, "code": 503}}, Retry_After="7")
    fake_vllm.replies.append(Raw(busy.body, 503, busy.headers, "length", before_headers=gate))

    async def member() -> tuple[int, str | None, bytes]:
        async with proxy.post(chat(**DETERMINED), **who()) as response:
            return response.status, response.headers.get("Retry-After"), await response.read()

    members = [soon(member()) for _ in range(4)]
    await eventually(lambda: sharing(proxy) == 4)
    gate.set()
    assert {(status, wait) for status, wait, _ in await asyncio.gather(*members)} == {(503, "7")}
    assert len(runs(fake_vllm)) == 1
    assert proxy.sample("proxy_upstream_errors_total", kind="status_5xx") == 1
    assert (await answer(proxy, chat(**DETERMINED), **who()))[0] == 200
    assert len(runs(fake_vllm)) == 2


async def test_a_server_that_is_away_fails_all_with_the_same_words(
    proxy: RunningProxy, fake_vllm: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    """503 and `Retry-After` from the proxy itself, counted once, without a traceback."""
    gate = asyncio.Event()
    fake_vllm.default = Reply(gates={"headers": gate})
    members = [soon(answer(proxy, chat(**DETERMINED), **who())) for _ in range(3)]
    await eventually(lambda: sharing(proxy) == 3)
    await arrived(fake_vllm, 1)
    await fake_vllm.stop()
    results = await asyncio.gather(*members)
    assert len(set(results)) == 1 and results[0][0] in (502, 503)
    assert proxy.sample("proxy_upstream_errors_total") == 1
    assert proxy.sample("proxy_requests_total", outcome="upstream_error") == 3
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_cut_in_mid_stream_is_told_to_all(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """What came is kept, then the error event and [DONE], the same for every sharer."""
    gate = asyncio.Event()
    pieces: list[Any] = [b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"par"}}]}\n\n', gate, b'data: {"a']
    fake_vllm.reply_to = lambda body: Raw(pieces, end="cut")
    members = [soon(answer(proxy, stream(**DETERMINED), **who())) for _ in range(3)]
    await eventually(lambda: sharing(proxy) == 3)
    gate.set()
    results = await asyncio.gather(*members)
    assert len(set(results)) == 1 and texts(results[0][1]) == ["par"]
    assert results[0][1].endswith(b"data: [DONE]\n\n") and b'"error"' in results[0][1]
    assert proxy.sample("proxy_upstream_errors_total", kind="cut") == 1


async def test_a_refusal_of_our_own_is_told_to_all(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """A request that may not go up fails for those who joined it as for the first."""
    body = chat(max_tokens=-1, **DETERMINED)
    results = await asyncio.gather(*(answer(proxy, body, **who()) for _ in range(3)))
    assert {status for status, _ in results} == {400}
    assert runs(fake_vllm) == [] and len(proxy.state.flights.table) == 0


async def test_the_session_is_recorded_once(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Two clients of one answer are one turn of the session, with one reply in the ledger."""
    body = stream("Where?", **DETERMINED)
    await asyncio.gather(*(answer(proxy, body, **who(chat="c1", message="m")) for _ in range(2)))
    assert len(runs(fake_vllm)) == 1
    assert [info.turns for info in proxy.state.sessions.list()] == [1]


@pytest.mark.parametrize("joiners", [0, 1], ids=["alone", "in company"])
async def test_a_slow_sharer_slows_nobody_and_is_cut(
    start_proxy: StartProxy, fake_vllm: FakeVllm, joiners: int
) -> None:
    """Who falls too far behind the quickest gets an error event; alone it merely makes vLLM wait, as ever."""
    proxy = await start_proxy(coalesce__buffer_bytes=256 * 1024)
    event = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"' + b"x" * 30_000 + b'"}}]}\n\n'
    go = asyncio.Event()
    fake_vllm.reply_to = lambda body: Raw([event, go, *[event] * 600, b"data: [DONE]\n\n"])
    # Reads no more than it is asked to, unlike the raw clients of the fixture.
    slow = RawClient(*await asyncio.open_connection("127.0.0.1", proxy.port, limit=1024))
    await ask(slow, stream(**DETERMINED))
    await slow.head()
    quick = [soon(answer(proxy, stream(**DETERMINED), **who())) for _ in range(joiners)]
    await eventually(lambda: sharing(proxy) == 1 + joiners)
    go.set()
    for got in await asyncio.wait_for(asyncio.gather(*quick), 20):
        assert got[1].count(b"data: ") == 602
    if joiners:
        await eventually(lambda: proxy.sample("proxy_slow_sharers_cut_total"))
    assert proxy.state.flights.kept_bytes <= 512 * 1024
    rest = b""
    async with asyncio.timeout(20):
        while b"data: [DONE]" not in rest[-100:]:
            rest += await slow.reader.read(1 << 20)
    slow.writer.close()
    assert (b"read too slowly" in rest) == bool(joiners)
    assert proxy.sample("proxy_slow_sharers_cut_total") == joiners
    assert len(runs(fake_vllm)) == 1


async def test_an_answer_too_long_to_keep_is_not_joined_late(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Half of the buffer has gone by: the newcomer has a run of its own, from its start."""
    proxy = await start_proxy(coalesce__buffer_bytes=64 * 1024)
    event = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"' + b"x" * 20_000 + b'"}}]}\n\n'
    go = asyncio.Event()
    fake_vllm.reply_to = lambda body: Raw([event] * 3 + [go, b"data: [DONE]\n\n"])
    first = soon(answer(proxy, stream(**DETERMINED), **who()))
    await eventually(lambda: proxy.state.flights.kept_bytes > 60_000)
    second = soon(answer(proxy, stream(**DETERMINED), **who()))
    await arrived(fake_vllm, 2)
    go.set()
    assert (await first)[1] == (await second)[1]
    assert proxy.state.flights.kept_bytes == 0


async def test_a_drain_ends_every_sharer(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Streams end with an error event and [DONE]; the run ends with them."""
    fake_vllm.default = Reply(pieces=["<0>", "<1>"], gates={1: asyncio.Event()})
    members = [soon(answer(proxy, stream(**DETERMINED), **who())) for _ in range(2)]
    await eventually(lambda: up_to_date(proxy) == 2)
    assert proxy.state.presence.end_all() == 2
    for status, got in await asyncio.gather(*members):
        assert status == 200 and texts(got) == ["<0>"] and got.endswith(b"data: [DONE]\n\n") and b"stopping" in got
    await eventually(runs(fake_vllm)[0].closed.is_set)
    assert proxy.sample("proxy_requests_total", outcome="drained") == 2


async def test_silence_brings_comments_to_every_sharer(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Also to one that joined in the middle; between events only."""
    proxy = await start_proxy(relay__keepalive_seconds=0.05)
    gate = asyncio.Event()
    fake_vllm.default = Reply(pieces=["<0>", "<1>"], gates={1: gate})
    first = soon(answer(proxy, stream(**DETERMINED), **who()))
    await eventually(lambda: proxy.state.flights.kept_bytes)
    second = soon(answer(proxy, stream(**DETERMINED), **who()))
    await asyncio.sleep(0.2)
    gate.set()
    for _, got in (await first, await second):
        assert b": keep-alive\n" in got and texts(got) == ["<0>", "<1>"]


async def test_where_no_place_is_free_all_sharers_hear_of_it(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """A flight takes one place, however many share it; without one every sharer is told to come again."""
    proxy = await start_proxy(admission__concurrent=1, admission__queue_seconds=0.05)
    gate = asyncio.Event()
    fake_vllm.default = Reply(gates={"headers": gate})
    running = soon(answer(proxy, chat("long"), **who("u0")))
    await arrived(fake_vllm, 1)
    refused = await asyncio.gather(*(answer(proxy, chat(**DETERMINED), **who()) for _ in range(3)))
    assert {status for status, _ in refused} == {503} and len(set(refused)) == 1
    gate.set()
    assert (await running)[0] == 200
    assert len(runs(fake_vllm)) == 1


async def test_a_fault_of_our_own_is_told_to_all_without_its_text(
    proxy: RunningProxy, fake_vllm: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    """A 500 for each, one line in the log, and the next request is served."""
    proxy.state.sessions, sessions = None, proxy.state.sessions  # type: ignore[assignment]  # what no code expects
    failed = await asyncio.gather(*(answer(proxy, chat("secret", seed=1), **who()) for _ in range(2)))
    proxy.state.sessions = sessions
    assert {status for status, _ in failed} == {500}
    assert "secret" not in caplog.text and "NoneType" not in str(failed)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == ["unexpected_error"]
    assert proxy.sample("proxy_requests_total", outcome="failed") == 2
    assert (await answer(proxy, chat("secret", seed=1), **who()))[0] == 200


async def test_each_client_has_its_own_request_id_and_time_to_first_token(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """Also who joins late: its time counts from its own request."""
    gate = asyncio.Event()
    fake_vllm.default = Reply(pieces=["<0>", "<1>"], gates={1: gate})

    async def named(name: str) -> tuple[str, str]:
        async with proxy.post(stream(**DETERMINED), **who(X_Request_Id=name)) as response:
            await response.read()
            return response.headers["X-Request-Id"], response.headers["X-Prefix-Proxy-Trail"]

    first = soon(named("one"))
    await eventually(lambda: up_to_date(proxy) == 1)
    second = soon(named("two"))
    await eventually(lambda: up_to_date(proxy) == 2)
    gate.set()
    (one, trail), (two, same) = await first, await second
    assert (one, two) == ("one", "two") and trail == same
    assert runs(fake_vllm)[0].headers["X-Request-Id"] == "one"
    assert proxy.sample("proxy_time_to_first_token_seconds_count") == 2
    assert 0 <= proxy.sample("proxy_time_to_first_token_seconds_sum") < 5


async def test_a_task_of_a_named_chat_waits_also_where_no_user_is_known(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """Holding shares nothing; so a chat id is enough."""
    gate = asyncio.Event()
    fake_vllm.default = Reply(gates={"headers": gate})
    named = {"X_OpenWebUI_Chat_Id": "c1"}
    asked = soon(answer(proxy, chat("hi"), **named))
    await arrived(fake_vllm, 1)
    task = soon(answer(proxy, chat("tags"), **named, X_OpenWebUI_Task="tags_generation"))
    await eventually(lambda: len(proxy.state.holding) == 1)
    gate.set()
    assert (await asked)[0] == (await task)[0] == 200
    assert [seen.body["messages"][-1]["content"] for seen in runs(fake_vllm)] == ["hi", "tags"]
