"""Step `move_volatile`: system text that changes between requests moves next to the newest user message."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from proxy.core.draft import PART, Block, Draft, Entry, Facts
from proxy.core.learned_lines import Lines, fits, learn
from proxy.core.ledger import Ledger
from proxy.core.notes import appended, fenced
from proxy.core.request import Message
from proxy.core.text import digest, message_digest, text_of
from proxy.core.volatile import Parted, block, part

_NAMES = {"clock": "time", "summary": "conversation summary", "documents": "context", "lines": "lines"}
_NEVER_REVOKED = ("clock", "summary", "midloop", "points")


def move_volatile(draft: Draft, facts: Facts) -> Draft:
    """Take volatile blocks out of the head and tell them in a note, where the history does not tell them already.

    The note belongs to its turn: it is written when its message is first sent and stays as sent.  Every line of the
    system message that the client sent is in the prompt: in the head, in the note, or in an earlier note of the same
    text.
    """
    if not draft.head or not any(e.role in ("user", "tool") for e in draft.entries):
        return draft
    head, blocks = _parted_head(draft.head, facts)
    head, lines, known = _without_learned(head, facts)
    blocks += lines
    draft = replace(draft, lines=known)
    told = _last_told(draft.kept())
    if not blocks and not any(value for kind, value in told.items() if not kind.startswith(_NEVER_REVOKED)):
        return draft
    draft = replace(draft, head=head)
    summary = [b for b in blocks if b.kind == "summary"]
    if summary and told.get("summary") != summary[0].digest:
        draft = _tell_summary(draft, summary[0], facts)
    return _tell(draft, blocks, facts)


def _parted_head(head: tuple[Message, ...], facts: Facts) -> tuple[tuple[Message, ...], list[Block]]:
    out: list[Message] = []
    blocks: list[Block] = []
    for message in head:
        kept, moved = _parted(message, facts)
        blocks += moved
        if kept is not None:
            out.append(kept)
    return tuple(out), _merged(blocks)


def _without_learned(
    head: tuple[Message, ...], facts: Facts
) -> tuple[tuple[Message, ...], list[Block], Lines | None]:  # fmt: skip
    """Return the head without the lines that proved volatile in this chat, those lines, and what is known now."""
    content = head[0].get("content") if head else None
    if facts.lines is None or not isinstance(content, str):
        return head, [], facts.lines
    lines = content.split("\n")
    fresh = not facts.lines.recent
    seed = next((places for value, places in facts.patterns if fits(value, places, lines)), None) if fresh else None
    known = learn(facts.lines, lines, seed or frozenset())
    if not known.learned:
        return head, [], known
    kept = "\n".join(line for i, line in enumerate(lines) if i not in known.learned)
    moved = "\n".join(lines[i] for i in sorted(known.learned))
    return ({**head[0], "content": kept}, *head[1:]), [block("lines", moved)], known


def skeleton(head: tuple[Message, ...], tags: tuple[str, ...]) -> bytes:
    """Return the digest of what stays of leading system messages: what two requests of one chat share."""
    kept, _ = _parted_head(head, Facts(frozenset(), Ledger(0), tags=tags))
    return digest(*(message_digest(message) for message in kept))


def _merged(blocks: Sequence[Block]) -> list[Block]:
    """Two system messages may each tell a time: one block a kind."""
    by_kind: dict[str, Block] = {}
    for b in blocks:
        seen = by_kind.get(b.kind)
        by_kind[b.kind] = b if seen is None else Block(b.kind, f"{seen.text}\n{b.text}", seen.digest + b.digest)
    return list(by_kind.values())


def _parted(message: Message, facts: Facts) -> tuple[Message | None, list[Block]]:
    """Return the message without its volatile text (None where nothing is left of it) and that text in blocks."""
    content = message.get("content")
    if isinstance(content, str):
        found = _part(content, facts)
        if not found.blocks:
            return message, []
        return ({**message, "content": found.head} if found.head.strip() else None), list(found.blocks)
    if not isinstance(content, list):
        return message, []
    parts: list[object] = []
    blocks: list[Block] = []
    for piece in content:
        if isinstance(piece, dict) and piece.get("type") == "text" and isinstance(piece.get("text"), str):
            found = _part(piece["text"], facts)
            blocks += found.blocks
            if found.blocks:
                piece = {**piece, "text": found.head}
            if found.blocks and not found.head.strip():
                continue
        parts.append(piece)
    if not blocks:
        return message, []
    return ({**message, "content": parts} if parts else None), blocks


def _part(text: str, facts: Facts) -> Parted:
    return part(text, tags=facts.tags, leads=facts.leads)


def _last_told(entries: Sequence[Entry]) -> dict[str, bytes]:
    """Return the digest of each kind as the history tells it last; empty for a revoked one."""
    return {kind: value for entry in entries for kind, value in entry.blocks}


def _tell(draft: Draft, blocks: Sequence[Block], facts: Facts) -> Draft:
    at = _target(draft.entries)
    if at is None:
        return draft
    entry = draft.entries[at]
    before = _last_told([e for i, e in enumerate(draft.entries[:at]) if i not in draft.gone])
    if entry.node is not None:  # the turn was begun: what its note told still stands, a time of day in any case
        standing = {**before, **dict(entry.blocks)}
        timed = any(kind.startswith("clock") for kind in standing)
        if timed and all(b.kind.startswith("clock") or standing.get(b.kind) == b.digest for b in blocks):
            return draft
    new = [b for b in blocks if b.kind != "summary" and before.get(b.kind) != b.digest]
    gone = [k for k, v in before.items() if v and not k.startswith(_NEVER_REVOKED) and all(b.kind != k for b in blocks)]
    kept = tuple(pair for pair in entry.blocks if pair[0] == "summary")
    if not new and not gone:
        return draft
    if kept and entry.node is not None:  # its note is written anew: the summary that it told is told again
        new, kept = [*(b for b in blocks if b.kind == "summary"), *new], ()
    lines = [_revoked(kind) for kind in gone] + [_told(b, before) for b in new]
    told = kept + tuple((b.kind, b.digest) for b in new) + tuple((kind, b"") for kind in gone)
    return draft.with_entry(at, _with_note(entry, "\n".join(lines), told, facts))


def _target(entries: Sequence[Entry]) -> int | None:
    """Return the index of the message that the note goes to: the newest tool result, else the newest user message."""
    if entries[-1].role == "tool":
        return len(entries) - 1
    return next((i for i in range(len(entries) - 1, -1, -1) if entries[i].role == "user"), None)


def _revoked(kind: str) -> str:
    return f"(The {_name(kind)} given earlier no longer applies.)"


def _told(b: Block, before: Mapping[str, bytes]) -> str:
    if not b.kind.startswith("clock") and before.get(b.kind):
        return f"(This replaces the {_name(b.kind)} given earlier.)\n{b.text}"
    return b.text


def _name(kind: str) -> str:
    return _NAMES.get(kind, kind.removeprefix("tag:"))


def _with_note(entry: Entry, text: str, told: tuple[tuple[str, bytes], ...], facts: Facts) -> Entry:
    """Return the entry with `text` told: after a tool result, as a system message in front, or as a text part."""
    if entry.role == "tool":
        return entry._replace(node=None, message=appended(entry.message, text), blocks=told)
    note: Message = {"role": "system", "content": text}
    if not facts.template.system_in_place:
        note = {"role": PART, "content": fenced(text, facts.marker)}
    if entry.note is not None and entry.node is None:  # a summary that was told just now
        note = {**note, "content": f"{text_of(entry.note)}\n{text_of(note)}"}
    return entry._replace(node=None, note=note, blocks=told)


def _tell_summary(draft: Draft, summary: Block, facts: Facts) -> Draft:
    """A summary goes before the first message that the ledger does not know: right in time, and free."""
    last = _target(draft.entries)
    unknown = next((i for i, e in enumerate(draft.entries) if e.node is None and i not in draft.gone), last)
    user = next((i for i, e in enumerate(draft.entries) if i >= (unknown or 0) and e.role == "user"), last)
    at = unknown if facts.template.system_in_place and unknown is not None else user
    if at is None:
        return draft
    entry = draft.entries[at]
    if entry.role == "tool" or (entry.role != "user" and not facts.template.system_in_place):
        at = last if last is not None else at
        entry = draft.entries[at]
    told = (*entry.blocks, ("summary", summary.digest))
    return draft.with_entry(at, _with_note(entry, summary.text, told, facts))
