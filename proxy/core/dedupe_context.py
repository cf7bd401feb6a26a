"""Step `dedupe_context`: a document that stands verbatim earlier in the prompt becomes a pointer to it."""

from collections.abc import Iterable
from dataclasses import replace

from proxy.core.documents import POINTER, instructions_of, pointed, sources_of
from proxy.core.draft import Draft, Entry, Facts
from proxy.core.request import Message
from proxy.core.text import first_text, text_of, with_first_text

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
    for entry in draft.entries[first:]:
        changed = _deduped(entry, sources, leads, facts) if entry.node is None else entry
        out.append(changed)
        more, more_leads = _standing(text_of(m) for m in changed.sent())
        sources |= more
        leads |= more_leads
    return replace(draft, entries=tuple(out))


def _has_sources(entry: Entry, facts: Facts) -> bool:
    return any("<source" in text_of(message) for message in entry.sent() if message.get("role") != "assistant")


def _texts(draft: Draft, first: int) -> Iterable[str]:
    for message in draft.head:
        yield text_of(message)
    for entry in draft.entries[:first]:
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
    return entry._replace(message=message, note=note)


def _shortened(message: Message, sources: set[str], leads: set[str], facts: Facts) -> Message:
    text = first_text(message)
    if text is None or "<source" not in text or not _ours(text, message, facts):
        return message
    short = pointed(text, sources, leads)
    return message if short == text else with_first_text(message, short)


def _ours(text: str, message: Message, facts: Facts) -> bool:
    """Only what a program wrote is shortened: a note, a tool result, a user message that opens as document chats do."""
    return message.get("role") != "user" or text.startswith((*facts.leads, "<context>", "<source"))
