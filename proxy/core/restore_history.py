"""Step `restore_history`: earlier messages go as they were sent, not as the client now tells them."""

from collections.abc import Sequence
from dataclasses import replace

from proxy.core.documents import POINTER, is_machine_made, shared_characters
from proxy.core.draft import Draft, Entry, Facts
from proxy.core.ledger import Node
from proxy.core.request import Message
from proxy.core.text import bare, calls_of, first_text, message_digest, reply_key, text_of, with_first_text

POINTERS_CHARACTERS = 400
"""A block of nothing but pointers costs less than the break that leaving it out would make."""

_END = "</context>\n\n"
LOOK_AHEAD = 64
"""Equal children looked at for the next message; a bound, not a limit that a chat meets."""


def restore_history(draft: Draft, facts: Facts) -> Draft:
    """Align the messages with the ledger from its root and put in what went up before.

    In: a draft as told.  Out: entries with their nodes, notes and sent forms.  The newest message always stays as told.
    What a user edited or deleted is a new branch and goes as received (Open WebUI's *Save* keeps the reply).
    """
    entries = list(draft.entries)
    at: Node | None = facts.ledger.root
    for i, entry in enumerate(entries):
        if at is None:
            break
        at = _match(at, entries, i, facts)
        if at is not None:
            entries[i] = entry if i == len(entries) - 1 else _restored(entry, at, facts)
    return replace(draft, entries=tuple(entries))


def _match(at: Node, entries: Sequence[Entry], i: int, facts: Facts) -> Node | None:
    entry = entries[i]
    exact = [node for node in at.children if _is_told(node, entry)]
    if len(exact) == 1:  # nearly every message
        return exact[0]
    if not exact and entry.role == "user" and facts.explicit and not facts.whitespace_only:
        exact = [node for node in at.children if _lost_its_block(node, entries, i, facts)]
    if not exact and entry.role == "user":
        exact = [node for node in at.children if _gained_a_block(node, entries, i, facts)]
    if not exact and entry.role == "assistant":
        exact = [node for node in at.children if node.cut and _one_is_prefix(node, entry)]
    if len(exact) < 2 or i + 1 >= len(entries):
        return max(exact, key=lambda node: node.used, default=None)
    following = entries[i + 1]
    known = [n for n in exact[-LOOK_AHEAD:] if any(_is_told(c, following) for c in n.children)]
    return max(known or exact, key=lambda node: node.used)


def _is_told(node: Node, entry: Entry) -> bool:
    """Say whether `entry` is this node: told again, in either of its forms, or the reply that vLLM generated."""
    if node.role != entry.role:
        return False
    if entry.seen == node.seen or entry.seen == node.short:
        return True
    return bool(node.key) and not node.cut and _other_fields_equal(entry) and node.key == reply_key(entry.told)


def _other_fields_equal(entry: Entry) -> bool:
    """A reply with fields that we never relayed (a name, a refusal, list content) is not what was generated."""
    return isinstance(entry.told.get("content"), str | None) and set(entry.told) <= {"role", "content", "tool_calls"}


def _one_is_prefix(node: Node, entry: Entry) -> bool:
    sent = node.messages()
    if not sent or sent[-1] is None or calls_of(entry.told) or not entry.told.get("content"):
        return False
    told, generated = bare(text_of(entry.told)), bare(text_of(sent[-1]))
    return bool(told and generated) and (told.startswith(generated) or generated.startswith(told))


def _lost_its_block(node: Node, entries: Sequence[Entry], i: int, facts: Facts) -> bool:
    """Say whether the user message was sent as *block + text* and now comes as *text*, and its sent form pays.

    Refused where a user could have typed the block: told in full once with a turn after it.  Refused where the reply
    after it is not the one it got, and where what would be reused is less than half of the block and no later message
    points to it.
    """
    if node.role != "user" or node.in_full or (not node.keeps and node.sent is None):
        return False
    sent, told = node.messages(), entries[i].told
    if not sent or sent[-1] is None or i + 1 >= len(entries):
        return False
    full, text = first_text(sent[-1]), first_text(told)
    if full is None or not text or not full.endswith(text) or len(full) == len(text):
        return False
    if message_digest(with_first_text(sent[-1], text)) != message_digest(with_first_text(told, text)):
        return False
    block = full[: -len(text)]
    if not is_machine_made(block, facts.leads):
        return False
    if not any(_is_told(c, entries[i + 1]) or (c.cut and _one_is_prefix(c, entries[i + 1])) for c in node.children):
        return False
    reused = len(text) + _reply_length(entries, i)
    pointers = POINTER in block and len(block) <= POINTERS_CHARACTERS
    if pointers or reused * 2 >= len(block):
        return True
    return "dedupe_context" in facts.steps and _pointed_to(block, entries, i, reused)


