"""Predictions over real sockets: what should be reused, what vLLM says, and what the operator is shown of it."""

from typing import Any

from proxy.core.text import length_of
from tests.conftest import RunningProxy, StartProxy
from tests.fake_replies import Reply
from tests.fake_vllm import FakeVllm
from tests.test_rewriting import head, model, send, user

RULE = "Answer in one sentence. " * 20


async def shown(proxy: RunningProxy) -> list[dict[str, Any]]:
    """Return the exchanges of the only session, oldest first."""
    (info,) = proxy.state.sessions.list()
    async with proxy.session.get(f"{proxy.url}/v1/internal/sessions/{info.id}") as answer:
        assert answer.status == 200
        found: list[dict[str, Any]] = (await answer.json())["exchanges"]
        return found


async def converse(proxy: RunningProxy, fake: FakeVllm, turns: int, told: list[Any]) -> None:
    """Tell `turns` more turns of a chat that only grows."""
    for _ in range(turns):
        turn = len(told)
        told.append(user(f"question {turn} " * (3 + turn)))
        fake.default = Reply(text=f"answer {turn} " * (5 + turn) + "end")
        await send(proxy, fake, told)
        told.append(model(f"answer {turn} " * (5 + turn) + "end"))


async def test_an_append_only_chat_reuses_exactly_what_was_predicted(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """In whole blocks, the answer included but for its last token."""
    await converse(proxy, fake_vllm, 6, [{"role": "system", "content": RULE}])
    exchanges = await shown(proxy)
    assert [each["cause"] for each in exchanges] == [None] * 6
    for each in exchanges[1:]:
        assert each["predicted_tokens"] == each["sure_tokens"] == each["cached_tokens"] > 0
        assert each["shortfall"] is None and each["block_tokens"] == 16
    assert proxy.sample("proxy_predicted_cached_tokens_total") == proxy.sample("proxy_actual_cached_tokens_total") > 0


async def test_a_regenerated_answer_reuses_all_but_the_last_block(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    told: list[Any] = []
    await converse(proxy, fake_vllm, 2, told)
    await send(proxy, fake_vllm, told[:-1])
    again = (await shown(proxy))[-1]
    assert again["cause"] is None and again["predicted_tokens"] == again["cached_tokens"]
    assert again["cached_tokens"] == (again["prompt_tokens"] - 1) // 16 * 16


async def test_an_emptied_cache_is_called_eviction(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    told: list[Any] = [{"role": "system", "content": RULE}]
    await converse(proxy, fake_vllm, 2, told)
    fake_vllm.cache.hashes.clear()
    await converse(proxy, fake_vllm, 1, told)
    last = (await shown(proxy))[-1]
    assert (last["cause"], last["shortfall"], last["cached_tokens"]) == (None, "eviction", 0)
    assert proxy.sample("proxy_prefix_shortfalls_total", cause="eviction") == 1
    assert proxy.sample("proxy_predicted_cached_tokens_total") > proxy.sample("proxy_actual_cached_tokens_total")


async def test_a_clock_in_the_system_prompt_is_located_and_shown_masked(
    start_proxy: StartProxy, fake_vllm: FakeVllm
) -> None:
    """To the character, in a form that holds no text (PC-01)."""
    proxy = await start_proxy(steps__move_volatile=False)
    await send(proxy, fake_vllm, [head(1), user("hi")])
    await send(proxy, fake_vllm, [head(9), user("hi"), model("ok"), user("again")])
    last = (await shown(proxy))[-1]
    assert last["cause"] == "system"
    place = last["break"]
    assert (place["message"], place["character"], place["exact"], place["role"]) == (0, 33, True, "system")
    assert place["before"] == "xxx xxxx. xxx: 0000-00-00 00:00:00 xxx. xxxxx: xx xxxxx."
    assert place["before"] == place["now"]
    assert proxy.sample("proxy_prefix_breaks_total", cause="system") == 1


async def test_a_task_between_two_turns_is_not_what_the_chat_is_compared_with(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """The third request is compared with the first (PC-14)."""
    told: list[Any] = []
    await converse(proxy, fake_vllm, 1, told)
    task = "### Task:\nGenerate a concise, 3-5 word title\n<chat_history>\nUSER: question\n</chat_history>"
    async with proxy.post(
        {"model": "fake", "messages": [user(task)], "max_tokens": 1000},
        X_OpenWebUI_User_Id="u",
        X_OpenWebUI_Chat_Id="c",
    ) as answer:
        assert answer.status == 200
    await converse(proxy, fake_vllm, 1, told)
    exchanges = await shown(proxy)
    assert len(exchanges) == 2 and exchanges[1]["cause"] is None
    assert exchanges[1]["predicted_tokens"] == exchanges[1]["cached_tokens"]


async def test_a_template_that_drops_the_end_of_a_prompt_is_named(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """An empty think block ends each prompt and is in no later one (PC-10): every turn falls short at its answer."""
    fake_vllm.generation_end = "<think>\n\n</think>\n\n"
    await converse(proxy, fake_vllm, 5, [{"role": "system", "content": RULE}])
    exchanges = await shown(proxy)
    assert [each["cause"] for each in exchanges] == [None] * 5
    assert {each["shortfall"] for each in exchanges[1:]} == {"template"}
    assert proxy.sample("proxy_prefix_shortfalls_total", cause="template") == 4


async def test_text_that_vllm_tokenises_anew_is_named(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The answer's figures fall short within it."""
    told: list[Any] = [{"role": "system", "content": RULE}]
    fake_vllm.default = Reply(pieces=["word "] * 20 + ["hal", "ves"] + [" word"] * 20)
    for turn in range(2):
        await send(proxy, fake_vllm, [*told, user(f"question {turn}")])
        told += [user(f"question {turn}"), model("".join(fake_vllm.default.pieces or ()))]
        prompt = fake_vllm.generations[-1]
        drawn = [*prompt.tokens, *fake_vllm.vocabulary.encode("word " * 20), *fake_vllm.vocabulary.encode("hal")]
        kept = drawn[: len(drawn) // 16 * 16]
        fake_vllm.cache.hashes.clear()
        fake_vllm.cache.store(kept)
    assert (await shown(proxy))[-1]["shortfall"] == "retokenised"


async def test_only_twenty_exchanges_are_kept_and_the_list_has_none(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    for _ in range(23):
        await send(proxy, fake_vllm, [user("hi")])
    assert len(await shown(proxy)) == 20
    async with proxy.session.get(f"{proxy.url}/v1/internal/sessions") as answer:
        (info,) = (await answer.json())["sessions"]
    assert "exchanges" not in info


async def test_no_text_of_a_chat_is_in_what_an_operator_sees(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """Neither of the messages nor of the answer, whatever broke."""
    proxy = await start_proxy(profile="safe")
    fake_vllm.default = Reply(text="canary answers at length")
    await send(proxy, fake_vllm, [user("canary one"), model("canary two"), user("Ünïcode canary 你好 नमस्ते 7")])
    await send(proxy, fake_vllm, [user("canary One"), model("canary two"), user("again")])
    (info,) = proxy.state.sessions.list()
    async with proxy.session.get(f"{proxy.url}/v1/internal/sessions/{info.id}") as answer:
        text = await answer.text()
    assert "edited" in text
    assert not any(word in text for word in ("canary", "你", "नम", "स", "answers", "again"))


async def test_a_fallen_back_request_is_compared_as_it_went(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """What is kept as the last prompt is what vLLM has, so the next turn is predicted well."""
    told: list[Any] = []
    await converse(proxy, fake_vllm, 3, told)
    (session,) = proxy.state.sessions._live.values()
    assert len(session.past.prompts) == 1
    assert sum(session.past.prompts[0].lengths) == length_of(told[:-1])


async def test_a_chat_that_goes_on_with_another_model_says_so(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    told: list[Any] = []
    await converse(proxy, fake_vllm, 1, told)
    await send(proxy, fake_vllm, [*told, user("more")], model="")
    assert proxy.sample("proxy_prefix_breaks_total") == 0
    async with proxy.post(
        {"model": "other", "messages": [*told, user("more")]}, X_OpenWebUI_User_Id="u", X_OpenWebUI_Chat_Id="c"
    ) as answer:
        assert answer.status == 404
    assert proxy.sample("proxy_prefix_breaks_total", cause="model") == 1


async def test_a_chat_that_the_proxy_forgot_is_called_expired(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    told: list[Any] = []
    await converse(proxy, fake_vllm, 1, told)
    await proxy.state.sessions.clear(everything=True)
    await converse(proxy, fake_vllm, 1, told)
    assert (await shown(proxy))[-1]["cause"] == "expired"


async def test_a_failure_to_explain_costs_no_answer(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    proxy.state.models.block_size = 0  # never given by vLLM
    proxy.state.last_texts = None  # type: ignore[assignment]  # what must not happen
    told: list[Any] = []
    await converse(proxy, fake_vllm, 1, told)
    assert proxy.sample("proxy_step_failures_total", step="record") == 1
