"""Tasks over sockets: when they go, what of their chat goes with them, and what vLLM has left to compute."""

import asyncio
from typing import Any

import pytest

from proxy.chats import KEPT_SECONDS, Chats
from tests.bodies import eventually
from tests.conftest import RunningProxy, StartProxy
from tests.fake_engine import Rules
from tests.fake_faults import Seen
from tests.fake_replies import Call, Reply, json_error
from tests.fake_vllm import FakeVllm
from tests.flights import arrived, runs, who
from tests.told import FOLLOW_UPS, QUERY, TAGS, TITLE, model, sent, system, user
from tests.virtual_time import soon

PASTE = "Sum this up:\n" + "\n".join(f"line {n} of a long paste" for n in range(120))
REPLY = "The paste has one hundred and twenty lines, which are all alike."
TRAIL = "X-Prefix-Proxy-Trail"
LEADS = {
    TITLE: "### Task:\nGenerate a concise title summarizing the chat history.",
    TAGS: "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history.",
    FOLLOW_UPS: "### Task:\nSuggest 3-5 relevant follow-up questions that the user might ask next.",
    QUERY: "### Task:\nAnalyze the chat history to determine the necessity of generating search queries.",
}
GUIDELINES = "### Guidelines:\n- Be short.\n### Chat History:"


def quoting(task: str, *said: tuple[str, str], reply: str = REPLY) -> dict[str, Any]:
    """Return a task's message as Open WebUI makes it: the template, and in it the chat so far."""
    turns = said or ((PASTE, reply),)
    history = "\n".join(f"USER: {question}\nASSISTANT: {answered}" for question, answered in turns)
    return user(f"{LEADS[task]}\n{GUIDELINES}\n<chat_history>\n{history}\n</chat_history>")


def instruction(task: str) -> dict[str, Any]:
    """Return what stays of it behind the chat."""
    return user(f"{LEADS[task]}\n{GUIDELINES}\n<chat_history>\n(the conversation above)\n</chat_history>")


async def asked(proxy: RunningProxy, fake: FakeVllm, task: str, message: dict[str, Any], **more: Any) -> Seen:
    """Send a task of chat c; return it as it went up."""
    messages = [*more.pop("head", ()), message]
    await sent(proxy, fake, messages, of=who(chat="c", task=task), stream=False, **more)
    return runs(fake)[-1]


@pytest.fixture(autouse=True)
def long_answer(fake_vllm: FakeVllm) -> None:
    """Every answer is the same, unless a test says otherwise."""
    fake_vllm.default = Reply(REPLY)


