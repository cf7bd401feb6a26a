"""Step `dedupe_context`: a document that stands verbatim earlier in the prompt becomes a pointer to it."""

from collections.abc import Iterable
from dataclasses import replace

from proxy.core.documents import POINTER, instructions_of, pointed, sources_of
from proxy.core.draft import Draft, Entry, Facts
from proxy.core.request import Message
from proxy.core.text import digest, encoded, first_text, text_of, with_first_text

LEAST_CHARACTERS = 80
"""A source shorter than this costs about as much as the pointer to it."""


def dedupe_context(draft: Draft, facts: Facts) -> Draft:
    """Replace source elements, and instructions in front of them, that stand verbatim in the history as it goes out.

    Only in messages that go up for the first time: what was sent stays as sent.  A pointer is made only where its
    target is in this very prompt, so none lacks it; a history that lost the target is a new branch, where the text is
    whole.
    """
    first = next((i for i, entry in enumerate(draft.entries) if entry.node is None), None)
    if first is None or not any(_has_sources(entry, facts) for entry in draft.entries[first:]):
        return draft
    sources, leads = _standing(_texts(draft, first))
    out = list(draft.entries[:first])
    for i, entry in enumerate(draft.entries[first:], first):
        if i in draft.gone:
            out.append(entry)
            continue
        changed = _deduped(entry, sources, leads, facts) if entry.node is None else entry
        out.append(changed)
        more, more_leads = _standing(text_of(m) for m in changed.sent())
        sources |= more
        leads |= more_leads
    return replace(draft, entries=tuple(out))


def _has_sources(entry: Entry, facts: Facts) -> bool:
    return any("<source" in text_of(message) for message in entry.sent() if message.get("role") != "assistant")


def standing_digests(entry: Entry) -> set[bytes]:
    """Return the digests of what an entry tells in full, by which pointers to it are known."""
    if entry.role == "assistant":
        return set()
    sources, leads = _standing(text_of(message) for message in entry.sent())
    return {digest(encoded(text)) for text in sources | leads}


def _texts(draft: Draft, first: int) -> Iterable[str]:
    """Not of the head: a later request may bring another, and pointers in its history would lack their target."""
    for entry in (e for i, e in enumerate(draft.entries[:first]) if i not in draft.gone):
        for message in entry.sent():
            if message.get("role") != "assistant":
                yield text_of(message)


def _standing(texts: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the source elements that stand in `texts` in full, and the instructions in front of a context."""
    sources: set[str] = set()
    leads: set[str] = set()
    for text in texts:
        spans = sources_of(text)
        if spans:
            sources |= {text[a:b] for a, b in spans if b - a >= LEAST_CHARACTERS and POINTER not in text[a:b]}
        if (lead := instructions_of(text)) is not None:
            leads.add(lead)
    return sources, leads


def _deduped(entry: Entry, sources: set[str], leads: set[str], facts: Facts) -> Entry:
    if entry.role not in ("user", "tool"):
        return entry
    message = _shortened(entry.message, sources, leads, facts)
    note = entry.note if entry.note is None else _shortened(entry.note, sources, leads, facts)
    if message is entry.message and note is entry.note:
        return entry
    points = standing_digests(entry) - standing_digests(entry._replace(message=message, note=note))
    blocks = (*entry.blocks, *(("points", value) for value in sorted(points)))
    return entry._replace(message=message, note=note, blocks=blocks)


def _shortened(message: Message, sources: set[str], leads: set[str], facts: Facts) -> Message:
    text = first_text(message)
    if text is None or "<source" not in text or not _ours(text, message, facts):
        return message
    short = pointed(text, sources, leads)
    return message if short == text else with_first_text(message, short)


def _ours(text: str, message: Message, facts: Facts) -> bool:
    """Only what a program wrote is shortened: a note, a tool result, a user message that opens as document chats do."""
    return message.get("role") != "user" or text.startswith((*facts.leads, "<context>", "<source"))
