"""Whose request it is: who may say so, and what is believed of whom (cases OW-05, OW-06)."""

from typing import Any

import pytest

from proxy.core.identity import MAX_ID_CHARACTERS, Claims, identify, task_of
from proxy.core.request import ChatRequest, Message

HI: tuple[Message, ...] = ({"role": "user", "content": "hi"},)
TITLE = "### Task:\nGenerate a concise title summarizing the chat history.\n<chat_history>\n</chat_history>"
DOCUMENTS = "### Task:\nRespond to the user query using the provided context, incorporating citations"


def who(trusted: bool = True, authenticated: bool = True, body: Any = None, **claims: Any) -> Any:
    """Return whose request this is."""
    return identify(Claims("key", authenticated, trusted, **claims), ChatRequest(HI, body or {}))


def test_headers_count_under_a_trusted_key() -> None:
    """Open WebUI's."""
    got = who(user="u1", chat="c1", message="m1", task="title_generation")
    assert (got.tenant, got.proven, got.chat, got.message, got.task, got.explicit) == (
        "key\x00u1", True, "c1", "m1", "title_generation", True,
    )  # fmt: skip


def test_headers_count_for_nothing_under_another_key() -> None:
    """The tenant is the key's name, the task is read off the text."""
    got = who(trusted=False, user="u1", chat="c1", message="m1", task="title_generation")
    assert (got.tenant, got.proven, got.chat, got.message, got.task, got.explicit) == (
        "key",
        False,
        None,
        None,
        None,
        False,
    )


def test_a_signed_user_is_proven_under_any_key() -> None:
    """And may name his chats; the plain user header stays without weight."""
    got = who(trusted=False, user="forged", chat="c1", signed_user="u1")
    assert (got.tenant, got.proven, got.chat, got.explicit) == ("key\x00u1", True, "c1", True)
    assert who(user="forged", signed_user="u1").tenant == "key\x00u1"


def test_one_chat_id_of_two_users_is_two_chats() -> None:
    """OW-05: the tenant differs."""
    assert who(user="u1", chat="c1").tenant != who(user="u2", chat="c1").tenant


def test_a_temporary_chat_has_an_id_like_any_other() -> None:
    """`local:` and the socket's id (OW-05)."""
    assert who(user="u1", chat="local:abc").chat == "local:abc"


@pytest.mark.parametrize("chat", ["", "x" * (MAX_ID_CHARACTERS + 1)])
def test_an_empty_or_huge_id_is_none(chat: str) -> None:
    """OW-05: it falls back to content, and is no key of anything."""
    got = who(user="u1", chat=chat)
    assert got.chat is None and not got.explicit
    assert who(user="x" * 300).tenant == "key"


@pytest.mark.parametrize("name", ["conversation_id", "session_id", "chat_id"])
def test_an_id_in_the_body_names_the_chat(name: str) -> None:
    """The header has precedence; what is no text of 1 to 256 characters is none."""
    assert who(trusted=False, body={name: "b1"}).chat == "b1"
    assert who(chat="c1", body={name: "b1"}).chat == "c1"
    for odd in ("", 3, None, ["b1"], {"a": 1}, "x" * 257, True):
        assert who(body={name: odd}).chat is None


def test_a_body_id_of_nobody_in_particular_is_not_explicit() -> None:
    """Without a key anyone could name anyone's chat: it finds a session, documents do not come back."""
    got = who(trusted=False, authenticated=False, body={"chat_id": "b1"})
    assert got.chat == "b1" and not got.explicit
    assert who(trusted=False, body={"chat_id": "b1"}).explicit


def test_an_unknown_task_is_a_task_of_no_name() -> None:
    """Labels stay a small closed set."""
    assert who(task="x" * 1000).task == "other" and who(task="memory_review").task == "memory_review"


def task(content: Any, *, system: Any = None, **rest: Any) -> str | None:
    """Return the task that a request without a header is."""
    head: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return task_of([*head, {"role": "user", "content": content}], rest)


@pytest.mark.parametrize(
    ("lead", "name"),
    [
        (TITLE, "title_generation"),
        ("### Task:\nPredict 3-5 useful messages this user might send", "follow_up_generation"),
        ("### Task:\nGenerate 1-3 broad tags categorizing the main themes", "tags_generation"),
        (
            "### Task:\nAnalyze the chat history to determine the necessity of generating search queries",
            "query_generation",
        ),
        ("### Task:\nYou are an autocompletion system. Continue", "autocomplete_generation"),
        ("### Task:\nGenerate a detailed prompt for am image generation task", "image_prompt_generation"),
        ("Your task is to reflect the speaker's likely facial expression through", "emoji_generation"),
        ("You have been provided with a set of responses from various models", "moa_response_generation"),
        ("### Task:\nSummarize the conversation history that will be compacted", "context_compaction"),
    ],
)
def test_tasks_are_known_by_their_full_lead(lead: str, name: str) -> None:
    """Not streamed, no tools, one user message and at most a system one."""
    assert task(lead) == name and task(lead, system="A preset's words") == name
    assert task(lead, tools=[{}]) is None
    assert task_of([{"role": "user", "content": "a"}, {"role": "user", "content": lead}], {}) is None
    streamed = task(lead, stream=True)
    assert streamed == (name if name == "moa_response_generation" else None)


def test_a_document_chat_is_no_task() -> None:
    """It starts with `### Task:` too."""
    assert task(DOCUMENTS) is None and task("### Task:\nDo my homework") is None and task(f"x {TITLE}") is None


def test_legacy_function_calling_and_memory_review_are_known_by_their_system_lead() -> None:
    """Their user message is the user's."""
    assert task("Query: hi", system="Available Tools: [{}]") == "function_calling"
    assert (
        task("Review", system="You are Open WebUI's private memory reviewer. Return only valid JSON.")
        == "memory_review"
    )
    assert task("Available Tools: []") is None


def test_odd_messages_are_no_task() -> None:
    """Nor do they fail."""
    contents: list[Any] = [None, 3, [], [{"type": "image_url"}], {}]
    for content in contents:
        assert task(content) is None and task("x", system=content) is None
    assert task_of([], {}) is None
    assert task([{"type": "text", "text": TITLE}]) == "title_generation"
