"""Step `rehang_task`: a title, tags or follow-ups become the chat's own prompt plus the instruction."""

from collections.abc import Sequence
from dataclasses import replace

from proxy.core.counting import TEMPLATE_FIELDS, Counter
from proxy.core.draft import ChatPrompt, Draft, Entry, Facts
from proxy.core.request import Message
from proxy.core.text import first_text, message_digest, text_of, with_first_text

REHUNG = frozenset({"title_generation", "tags_generation", "follow_up_generation", "emoji_generation"})
"""Tasks whose answer is only shown.  Those that are acted on (queries, function calling, merge) stay whole."""

_OPEN, _CLOSE = "<chat_history>", "</chat_history>"
_LABELS = ("USER: ", "ASSISTANT: ", "SYSTEM: ")
ANSWER_TOKENS = 1000
"""What Open WebUI lets a title have; the other tasks' answers are shorter."""

POINTER = "(the conversation above)"


def rehang_task(draft: Draft, facts: Facts) -> Draft:
    """Put a task behind the prompt of the chat that it quotes: its history is cached, only the instruction is new.

    The model, parameters and format stay as they are; the tools of the chat go along, because they stand in the
    cached prompt, with `tool_choice` none.  Only where every line that the task quotes is in that prompt, its system
    message says nothing else, it fits, and it is counted cheaper than the task as sent with its template's head taken
    as cached.  Raises Uncounted where that needs counts.
    """
    if facts.task_name not in REHUNG or len(draft.entries) != 1 or draft.rest.get("tools"):
        return draft
    told = draft.entries[0].told
    parts = quotation(first_text(told) or "")
    if parts is None:
        return draft
    able = [each for each in facts.chats if each.reply is not None or facts.template.users_in_a_row]
    chat = next((each for each in able if _is_about(each, draft.head, parts[1])), None)
    if chat is None:
        return draft
    before, _, after = parts
    instruction = with_first_text(told, f"{before}{_OPEN}\n{POINTER}\n{_CLOSE}{after}")
    prompt = (*chat.messages, *((chat.reply,) if chat.reply is not None else ()))
    if not _cheaper(instruction, told, before, chat, facts):
        return draft
    entries = tuple(Entry(m, message_digest(m), m) for m in (*prompt, instruction))
    shared = {name: chat.rest[name] for name in TEMPLATE_FIELDS if chat.rest.get(name) is not None}
    rest = {**draft.rest, **shared}
    if "tools" in shared:
        rest["tool_choice"] = "none"
    return replace(draft, head=(), entries=entries, rest=rest)


def quotation(text: str) -> tuple[str, str, str] | None:
    """Return a task in three: what stands before the quoted history, the history, what stands after it."""
    start, end = text.find(_OPEN), text.rfind(_CLOSE)
    if start < 0 or end < start:
        return None
    return text[:start], text[start + len(_OPEN) : end], text[end + len(_CLOSE) :]


def _is_about(chat: ChatPrompt, head: Sequence[Message], quoted: str) -> bool:
    """Say whether all that the task tells of a chat is in this prompt, and its newest question is this one's."""
    said = "\n".join(text_of(message) for message in chat.messages)
    reply = text_of(chat.reply) if chat.reply is not None else ""
    if not all(line.strip() in said for message in head for line in text_of(message).split("\n")):
        return False
    if not all(_stands(line, f"{said}\n{reply}") for line in _lines(quoted)):
        return False
    newest = next((text_of(m) for m in reversed(chat.messages) if m.get("role") == "user"), "")
    asked = _last_question(quoted)
    return bool(asked) and all(_stands(line, newest) for line in asked)


def _lines(quoted: str) -> list[str]:
    out = []
    for line in quoted.split("\n"):
        for label in _LABELS:
            line = line.removeprefix(label)
        if line.strip():
            out.append(line.strip())
    return [line for line in out if line not in (label.strip() for label in _LABELS)]


def _stands(line: str, said: str) -> bool:
    """Open WebUI cuts long messages of a quotation in the middle: both ends must stand in the prompt."""
    return line in said or ("..." in line and all(part.strip() in said for part in line.split("...")))


def _last_question(quoted: str) -> list[str]:
    start = quoted.rfind("USER: ")
    end = quoted.find("\nASSISTANT:", start)
    return _lines(quoted[start : end if end >= 0 else len(quoted)]) if start >= 0 else []


def _cheaper(instruction: Message, told: Message, before: str, chat: ChatPrompt, facts: Facts) -> bool:
    """Compare what must be computed: the instruction behind the cached chat, or the quotation behind its head."""
    counter = Counter(facts.counts)
    rehung, whole = counter.stretch([instruction]), counter.stretch([told])
    head = counter.stretch([with_first_text(told, before)])
    counter.settle()
    if rehung is None or whole is None or head is None:
        return False
    size = facts.lengths.max_model_len
    fits = size is None or chat.tokens + rehung + ANSWER_TOKENS <= size
    return fits and rehung < whole - head
