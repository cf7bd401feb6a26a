"""Whose request this is: tenant, chat, message and task, from what the caller may say of itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.core.request import ChatRequest, Message
from proxy.core.text import text_of

MAX_ID_CHARACTERS = 256
"""Longer ids are no ids: Open WebUI's have 36 characters."""

BODY_IDS = ("conversation_id", "session_id", "chat_id")

TASK_LEADS: tuple[tuple[str, str], ...] = (
    ("### Task:\nGenerate a concise title summarizing the chat history", "title_generation"),
    ("### Task:\nGenerate a concise, 3-5 word title", "title_generation"),
    ("### Task:\nPredict 3-5 useful messages this user", "follow_up_generation"),
    ("### Task:\nSuggest 3-5 relevant follow-up questions", "follow_up_generation"),
    ("### Task:\nGenerate 1-3 broad tags categorizing", "tags_generation"),
    ("### Task:\nAnalyze the chat history to determine the necessity of generating search queries", "query_generation"),
    ("### Task:\nYou are an autocompletion system.", "autocomplete_generation"),
    ("### Task:\nGenerate a detailed prompt for am image generation task", "image_prompt_generation"),
    ("### Task:\nGenerate a detailed prompt for an image generation task", "image_prompt_generation"),
    ("Your task is to reflect the speaker's likely facial expression", "emoji_generation"),
    ("You have been provided with a set of responses from various models", "moa_response_generation"),
    ("### Task:\nSummarize the conversation history that will be compacted", "context_compaction"),
)
"""Full lead sentences of Open WebUI 0.12's task templates; `### Task:` alone begins document chats too."""

SYSTEM_LEADS: tuple[tuple[str, str], ...] = (
    ("Available Tools:", "function_calling"),
    ("You are Open WebUI's private memory reviewer", "memory_review"),
)
TASKS = frozenset(name for _, name in TASK_LEADS + SYSTEM_LEADS)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks, about which chat.  `proven`: a user is known.  `explicit`: somebody who may has named the chat."""

    tenant: str
    proven: bool
    chat: str | None
    message: str | None
    task: str | None
    explicit: bool


@dataclass(frozen=True, slots=True)
class Claims:
    """What the caller said: the key's name and standing, the four identity headers, a user proven by signature."""

    key: str
    authenticated: bool
    trusted: bool
    user: str = ""
    chat: str = ""
    message: str = ""
    task: str = ""
    signed_user: str | None = None


def identify(claims: Claims, request: ChatRequest) -> Identity:
    """Return whose request this is.

    Identity headers count only under a trusted key, on loopback without keys (both `trusted` here), or with a user
    that is proven by signature; elsewhere the tenant is the key's name.  The chat is the header's, else the body's
    `conversation_id`, `session_id` or `chat_id`; an id that is no text of 1 to 256 characters is none.
    """
    headers = claims.trusted or claims.signed_user is not None
    user = claims.signed_user or (_id(claims.user) if claims.trusted else None)
    tenant = f"{claims.key}\x00{user}" if user else claims.key
    chat = (_id(claims.chat) if headers else None) or _body_id(request.rest)
    named = headers or claims.authenticated
    task = _task(claims.task if headers else "", request)
    return Identity(
        tenant, user is not None, chat, _id(claims.message) if headers else None, task, named and chat is not None
    )


def _id(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARACTERS else None


def _body_id(rest: Mapping[str, object]) -> str | None:
    return next((found for name in BODY_IDS if (found := _id(rest.get(name)))), None)


def _task(header: str, request: ChatRequest) -> str | None:
    if header:
        return header if header in TASKS else "other"
    return task_of(request.messages, request.rest)


def task_of(messages: Sequence[Message], rest: Mapping[str, object]) -> str | None:
    """Return the name of the task that a request without a task header is; None for a chat.

    A task has no tools, is not streamed, and has one user message and at most a system one; only a merge of answers may
    stream.
    """
    if rest.get("tools") or not messages or len(messages) > 2:
        return None
    first, last = messages[0], messages[-1]
    if last.get("role") != "user" or (len(messages) == 2 and first.get("role") != "system"):
        return None
    text = text_of(last)
    name = next((name for lead, name in TASK_LEADS if text.startswith(lead)), None)
    if name is None and len(messages) == 2:
        head = text_of(first)
        name = next((name for lead, name in SYSTEM_LEADS if head.startswith(lead)), None)
    if rest.get("stream") is True and name != "moa_response_generation":
        return None
    return name
