"""Predictions of what is reused, where a prompt leaves the last one and why: conversations whose cause is known."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.last_prompt import LastPrompt, Prompt, answered, prompt_of
from proxy.core.masked import around, masked
from proxy.core.past import MOST_EXCHANGES, MOST_PROMPTS, Outcome, Past
from proxy.core.prefix import CAUSES, SHORTFALLS, Prediction, judge, nearest, predict, usable_tokens
from proxy.core.prints import chunk_size, chunks_in, chunks_of, common_characters, common_in_chunks, prints_of
from tests.fake_engine import PrefixCache, Vocabulary, render

Messages = list[dict[str, Any]]
LONG = "The rule is to be brief and to the point. " * 10


def system(text: str) -> dict[str, Any]:
    """Return a system message."""
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    """Return a user message."""
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, Any]:
    """Return a reply."""
    return {"role": "assistant", "content": text}


def prompt(messages: Messages, *, name: str = "m", tools: bytes = b"", **rest: Any) -> Prompt:
    """Return what goes up."""
    return prompt_of(tuple(messages), rest, model=name, tools=tools)


def after(
    messages: Messages,
    *,
    before: LastPrompt | None = None,
    shared: int = 0,
    tokens: tuple[int, int] | None = (200, 40),
    reply: dict[str, Any] | None = None,
    cut: bool = False,
    **rest: Any,
) -> LastPrompt:
    """Return a prompt that was answered."""
    said = model("the answer") if reply is None else reply
    return answered(prompt(messages, **rest), before, shared, tokens=tokens, reply=said, cut=cut)


TALK: Messages = [system(LONG), user("one"), model("first"), user("two"), model("second"), user("three")]


def found(last: Messages, now: Messages, **options: Any) -> Prediction:
    """Return the prediction for `now` after `last` with the text of both known."""
    return predict(after(last), prompt(now), 16, texts=[*last, model("the answer")], **options)


def place(prediction: Prediction) -> tuple[str, int | None, int | None]:
    """Return cause, message and character."""
    return prediction.cause, prediction.message, prediction.character


def test_a_clock_in_the_system_message_is_found_to_the_character() -> None:
    """PC-01."""
    texts = [f"You help. Now: 2026-01-02 10:00:0{second} UTC. Rules: be brief." for second in (1, 9)]
    now = [system(texts[1]), user("hi"), model("hello"), user("again")]
    assert place(found([system(texts[0]), user("hi")], now)) == ("system", 0, 33)


def test_a_memory_that_grows_is_found_to_the_character() -> None:
    """PC-05."""
    begin = "Base rules.\n<memory_context>\n- likes tea\n"
    now = [system(begin + "- has a cat\n</memory_context>"), user("a"), model("b"), user("c")]
    assert place(found([system(begin + "</memory_context>"), user("a")], now)) == ("system", 0, 41)


def test_a_system_message_that_appears_or_goes_is_a_system_cause() -> None:
    assert place(found([user("one")], [system("s"), user("one")])) == ("system", 0, 0)
    assert place(found([system("s"), user("one")], [user("one"), model("first"), user("x")])) == ("system", 0, 0)


def test_an_edited_message_is_an_edit_whoever_wrote_it() -> None:
    assert place(found(TALK, [*TALK[:3], user("twO"), model("other"), user("x")])) == ("edited", 3, 2)
    assert place(found(TALK, [*TALK[:2], model("firsT"), *TALK[3:], model("the answer"), user("x")])) == (
        "edited",
        2,
        4,
    )


def test_a_message_deleted_in_the_middle_is_an_edit() -> None:
    assert found(TALK, [*TALK[:3], TALK[5], model("the answer"), user("x")]).cause == "edited"


@pytest.mark.parametrize("mark", [[], [user("[earlier messages were left out]")]])
def test_turns_gone_after_the_head_were_trimmed(mark: Messages) -> None:
    """With a sentence in their place, or without."""
    now = [TALK[0], *mark, *TALK[3:], model("the answer"), user("four")]
    prediction = found(TALK, now)
    assert (prediction.cause, prediction.message) == ("trimmed", 1)


def test_what_the_proxy_cut_itself_is_trimmed_wherever_it_was() -> None:
    assert found(TALK, [*TALK[:3], TALK[5], user("x")], trimming=True).cause == "trimmed"


def test_a_chat_of_which_nothing_is_remembered_has_expired() -> None:
    assert predict(None, prompt(TALK), 16).cause == "expired"
    assert predict(None, prompt(TALK[:2]), 16).cause == ""


@pytest.mark.parametrize(
    ("cause", "fields"),
    [
        ("model", {"name": "other"}),
        ("salt", {"cache_salt": "ab"}),
        ("template", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("tools", {"tools": b"digest of other tools"}),
    ],
)
def test_what_stands_before_all_messages_takes_the_whole_prompt(cause: str, fields: dict[str, Any]) -> None:
    prediction = predict(after(TALK), prompt([*TALK, model("the answer"), user("x")], **fields), 16)
    assert place(prediction) == (cause, None, None)
    assert prediction.tokens == prediction.sure_tokens == 0


def test_the_end_of_a_prompt_may_change_without_a_break() -> None:
    """A continued answer differs in what follows the last message, which no later prompt holds."""
    fields: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert predict(after(TALK, cut=True), prompt([*TALK, model("the answer")], **fields), 16).cause == ""


@pytest.mark.parametrize("told", ["the answer ", "\nthe answer"])
def test_a_reply_told_with_other_white_space_is_retokenised(told: str) -> None:
    assert found(TALK, [*TALK, model(told), user("x")]).cause == "retokenised"


def test_arguments_spelled_anew_are_retokenised() -> None:
    def call(arguments: str) -> dict[str, Any]:
        function = {"name": "weather", "arguments": arguments}
        return {**model(""), "tool_calls": [{"id": "1", "type": "function", "function": function}]}

    last = after(TALK, reply=call('{"city": "Paris"}'))
    assert predict(last, prompt([*TALK, call('{"city":"Paris"}'), user("x")]), 16).cause == "retokenised"
    assert predict(last, prompt([*TALK, call('{"city": "Paris"}'), user("x")]), 16).cause == ""


def test_thinking_left_out_of_the_history_is_the_template() -> None:
    """In the text of the answer, and in a field of its own."""
    thought = {**model("the answer"), "reasoning_content": "let me see"}
    for reply in (thought, model("<think>let me see</think>the answer")):
        prediction = predict(after(TALK, reply=reply), prompt([*TALK, model("the answer"), user("x")]), 16)
        assert (prediction.cause, prediction.tokens) == ("template", 192)
    assert predict(after(TALK, reply=thought), prompt([*TALK, thought, user("x")]), 16).cause == ""


def test_another_answer_in_the_place_of_the_generated_one_is_an_edit() -> None:
    assert place(found(TALK, [*TALK, model("the other"), user("x")])) == ("edited", 6, 4)


def test_a_difference_outside_the_text_is_unknown() -> None:
    last = [*TALK[:3], {**user("two"), "name": "ann"}, *TALK[4:]]
    assert place(found(last, [*TALK, model("the answer"), user("x")])) == ("unknown", 3, None)


def test_a_prompt_that_only_grew_shares_all_and_the_answer_but_its_last_token() -> None:
    prediction = found(TALK, [*TALK, model("the answer"), user("x")])
    assert place(prediction) == ("", None, None)
    assert (prediction.messages, prediction.tokens, prediction.sure_tokens) == (7, 224, 224)  # of 239


def test_the_same_prompt_again_never_counts_whole() -> None:
    prediction = predict(after(TALK, tokens=(192, 40)), prompt(TALK), 16)
    assert (prediction.tokens, prediction.cause) == (176, "")


def test_a_stopped_answer_told_in_part_is_no_break() -> None:
    last = after(TALK, cut=True, tokens=None, reply=model("the answer is lo"))
    assert predict(last, prompt([*TALK, model("the answer is"), user("x")]), 16).cause == ""


def test_counts_of_earlier_turns_make_an_edit_exact() -> None:
    """The marks of each turn hold while the messages before them do."""
    first = after(TALK[:2], tokens=(100, 10), reply=model("first"))
    second = after(TALK[:4], before=first, shared=3, tokens=(130, 20), reply=model("second"))
    third = after(TALK, before=second, shared=5, tokens=(170, 20))
    assert [tuple(mark) for mark in third.marks] == [(2, 100), (3, 110), (4, 130), (5, 150), (6, 170)]
    edited = predict(third, prompt([*TALK[:3], user("zwei")]), 16)
    assert (edited.messages, edited.sure_tokens, edited.cause) == (3, 96, "edited")
    back = predict(third, prompt(TALK[:4]), 16)
    assert (back.messages, back.tokens, back.cause) == (4, 128, "")


def test_without_text_the_place_is_that_of_its_chunk() -> None:
    text = LONG * 3
    last, now = after([system(text), user("hi")]), prompt([system(text[:700] + "#" + text[701:]), user("hi")])
    prediction = predict(last, now, 16)
    assert prediction.character is not None and not prediction.located
    assert 700 - chunk_size(len(text)) < prediction.character <= 700


def test_a_failed_turn_without_figures_is_estimated_and_never_sure() -> None:
    last = after(TALK, tokens=None)
    prediction = predict(last, prompt([*TALK, model("the answer"), user("x")]), 16)
    assert prediction.sure_tokens == 0 < prediction.tokens


def test_branches_are_compared_with_their_own_last_prompt() -> None:
    """The same model picked twice answers twice, and both chats go on."""
    a, b = after([*TALK, model("A"), user("x")]), after([*TALK, model("B"), user("x")])
    now = prompt([*TALK, model("A"), user("x"), model("the answer"), user("y")])
    assert nearest((a, b), now) is a
    assert nearest((), now) is None
    past = Past()
    for each in (a, b, after(TALK), after(TALK[:4])):
        past.add_prompt(each, None)
    assert len(past.prompts) == MOST_PROMPTS and a not in past.prompts
    past.add_prompt(a, b)
    assert b not in past.prompts and past.size > 0


def test_the_last_twenty_exchanges_come_back_as_they_were() -> None:
    """Packed in between: nothing known, everything known, and more than fits."""
    past, empty = Past(), Outcome(1.5, 3, None, None, None, None, None, None, 16, True, "", "", (), None)
    for number in range(30):
        past.add_outcome(empty._replace(messages=number))
    place = (0, "system", 33, True, "xx 00", None)
    full = Outcome(2.5, 9, 400, 30, 256, 8, 288, 272, 32, False, "system", "eviction", ("salt",), place)
    past.add_outcome(full)
    outcomes = past.outcomes()
    assert len(outcomes) == MOST_EXCHANGES and outcomes[0] == empty._replace(messages=11) and outcomes[-1] == full
    past.add_outcome(full._replace(messages=10**6, prompt_tokens=10**12))
    assert past.outcomes()[-1].messages == 0xFFFF and past.size < 3000


def expected(**fields: Any) -> Prediction:
    """Return a prediction after a prompt of 200 tokens and an answer of 80."""
    return Prediction(16, 7, 272, 272, reply_at=200, reply_tokens=80, **fields)


@pytest.mark.parametrize(
    ("cached", "cause"),
    [
        (272, ""), (288, ""), (0, "eviction"), (96, "eviction"), (160, "eviction"), (176, "template"),
        (192, "template"), (208, "retokenised"), (256, "retokenised"),
    ],
)  # fmt: skip
def test_a_shortfall_is_judged_by_where_the_cached_part_ends(cached: int, cause: str) -> None:
    """Before the generation prompt blocks were evicted; at it the template did it; within the reply its tokens."""
    assert judge(expected(), cached, prompt_tokens=400) == cause


def test_the_first_block_of_a_short_reply_is_the_template_only_when_it_was_before() -> None:
    short = Prediction(16, 7, 208, 208, reply_at=200, reply_tokens=12)
    assert judge(short, 192) == "retokenised"
    assert judge(short, 192, repeated=True) == "template"


def test_thinking_dropped_from_an_earlier_turn_is_the_template() -> None:
    """At the begin of that turn's answer; without thinking the same figure means eviction."""
    assert judge(expected(thought=True, starts=(100, 200)), 96) == "template"
    assert judge(expected(thought=False, starts=(100, 200)), 96) == "eviction"


