"""Token counts: as vLLM makes them, kept, asked for once, and never a reason to wait or to fail."""

import asyncio
from typing import Any

import pytest

from proxy.core.estimate import upper_bound
from proxy.core.text import digest
from proxy.upstream import tokens
from proxy.upstream.tokens import Breaker, Count, TokenCounter
from proxy.upstream.vllm import TOKENIZE_BYTES
from tests.bodies import eventually
from tests.conftest import RunningProxy, StartProxy
from tests.fake_engine import Rules, Vocabulary, render
from tests.fake_replies import Hang, Raw, Reply, json_error
from tests.fake_vllm import FakeVllm

TEXTS = ["猫" * 100, "👩‍👩‍👧" * 20, '{"a":[1,2,3]}' * 50, "%$" * 100, "word " * 100, "", "\r\n\t x", "\u200bok"]
TOOL = {"type": "function", "function": {"name": "f", "description": "does it", "parameters": {}}}


def user(text: str) -> list[dict[str, Any]]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]


async def counter_of(proxy: RunningProxy) -> TokenCounter:
    """Return the counter of a proxy that has found its vLLM."""
    await proxy.state.models.get(wait_seconds=5)
    return proxy.state.counter


async def count(counter: TokenCounter, messages: list[dict[str, Any]], **more: Any) -> Count:
    """Count under a key made of all that is told."""
    return await counter.count("fake", messages, key=digest(repr((messages, more)).encode()), **more)


@pytest.mark.parametrize("text", TEXTS)
async def test_the_count_is_the_tokenizers(proxy: RunningProxy, text: str) -> None:
    """No ratio of bytes or characters comes near it for all of these (HT-12)."""
    found = await count(await counter_of(proxy), user(text))
    assert found == Count(len(Vocabulary().encode(render({"messages": user(text)}))), "vllm") and found.exact


@pytest.mark.parametrize(
    "fields",
    [
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "temperature": 1},
    ],
)
async def test_the_template_is_asked_with_the_requests_own_fields(
    proxy: RunningProxy, fake_vllm: FakeVllm, fields: dict[str, Any]
) -> None:
    """One token more for a generation prompt, or for thinking turned off, decides whether a prompt fits (HT-10)."""
    messages = [*user("q"), {"role": "assistant", "content": "so far"}]
    counter = await counter_of(proxy)
    found = await count(counter, messages, fields=fields, tools=[TOOL])
    assert found.tokens == len(Vocabulary().encode(render({"messages": messages, "tools": [TOOL], **fields})))
    asked = fake_vllm.of("/tokenize")[-1].body
    assert "temperature" not in asked and "reasoning_effort" not in asked
    if "chat_template_kwargs" in fields:
        assert asked["chat_template_kwargs"] == {"reasoning_effort": "low", "enable_thinking": False}