def _reply_length(entries: Sequence[Entry], i: int) -> int:
    total = 0
    for entry in entries[i + 1 :]:
        if entry.role == "user":
            break
        total += len(text_of(entry.told))
    return total


def _pointed_to(block: str, entries: Sequence[Entry], i: int, reused: int) -> bool:
    newest = text_of(entries[-1].told) if entries[-1].role == "user" else ""
    return (shared_characters(block, newest) + reused) * 2 >= len(block)


def _gained_a_block(node: Node, entries: Sequence[Entry], i: int, facts: Facts) -> bool:
    """Say whether a message sent as *text* now comes as *block + text* with tool messages after it (a citing tool)."""
    if node.role != "user" or i + 1 >= len(entries) or "move_midloop" not in facts.steps:
        return False
    return not any(e.role == "user" for e in entries[i + 1 :]) and bool(_gained(node, entries[i].told, facts))


def _gained(node: Node, told: Message, facts: Facts) -> str:
    """Return the block that `told` has in front of what `node` was told as; empty where there is none."""
    text = first_text(told) or ""
    at = text.find(_END)
    for _ in range(LOOK_AHEAD):
        if at < 0:
            break
        end = at + len(_END)
        same = message_digest(with_first_text(told, text[end:])) == node.seen
        if same and is_machine_made(text[:end], facts.leads):
            return text[:end]
        at = text.find(_END, end)
    return ""


def _restored(entry: Entry, node: Node, facts: Facts) -> Entry:
    held = Entry(entry.told, entry.seen, entry.message, node)
    if (
        entry.seen not in (node.seen, node.short)
        and entry.role == "user"
        and (block := _gained(node, entry.told, facts))
    ):
        bare_text = (first_text(entry.told) or "")[len(block) :]
        held = held._replace(message=with_first_text(entry.told, bare_text), midloop=block)
    sent = node.messages()
    if sent is None or (not facts.explicit and node.private) or node.cut:
        return held
    if facts.whitespace_only and node.role != "assistant":
        return held
    note = sent[0] if len(sent) > 1 else None
    if held.midloop:
        return held._replace(note=note, message=sent[-1] or held.message, blocks=node.blocks)
    if sent[-1] is None or sent[-1] == entry.told:  # the very object, so that the received bytes can go out
        return Entry(entry.told, entry.seen, entry.told, node, note, node.blocks, packed=node.sent if note else None)
    short = node.role == "user" and entry.seen != node.seen and len(text_of(sent[-1])) > len(text_of(entry.told))
    message = _as_rendered(sent[-1], entry, facts.thinking and facts.explicit)
    return held._replace(note=note, message=message, blocks=node.blocks, short=short)


def _as_rendered(sent: Message, entry: Entry, thinking: bool) -> Message:
    """Return a reply as it was generated; its reasoning, which clients do not tell, only with `thinking`."""
    if entry.role != "assistant":
        return sent
    inline = text_of(sent).lstrip().startswith("<think>") and not text_of(entry.told).lstrip().startswith("<think>")
    if inline and not thinking:
        return entry.told
    out = {**entry.told, "content": sent.get("content")}
    if "tool_calls" in sent:
        out["tool_calls"] = sent["tool_calls"]
    if thinking and "reasoning_content" in sent:
        out["reasoning_content"] = sent["reasoning_content"]
    if out.get("content") is None or (not out["content"] and not entry.told.get("content")):
        out["content"] = entry.told.get("content")
    return out if out != entry.told else entry.told