def test_an_estimate_is_never_held_against_vllm() -> None:
    assert judge(Prediction(16, 3, 160, 96, reply_at=200), 112) == ""


def test_an_empty_think_block_dropped_from_the_history_is_found_in_rendered_tokens() -> None:
    """PC-10: the messages are a prefix, the tokens are not; what vLLM had cached says so."""
    first = ["<sys>", "S", "<u>", "Q1", "<as>", "<think>", "</think>"]
    second = ["<sys>", "S", "<u>", "Q1", "<as>", "A1", "<u>", "Q2", "<as>", "<think>", "</think>"]
    words = Vocabulary()
    ids = [[words._id(word) for word in each] for each in (first, second)]
    cache = PrefixCache(2)
    cache.store([*ids[0], words._id("A1")])
    hit = cache.hit(ids[1])
    assert hit == 4
    last = after([system("S"), user("Q1")], tokens=(7, 2), reply=model("A1"))
    prediction = predict(last, prompt([system("S"), user("Q1"), model("A1"), user("Q2")]), 2)
    assert (prediction.cause, prediction.messages, prediction.sure_tokens) == ("", 3, 8)
    assert judge(prediction, hit, prompt_tokens=len(second)) == "template"


def test_the_closed_sets_hold_every_cause() -> None:
    assert set(SHORTFALLS) == {"eviction", "template", "retokenised"}
    assert len(CAUSES) == len(set(CAUSES)) == 10


