"""A task hung on its chat: nothing that it tells is lost, and only where it is cheaper."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from proxy.core.draft import ChatPrompt, Facts, Template
from proxy.core.rehang_task import POINTER, quotation
from proxy.core.request import ChatRequest, Message
from tests.trimming import answered, facts_for

PASTE = "\n".join(f"line {n} of a long paste" for n in range(80))
SYSTEM: Message = {"role": "system", "content": "Be brief."}
QUESTION: Message = {"role": "user", "content": f"Sum this up:\n{PASTE}"}
REPLY: Message = {"role": "assistant", "content": "A list of lines."}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT = ChatPrompt((SYSTEM, QUESTION), REPLY, {"tools": TOOLS}, 700)
INSTRUCTION = "### Task:\nGenerate a concise title summarizing the chat history.\n### Guidelines:\n- short\n"


def quoting(*told: str) -> Message:
    """Return a title task that quotes these lines."""
    return {"role": "user", "content": f"{INSTRUCTION}<chat_history>\n" + "\n".join(told) + "\n</chat_history>"}


WHOLE = quoting(f"USER: Sum this up:\n{PASTE}", "ASSISTANT: A list of lines.")


def hung(task: Message, *, facts: Facts | None = None, head: Sequence[Message] = (), **rest: object) -> ChatRequest:
    """Return what goes up for a task about `CHAT`."""
    known = facts or facts_for(8192, task=True, task_name="title_generation", chats=(CHAT,))
    done, _ = answered(ChatRequest((*head, task), {"max_tokens": 100, "stream": False, **rest}), known)
    assert done.failed == ()
    return done.request


def test_the_quotation_becomes_the_chat_itself() -> None:
    """The chat's prompt and reply, then the instruction; its tools stand in the prompt but are not to be called."""
    sent = hung(WHOLE, temperature=0.1)
    assert sent.messages == (SYSTEM, QUESTION, REPLY, quoting(POINTER))
    assert sent.rest == {"max_tokens": 100, "stream": False, "temperature": 0.1, "tools": TOOLS, "tool_choice": "none"}


def test_a_short_chat_is_quoted_as_it_was() -> None:
    """The template of the task is cached: the quotation is cheaper than the instruction."""
    short = ChatPrompt(({"role": "user", "content": "hi"},), {"role": "assistant", "content": "yo"}, {}, 20)
    task = quoting("USER: hi", "ASSISTANT: yo")
    facts = facts_for(8192, task=True, task_name="title_generation", chats=(short,))
    assert hung(task, facts=facts).messages == (task,)


@pytest.mark.parametrize(
    "task",
    [
        quoting(f"USER: Sum this up:\n{PASTE}\nand a line that the prompt has not", "ASSISTANT: A list of lines."),
        quoting("USER: another question", f"ASSISTANT: {PASTE}"),
        quoting(f"ASSISTANT: {PASTE}"),
        {"role": "user", "content": INSTRUCTION + PASTE},
    ],
    ids=["more", "other branch", "no question", "no quotation"],
)
def test_what_is_not_this_chats_own_stays_whole(task: Message) -> None:
    assert hung(task).messages == (task,)


def test_a_quotation_cut_in_the_middle_is_known_by_both_ends() -> None:
    """Open WebUI cuts long messages of a follow-up task."""
    task = quoting(f"USER: Sum this up:\n{PASTE[:300]}...{PASTE[-300:]}", "ASSISTANT: A list of lines.")
    assert hung(task).messages[0] == SYSTEM


def test_a_presets_system_message_must_say_the_same() -> None:
    """It leaks into tasks; a line that the chat's prompt has not would be lost."""
    assert hung(WHOLE, head=(SYSTEM,)).messages[:2] == (SYSTEM, QUESTION)
    other: Message = {"role": "system", "content": "Be brief.\nSpeak Dutch."}
    assert hung(WHOLE, head=(other,)).messages == (other, WHOLE)


def test_of_two_branches_the_quotation_says_which() -> None:
    other = ChatPrompt(({"role": "user", "content": "other"},), REPLY, {}, 10)
    facts = facts_for(8192, task=True, task_name="tags_generation", chats=(other, CHAT))
    assert hung(WHOLE, facts=facts).messages[0] == SYSTEM


def test_an_answer_that_still_runs_is_left_out_where_two_questions_in_a_row_are_taken() -> None:
    """After its time in hold a task goes on the prompt alone."""
    running = replace(CHAT, reply=None)
    task = quoting(f"USER: Sum this up:\n{PASTE}", "ASSISTANT: ")
    facts = facts_for(8192, task=True, task_name="title_generation", chats=(running,))
    assert hung(task, facts=facts).messages == (task,)
    taken = replace(facts, template=Template(system_in_place=True, users_in_a_row=True))
    assert hung(task, facts=taken).messages == (SYSTEM, QUESTION, quoting(POINTER))


@pytest.mark.parametrize("name", ["query_generation", "function_calling", "context_compaction", "other"])
def test_tasks_that_are_acted_on_stay(name: str) -> None:
    assert hung(WHOLE, facts=facts_for(8192, task=True, task_name=name, chats=(CHAT,))).messages == (WHOLE,)


def test_what_would_not_fit_stays() -> None:
    """The chat is as long as the context: the task as sent is the shorter one."""
    full = replace(CHAT, tokens=7500)
    facts = facts_for(8192, task=True, task_name="title_generation", chats=(full,))
    assert hung(WHOLE, facts=facts).messages == (WHOLE,)


def test_a_quotation_in_a_quotation_is_one() -> None:
    """A chat about this very template: the outermost tags count."""
    assert quotation("a<chat_history>b</chat_history>c</chat_history>d") == ("a", "b</chat_history>c", "d")
    assert quotation("no tags") is None and quotation("</chat_history><chat_history>") is None
