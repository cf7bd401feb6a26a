"""Two users whose chats open with the same words never see each other's text; with a positive control."""

import json
from typing import Any

import pytest

from proxy.config import Key
from proxy.downstream.auth import hash_token
from tests.conftest import RunningProxy, StartProxy
from tests.fake_replies import Reply, json_error
from tests.fake_vllm import FakeVllm
from tests.wire import LEAD

KEYS = (Key("webui", hash_token("trusted"), trusted=True), Key("app", hash_token("other")))
REPLY = "The answer is long enough to make the document worth its place in the prompt. " * 4
WORDS = ("memory", "document", "tool")


def system(memory: str) -> dict[str, Any]:
    """Return the system message that all users share, with a memory of one's own."""
    block = f"\n<memory_context>\n- {memory}\n</memory_context>" if memory else ""
    return {"role": "system", "content": f"You help. Now: 2026-01-02 10:00:01.{block}"}


async def turns_of(proxy: RunningProxy, fake: FakeVllm, users: list[str], **headers: Any) -> dict[str, list[str]]:
    """Let users talk in turn, all with the same visible words; return the prompts of each as they went up."""
    fake.default = Reply(text=REPLY)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    prompts: dict[str, list[str]] = {user: [] for user in users}
    for turn in range(4):
        for user in users:
            block = f"{LEAD}<source>{user} document</source>\n</context>\n\n"
            first = {"role": "user", "content": (block if turn == 0 else "") + "hi"}
            told = [system(f"{user} memory" if turn < 2 else ""), first]
            told += [{"role": "assistant", "content": REPLY.strip()}, {"role": "user", "content": "on"}] if turn else []
            told += [*asked, {"role": "tool", "tool_call_id": "1", "content": "same"}] if turn == 1 else []
            own = {name: value.format(user=user) for name, value in headers.items()}
            async with proxy.post({"model": "fake", "messages": told, "stream": True}, **own) as response:
                assert response.status == 200, await response.text()
                await response.read()
            prompts[user].append(fake.of("/v1/chat/completions")[-1].raw.decode())
    return prompts


def strangers(prompts: dict[str, list[str]]) -> list[str]:
    """Return every word of one user that stands in a prompt of another."""
    return [
        f"{other} {word}"
        for user, sent in prompts.items()
        for other in prompts
        for word in WORDS
        if other != user and any(f"{other} {word}" in prompt for prompt in sent)
    ]


IDENTITY = {"X_OpenWebUI_User_Id": "{user}", "X_OpenWebUI_Chat_Id": "chat of {user}"}
RULES = pytest.mark.parametrize("late", [False, True], ids=["notes as system messages", "notes as text parts"])


@RULES
async def test_users_without_identity_headers_never_see_each_other(
    start_proxy: StartProxy, fake_vllm: FakeVllm, late: bool
) -> None:
    """On loopback without keys their chats are found by content, and share a tree."""
    if late:
        fake_vllm.answers["/tokenize"] = json_error(400, {"error": {"message": "System message must be first."}})
    prompts = await turns_of(await start_proxy(), fake_vllm, ["anna", "bert"])
    assert strangers(prompts) == []
    # What is found by content gets nothing private back, not even its own.
    for user, sent in prompts.items():
        assert f"{user} memory" in sent[1] and f"{user} document" in sent[0]
        assert f"{user} memory" not in sent[2] and not any(f"{user} document" in prompt for prompt in sent[1:])


@RULES
async def test_identity_headers_under_an_untrusted_key_prove_nothing(
    start_proxy: StartProxy, fake_vllm: FakeVllm, late: bool
) -> None:
    """Also where one names the other's chat."""
    if late:
        fake_vllm.answers["/tokenize"] = json_error(400, {"error": {"message": "System message must be first."}})
    proxy = await start_proxy(keys=KEYS)
    prompts = await turns_of(proxy, fake_vllm, ["anna", "bert"], Authorization="Bearer other", **IDENTITY)
    assert strangers(prompts) == []
    assert not any("anna document" in prompt or "anna memory" in prompt for prompt in prompts["anna"][2:])
    same = {"X_OpenWebUI_User_Id": "anna", "X_OpenWebUI_Chat_Id": "chat of anna"}
    assert strangers(await turns_of(proxy, fake_vllm, ["carl", "dora"], Authorization="Bearer other", **same)) == []


@RULES
async def test_under_a_trusted_key_a_users_own_text_comes_back(
    start_proxy: StartProxy, fake_vllm: FakeVllm, late: bool
) -> None:
    """The positive control: documents and memory of the user's own chat, of nobody else's."""
    if late:
        fake_vllm.answers["/tokenize"] = json_error(400, {"error": {"message": "System message must be first."}})
    proxy = await start_proxy(keys=KEYS)
    prompts = await turns_of(proxy, fake_vllm, ["anna", "bert"], Authorization="Bearer trusted", **IDENTITY)
    assert strangers(prompts) == []
    for user, sent in prompts.items():
        assert all(f"{user} document" in prompt and f"{user} memory" in prompt for prompt in sent)
        assert (
            json.loads(sent[3])["messages"][: len(json.loads(sent[0])["messages"])] == json.loads(sent[0])["messages"]
        )


async def test_one_chat_id_of_two_trusted_users_is_two_chats(start_proxy: StartProxy, fake_vllm: FakeVllm) -> None:
    """The tenant is part of the key."""
    proxy = await start_proxy(keys=KEYS)
    headers = {"X_OpenWebUI_User_Id": "{user}", "X_OpenWebUI_Chat_Id": "one"}
    prompts = await turns_of(proxy, fake_vllm, ["anna", "bert"], Authorization="Bearer trusted", **headers)
    assert strangers(prompts) == [] and "anna document" in prompts["anna"][3]