WORDS = st.text("ab 1\né你", max_size=150)


@given(WORDS, WORDS, WORDS)
def test_a_place_by_chunks_is_before_the_place_by_characters(shared: str, a: str, b: str) -> None:
    """By less than a chunk, and exact where one text is the begin of the other."""
    old, new = shared + a, shared + b
    exact, rough = common_characters(old, new), common_in_chunks(chunks_of(old), len(old), new)
    assert old[:exact] == new[:exact] and (exact == min(len(old), len(new)) or old[exact] != new[exact])
    assert exact - chunk_size(len(old)) < rough <= exact
    assert len(chunks_of(old)) == 4 * chunks_in(len(old))


def test_a_long_text_has_at_most_64_chunks() -> None:
    assert [chunks_in(n) for n in (0, 1, 128, 129, 8192, 8193, 1_000_000)] == [0, 1, 1, 2, 64, 33, 62]


@st.composite
def talks(draw: st.DrawFn) -> Messages:
    """Draw a conversation that ends with a user."""
    pairs = draw(st.lists(st.tuples(WORDS, WORDS), max_size=4))
    out = [system(draw(WORDS))] if draw(st.booleans()) else []
    for asked, said in pairs:
        out += [user(asked), model(said)]
    return [*out, user(draw(WORDS))]


