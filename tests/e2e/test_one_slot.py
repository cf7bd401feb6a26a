"""A real vLLM that answers one request at a time: the tasks of Open WebUI do not delay the answer that is read."""

import asyncio
import json
import statistics
import time
from typing import Any
from uuid import uuid4

import pytest

from tests.conftest import RunningProxy
from tests.e2e.conftest import StartProxyBefore
from tests.flights import who
from tests.told import FOLLOW_UPS, TAGS, TITLE, user

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),  # the first test may also make the environment
    pytest.mark.parametrize("vllm", ["smollm2-slot"], indirect=True, scope="session"),
]

MODEL = "smollm2"
CHATS = 15
"""Chats of each kind, in turns, after one of each that warms up."""
MOST_RATIO = 1.10
TITLE_LEAD_SECONDS = 0.1
"""How long before the chat request its title comes, which then has the one slot to itself."""
LINE = "Quay {n} was dredged in 19{n}, took ships of every flag, and its master lived to a great age by the sea.\n"
ANSWER_TOKENS, TASK_TOKENS = 8, 16


def question() -> str:
    """Return a question of some 600 tokens that begins as no other does, so that nothing of it is cached."""
    return f"{uuid4().hex} tells of a harbour.\n" + "".join(LINE.format(n=n) for n in range(10, 32))


async def first_token_of(proxy: RunningProxy, text: str, chat: str) -> tuple[float, str]:
    """Ask `text` in a new chat; return the seconds to the first token, and the answer."""
    body = {"model": MODEL, "messages": [user(text)], "stream": True, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    begun, first, said = time.perf_counter(), 0.0, ""
    async with proxy.post(body, **who(chat=chat, message=uuid4().hex)) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                deltas = [choice["delta"] for choice in json.loads(line[6:])["choices"]]
                piece = "".join(delta.get("content") or "" for delta in deltas)
                first = first or (time.perf_counter() - begun if piece else 0.0)
                said += piece
    assert first
    return first, said


async def task_of(proxy: RunningProxy, task: str, text: str, reply: str, chat: str) -> tuple[int, int]:
    """Send a task about a chat; return the tokens of its prompt, and how many of them were cached."""
    told = f"### Task:\nDo the {task} of the chat history.\n### Guidelines:\n- Be short.\n"
    told += f"<chat_history>\nUSER: {text}\nASSISTANT: {reply}\n</chat_history>"
    body: dict[str, Any] = {"model": MODEL, "messages": [user(told)], "max_tokens": TASK_TOKENS, "ignore_eos": True}
    async with proxy.post({**body, "stream": False}, **who(chat=chat, task=task)) as response:
        assert response.status == 200, await response.text()
        usage = (await response.json())["usage"]
    return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def played(proxy: RunningProxy, *, tasks: bool) -> tuple[float, list[tuple[int, int]]]:
    """Play the first turn of a chat with all that Open WebUI sends, or alone; nothing runs any more at the end."""
    text, chat = question(), uuid4().hex
    if not tasks:
        return (await first_token_of(proxy, text, chat))[0], []
    async with asyncio.TaskGroup() as group:
        title = group.create_task(task_of(proxy, TITLE, text, "", chat))
        await asyncio.sleep(TITLE_LEAD_SECONDS)
        seconds, reply = await first_token_of(proxy, text, chat)
    others = await asyncio.gather(*(task_of(proxy, task, text, reply, chat) for task in (FOLLOW_UPS, TAGS)))
    return seconds, [title.result(), *others]


async def test_tasks_do_not_delay_the_first_token(start_proxy_before: StartProxyBefore) -> None:
    """
    With a title before the chat and two tasks after it the first token comes within 10 % of the time without them.

    The control: where tasks are not held, the title takes the slot, and the answer waits for it.
    """
    holding = await start_proxy_before()
    control = await start_proxy_before(coalesce__hold_seconds=0.0)
    kinds = {"off": (holding, False), "on": (holding, True), "not held": (control, True)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    computed: list[int] = []
    for number in range(CHATS + 1):
        order = list(kinds) if number % 2 else list(reversed(kinds))
        for name in order:
            proxy, tasks = kinds[name]
            if name == "not held" and number % 5:
                continue  # it takes long, and shows without many of them
            taken, prompts = await played(proxy, tasks=tasks)
            if number:
                seconds[name].append(taken)
                computed += [prompt - cached for prompt, cached in prompts if name == "on"]
    off, on, not_held = (statistics.median(seconds[name]) for name in kinds)
    print(f"\nfirst token, median of {CHATS}: tasks off {off:.3f} s, on {on:.3f} s, ratio {on / off:.3f}")
    print(f"tasks not held {not_held:.3f} s, ratio {not_held / off:.3f}")
    print(f"tokens computed for a task, median: {statistics.median(computed):.0f}")
    print({name: [round(value, 3) for value in values] for name, values in seconds.items()})
    assert holding.sample("proxy_task_held_seconds_count") == 3 * (CHATS + 1)
    assert not_held / off > MOST_RATIO  # else this test could not tell
    assert on / off <= MOST_RATIO