async def test_a_count_is_kept_and_equal_ones_at_once_are_counted_once(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """Ten requests of one long chat do not hold vLLM up ten times."""
    counter = await counter_of(proxy)
    before = len(fake_vllm.of("/tokenize"))
    found = await asyncio.gather(*(count(counter, user("hello there")) for _ in range(10)))
    again = await count(counter, user("hello there"))
    assert {*found, again} == {found[0]} and len(fake_vllm.of("/tokenize")) == before + 1
    assert proxy.sample("proxy_token_counts_total", how="vllm") == 1
    assert proxy.sample("proxy_token_counts_total", how="cached") == 1
    assert proxy.sample("proxy_token_count_seconds_count") == 1


async def test_one_that_leaves_does_not_take_the_count_from_the_others(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """The run goes on, for the one that still waits and for the cache."""
    gate = asyncio.Event()
    fake_vllm.answers["/tokenize"] = Raw(
        [gate, b'{"count":7,"tokens":[]}'], headers={"Content-Type": "application/json"}
    )
    counter = await counter_of(proxy)
    waiting = [proxy.state.tasks.spawn(count(counter, user("x")), name="t") for _ in range(2)]
    await eventually(lambda: fake_vllm.of("/tokenize"))
    waiting[0].cancel()
    gate.set()
    assert await waiting[1] == Count(7, "vllm")
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]


@pytest.mark.parametrize("answer", [json_error(404, "Not Found"), json_error(500, "x"), Raw([b"<html>"]), Hang()])
async def test_when_tokenize_fails_the_count_is_a_sure_upper_bound(
    start_proxy: StartProxy, fake_vllm: FakeVllm, answer: Any
) -> None:
    """Soon, and after three failures without asking at all."""
    proxy = await start_proxy(tokens__wait_seconds=0.1)
    fake_vllm.answers["/tokenize"] = answer
    counter = await counter_of(proxy)
    for i in range(6):
        found = await count(counter, user(f"text {i}"))
        assert found == Count(upper_bound(user(f"text {i}")), "estimate") and not found.exact
    assert len(fake_vllm.of("/tokenize")) == tokens.FAILURES
    assert proxy.sample("proxy_token_counts_total", how="estimate") == 6


async def test_a_template_that_refuses_the_messages_is_no_failure_of_tokenize(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """Its 400 is remembered for these messages; others are asked about as before."""
    fake_vllm.answers["/tokenize"] = json_error(400, "roles must alternate")
    counter = await counter_of(proxy)
    for _ in range(2):
        for i in range(5):
            assert (await count(counter, user(str(i)))).how == "estimate"
    assert len(fake_vllm.of("/tokenize")) == 5
    del fake_vllm.answers["/tokenize"]
    assert (await count(counter, user("new"))).how == "vllm"


@pytest.mark.parametrize("text", ["x" * (TOKENIZE_BYTES + 1), "\x01" * (TOKENIZE_BYTES // 3), "猫" * TOKENIZE_BYTES])
async def test_a_huge_body_is_not_sent_to_be_tokenised(proxy: RunningProxy, fake_vllm: FakeVllm, text: str) -> None:
    """vLLM tokenises in one thread for everyone: also where only the JSON of it is huge."""
    counter = await counter_of(proxy)
    assert (await count(counter, user(text))).how == "estimate"
    assert fake_vllm.of("/tokenize") == []


async def test_a_huge_body_does_not_hold_up_the_loop(proxy: RunningProxy) -> None:
    """Whatever its size, others are served meanwhile."""
    counter = await counter_of(proxy)
    loop, slowest, running = asyncio.get_running_loop(), 0.0, True

    async def beat() -> None:
        nonlocal slowest
        while running:
            before = loop.time()
            await asyncio.sleep(0.001)
            slowest = max(slowest, loop.time() - before)

    beating = proxy.state.tasks.spawn(beat(), name="beat")
    await counter.count("fake", user("猫" * 10_000_000), key=b"k" * 16)
    running = False
    await beating
    assert slowest < 0.25  # without a thread it is above that on any machine; a shared one adds its own pauses


async def test_a_model_that_vllm_does_not_list_is_not_asked_about(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Names from outside fill neither vLLM's log nor our memory."""
    counter = await counter_of(proxy)
    found = await counter.count("gpt-9", user("x"), key=b"k" * 16)
    assert found.how == "estimate" and fake_vllm.of("/tokenize") == []
    assert counter.known("gpt-9", b"k" * 16) is None


async def test_images_are_never_tokenised_and_count_what_usage_showed(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """/tokenize knows only their placeholder, and their bytes are no text (LL-07)."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2_550_000}}
    message = [{"role": "user", "content": [{"type": "text", "text": "what is it"}, picture]}]
    counter = await counter_of(proxy)
    text = len(Vocabulary().encode(render({"messages": user("what is it")})))
    found = await count(counter, message)
    assert (found.tokens, found.how, found.exact) == (text + 1536, "vllm", False)
    assert len(fake_vllm.of("/tokenize")[-1].raw) < 500
    counter.learn_image("fake", images=2, text_tokens=100, prompt_tokens=301)
    counter.learn_image("fake", images=1, text_tokens=100, prompt_tokens=110)
    counter.learn_image("fake", images=1, text_tokens=0, prompt_tokens=10**9)
    counter.learn_image("gpt-9", images=1, text_tokens=0, prompt_tokens=9)
    assert counter.per_image("fake") == 101 and counter.per_image("gpt-9") == 1536


async def test_an_answer_shows_what_an_image_counts(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """vLLM's usage has it, less what the text alone has; only so many answers are looked at."""
    fake_vllm.rules = Rules(multimodal=True)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {"model": "fake", "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, picture]}]}
    text = len(Vocabulary().encode(render({"messages": user("see")})))
    usage = {"prompt_tokens": text + 900, "completion_tokens": 1, "total_tokens": text + 901}
    fake_vllm.default = Reply(usage=usage)
    proxy = await start_proxy()
    counter = await counter_of(proxy)
    for _ in range(3):
        async with proxy.post(body) as answer:
            assert answer.status == 200
    await eventually(lambda: counter.per_image("fake") == 900)


async def test_another_model_under_the_same_name_is_counted_anew(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """It may have another tokenizer; a vLLM that was only away for a moment costs no counts."""
    proxy = await start_proxy(models__refresh_seconds=0.05)
    counter = await counter_of(proxy)
    await count(counter, user("x"))
    fake_vllm.answers["/v1/models"] = Raw(
        [b'{"data":[{"id":"fake","root":"another","max_model_len":8192}]}'],
        headers={"Content-Type": "application/json"},
    )
    await eventually(lambda: (proxy.state.models.identity("fake") or ("",))[0] == "another")  # type: ignore[index]  # a tuple
    before = len(fake_vllm.of("/tokenize"))
    await count(counter, user("x"))
    assert len(fake_vllm.of("/tokenize")) == before + 1


async def test_the_oldest_counts_go_first(proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their last use, not by when they were made."""
    monkeypatch.setattr(tokens, "CACHED", 2)
    counter = await counter_of(proxy)
    for name in (b"a", b"b", b"a", b"c"):
        await counter.count("fake", user("x"), key=name * 16)
    assert [counter.known("fake", name * 16) is not None for name in (b"a", b"b", b"c")] == [True, False, True]


def test_the_breaker_rests_and_then_lets_one_failure_suffice() -> None:
    """A vLLM that still does not answer is left alone again at once; one that does starts afresh."""
    breaker = Breaker()
    for _ in range(tokens.FAILURES):
        assert not breaker.open(0.0)
        breaker.note(0.0, failed=True)
    assert breaker.open(0.0) and not breaker.open(tokens.REST_SECONDS)
    breaker.note(20.0, failed=True)
    assert breaker.open(20.0)
    breaker.note(40.0, failed=False)
    breaker.note(40.0, failed=True)
    assert not breaker.open(40.0)