# An answer that begins with a line feed is one token with the line feed before it: that is retokenised text.
@given(talks(), st.lists(st.tuples(st.text("ab 1é你", max_size=150), WORDS), min_size=1, max_size=4))
def test_on_append_only_chats_the_prediction_is_what_a_block_cache_has(
    begin: Messages, turns: Sequence[tuple[str, str]]
) -> None:
    """Exactly, turn after turn, against the blocks of a real cache over rendered prompts."""
    words, cache, last, told = Vocabulary(), PrefixCache(4), None, begin
    for said, asked in turns:
        for_now = prompt(told)
        prediction = predict(last, for_now, 4)
        tokens = words.encode(render({"messages": told}))
        if last is not None:
            assert prediction.tokens == prediction.sure_tokens == cache.hit(tokens)
        answer = words.encode(said)
        cache.store([*tokens, *answer])
        counted = (len(tokens), len(answer) + 1)
        last = answered(for_now, last, prediction.messages, tokens=counted, reply=model(said))
        told = [*told, model(said), user(asked)]


@given(talks(), talks())
def test_any_two_prompts_can_be_compared(a: Messages, b: Messages) -> None:
    """The shared messages are equal, the place is where they part, and no estimate is above what is there."""
    prediction = predict(after(a), prompt(b), 16)
    assert a[: prediction.messages] == b[: prediction.messages] or prediction.messages == len(a) + 1
    assert prediction.tokens >= prediction.sure_tokens >= 0
    assert prediction.tokens <= 256 and prediction.cause in ("", *CAUSES)


def test_equal_messages_have_equal_prints_whatever_the_order_of_their_fields() -> None:
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    same: dict[str, Any] = {"tool_calls": [], "content": None, "role": "assistant"}
    assert prints_of([call]) == prints_of([same]) != prints_of([{**call, "name": "x"}])


def test_a_mask_shows_shape_and_no_text() -> None:
    assert masked("Ann's 3 cats: über 你好 – नमस्ते 🎉\n\t[x] 10:05") == "xxx'x 0 xxxx: xxxx xx – xxxxxx x\n\t[x] 00:00"
    assert around("x" * 100, 50) == "…" + "x" * 80 + "…"


def test_usable_tokens_are_full_blocks_and_never_the_last_token() -> None:
    assert [usable_tokens(n, 16) for n in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 16, 16, 32]