async def test_a_title_that_comes_first_goes_after_the_answer_and_on_its_prompt(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """Open WebUI sends it 0.3 s before the chat request, with nothing said by the assistant yet."""
    end = asyncio.Event()
    fake_vllm.replies.append(Reply(REPLY, gates={"end": end}))
    title = soon(asked(proxy, fake_vllm, TITLE, quoting(TITLE, (PASTE, ""))))
    await eventually(lambda: len(proxy.state.holding) == 1)
    chat = soon(sent(proxy, fake_vllm, [system("Be brief."), user(PASTE)], stream=True))
    await arrived(fake_vllm, 1)
    await eventually(lambda: runs(fake_vllm)[0].generated)
    assert len(runs(fake_vllm)) == 1 and len(proxy.state.holding) == 1
    end.set()
    await chat
    seen, first = await title, runs(fake_vllm)[0]
    assert seen.body["messages"] == [system("Be brief."), user(PASTE), model(REPLY), instruction(TITLE)]
    assert seen.hit >= first.n - fake_vllm.block_size
    assert seen.n - seen.hit < first.n // 4
    assert proxy.sample("proxy_task_held_seconds_count") == 1


@pytest.mark.parametrize("named", [True, False], ids=["task header", "lead sentence"])
async def test_tags_and_follow_ups_go_on_the_prompt_of_their_chat(
    proxy: RunningProxy, fake_vllm: FakeVllm, named: bool
) -> None:
    """After the answer and at once; each costs its instruction, and the chat's next turn loses nothing."""
    await sent(proxy, fake_vllm, [user(PASTE)])
    first = runs(fake_vllm)[0]
    for task in (TAGS, FOLLOW_UPS, TITLE):
        of = who(chat="c", task=task) if named else who(chat="c")
        await sent(proxy, fake_vllm, [quoting(task)], of=of)
        seen = runs(fake_vllm)[-1]
        assert seen.body["messages"] == [user(PASTE), model(REPLY), instruction(task)]
        assert seen.hit >= first.n and seen.n - seen.hit < 100
    await sent(proxy, fake_vllm, [user(PASTE), model(REPLY), user("And now?")])
    assert runs(fake_vllm)[-1].hit >= first.n


async def test_all_that_a_task_quotes_is_in_the_prompt_that_goes_up(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Several turns too, of which the quotation has the last ones only."""
    told = [system("Be brief."), user("Hello there."), model(REPLY), user(PASTE)]
    await sent(proxy, fake_vllm, told)
    message = quoting(TAGS, ("Hello there.", REPLY), (PASTE, REPLY))
    seen = await asked(proxy, fake_vllm, TAGS, message)
    assert seen.body["messages"] == [*told, model(REPLY), instruction(TAGS)]
    quoted = message["content"].split("<chat_history>")[1].split("</chat_history>")[0]
    lines = [line.removeprefix("USER: ").removeprefix("ASSISTANT: ") for line in quoted.split("\n")]
    assert [line for line in lines if line not in seen.prompt] == []
    assert [line for line in message["content"].split("\n<chat")[0].split("\n") if line not in seen.prompt] == []


async def test_of_the_same_model_twice_the_quotation_says_which(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Two answers at once to one question: each task goes on the answer that it quotes."""
    both, texts = asyncio.Event(), ("One answer. " + REPLY, "Another answer. " + REPLY)
    fake_vllm.replies.extend(Reply(text, gates={"headers": both}) for text in texts)
    chats = []
    for number in range(2):
        of = who(chat="c", message=f"m{number}")
        chats.append(soon(sent(proxy, fake_vllm, [user(PASTE)], of=of, temperature=0.5 + number)))
        await arrived(fake_vllm, number + 1)
    both.set()
    await asyncio.gather(*chats)
    for text in (*texts, *texts):
        seen = await asked(proxy, fake_vllm, TAGS, quoting(TAGS, reply=text))
        assert seen.body["messages"] == [user(PASTE), model(text), instruction(TAGS)]
    other = quoting(TAGS, reply="A third answer.")
    assert (await asked(proxy, fake_vllm, TAGS, other)).body["messages"] == [other]


async def test_of_two_branches_the_newest_question_says_which(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """An edited message makes another chat of it."""
    edited = PASTE.replace("Sum this up", "Translate this")
    for text in (PASTE, edited):
        await sent(proxy, fake_vllm, [user(text)])
    for text in (PASTE, edited):
        seen = await asked(proxy, fake_vllm, TAGS, quoting(TAGS, (text, REPLY)))
        assert seen.body["messages"] == [user(text), model(REPLY), instruction(TAGS)]


async def test_what_leaks_of_a_preset_stands_in_the_prompt_once(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Its system message is the chat's own; its parameters stay the task's."""
    preset = system("You are a pirate.\nSpeak like one.")
    await sent(proxy, fake_vllm, [preset, user(PASTE)], temperature=1.5, top_k=3)
    seen = await asked(proxy, fake_vllm, TAGS, quoting(TAGS), head=[preset], temperature=1.5, max_tokens=77)
    assert seen.body["messages"] == [preset, user(PASTE), model(REPLY), instruction(TAGS)]
    assert (seen.body["temperature"], seen.body["max_tokens"], seen.body["stream"]) == (1.5, 77, False)
    assert "top_k" not in seen.body
    other = system("You are a pirate.\nSpeak like a parrot.")
    seen = await asked(proxy, fake_vllm, TAGS, quoting(TAGS), head=[other])
    assert seen.body["messages"] == [other, quoting(TAGS)]


async def test_tools_of_the_chat_go_along_and_are_not_to_be_called(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """They stand in its cached prompt; so do fields that the template renders."""
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "clock")]
    kwargs = {"enable_thinking": False}
    await sent(proxy, fake_vllm, [user(PASTE)], tools=tools, tool_choice="auto", chat_template_kwargs=kwargs)
    first = runs(fake_vllm)[0]
    seen = await asked(proxy, fake_vllm, TAGS, quoting(TAGS))
    assert seen.body["messages"] == [user(PASTE), model(REPLY), instruction(TAGS)]
    assert (seen.body["tools"], seen.body["tool_choice"]) == (tools, "none")
    assert seen.body["chat_template_kwargs"] == kwargs
    assert seen.hit >= first.n


async def test_a_loop_of_tools_is_part_of_the_prompt(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The task quotes question and answer; the calls between them stay where they are."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    fake_vllm.replies.append(Reply("", calls=[Call("weather", '{"city": "Paris"}', "1")]))
    await sent(proxy, fake_vllm, [user(PASTE)], tools=tools, stream=True)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
    looped = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    looped += [{"role": "tool", "tool_call_id": "1", "content": "sunny"}]
    await sent(proxy, fake_vllm, [user(PASTE), *looped], tools=tools, stream=True)
    second = runs(fake_vllm)[-1]
    seen = await asked(proxy, fake_vllm, TAGS, quoting(TAGS))
    assert seen.body["messages"] == [*second.body["messages"], model(REPLY), instruction(TAGS)]
    assert seen.hit >= second.n - fake_vllm.block_size


async def test_a_task_of_another_model_goes_as_it_came(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """That model has computed nothing of the chat."""
    await sent(proxy, fake_vllm, [user(PASTE)])
    fake_vllm.rules = Rules(model="small")
    seen = await asked(proxy, fake_vllm, TAGS, quoting(TAGS), model="small")
    assert (seen.body["model"], seen.body["messages"]) == ("small", [quoting(TAGS)])


async def test_another_users_chat_is_not_this_ones(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Whatever it quotes, under the same chat id; nor is another chat of the same user."""
    await sent(proxy, fake_vllm, [system("My secret."), user(PASTE)])
    for of in (who("u2", chat="c", task=TAGS), who(chat="d", task=TAGS), who(task=TAGS)):
        assert (await sent(proxy, fake_vllm, [quoting(TAGS)], of=of))["messages"] == [quoting(TAGS)]


async def test_where_vllms_cache_is_crowded_a_task_goes_as_it_came(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """What was cached is likely gone, so that the longer prompt would be computed whole."""
    fake_vllm.gauges.kv_cache_usage = 0.9
    assert not proxy.state.vllm.crowded  # asks
    await eventually(lambda: proxy.state.vllm.crowded)
    await sent(proxy, fake_vllm, [user(PASTE)])
    assert (await asked(proxy, fake_vllm, TAGS, quoting(TAGS))).body["messages"] == [quoting(TAGS)]


async def test_after_a_minute_a_task_goes_as_it_came(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """By then others may have used vLLM's cache."""
    now = [0.0]
    proxy.state.chats = Chats(lambda: now[0])
    await sent(proxy, fake_vllm, [user(PASTE)])
    now[0] = KEPT_SECONDS - 1
    assert len((await asked(proxy, fake_vllm, TAGS, quoting(TAGS))).body["messages"]) == 3
    now[0] = KEPT_SECONDS
    assert (await asked(proxy, fake_vllm, TITLE, quoting(TITLE))).body["messages"] == [quoting(TITLE)]


async def test_a_task_of_a_short_chat_goes_as_it_came(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """The head of its template is cached: the few words quoted are cheaper than the instruction."""
    fake_vllm.default = Reply("Hello.")
    await sent(proxy, fake_vllm, [user("Hi.")])
    task = quoting(TAGS, ("Hi.", "Hello."))
    assert (await asked(proxy, fake_vllm, TAGS, task)).body["messages"] == [task]


@pytest.mark.parametrize("settings", [{"steps__rehang_task": False}, {"profile": "safe"}], ids=str)
async def test_switched_off_every_task_goes_as_it_came(
    start_proxy: StartProxy, fake_vllm: FakeVllm, settings: dict[str, Any]
) -> None:
    """`steps.rehang_task`, and profile safe, which moves no text."""
    proxy = await start_proxy(**settings)
    await sent(proxy, fake_vllm, [user(PASTE)])
    assert (await asked(proxy, fake_vllm, TAGS, quoting(TAGS))).body["messages"] == [quoting(TAGS)]


async def test_a_task_that_is_acted_on_goes_as_it_came(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """Its answer must not change: search queries, and whatever else is not only shown."""
    await sent(proxy, fake_vllm, [user(PASTE)])
    assert (await asked(proxy, fake_vllm, QUERY, quoting(QUERY))).body["messages"] == [quoting(QUERY)]


async def test_the_trail_says_that_a_task_was_hung_on_its_chat(proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    """And the client reads the task's answer, nothing of the chat's."""
    await sent(proxy, fake_vllm, [user(PASTE)])
    fake_vllm.default = Reply('{"tags": ["Lines"]}')
    body = {"model": "fake", "messages": [quoting(TAGS)], "stream": False}
    async with proxy.post(body, **who(chat="c", task=TAGS)) as response:
        told = await response.json()
        assert "rehang_task" in response.headers[TRAIL].split(",")
    assert told["choices"][0]["message"]["content"] == '{"tags": ["Lines"]}'


async def test_a_template_that_refuses_the_longer_prompt_costs_two_tasks_a_try(
    proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    """The first refusal may have been of the priority; the client sees only the answer to the task as received."""
    await proxy.state.models.get(wait_seconds=5)
    await sent(proxy, fake_vllm, [user(PASTE)])
    refused = json_error(400, {"error": {"message": "template", "type": "BadRequestError", "code": 400}})
    fake_vllm.reply_to = lambda body: (
        refused if "(the conversation above)" in str(body.get("messages", ())[-1:]) else None
    )
    tries = []
    for task in (TITLE, TAGS, FOLLOW_UPS):
        before = len(runs(fake_vllm))
        assert (await asked(proxy, fake_vllm, task, quoting(task))).body["messages"] == [quoting(task)]
        tries.append(len(runs(fake_vllm)) - before)
    assert tries == [2, 2, 1]
