"""Step `trim_history`: a prompt that outgrew its context is cut in one step, rarely, so that the prefix lives long."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from proxy.core.clamp_lengths import hint, whole
from proxy.core.continue_final import continue_final
from proxy.core.counting import Counter
from proxy.core.cutting import (
    Marks,
    Sizes,
    anchored,
    bound,
    exact,
    gap_tokens,
    marks,
    next_cut,
    replayed,
    suffixes,
    turn_starts,
)
from proxy.core.dedupe_context import dedupe_context, standing_digests
from proxy.core.draft import HEAD_ROLES, PART, Cut, Draft, Entry, Facts
from proxy.core.keep_tools import list_digest
from proxy.core.move_midloop import move_midloop
from proxy.core.move_volatile import move_volatile
from proxy.core.reject import Reject
from proxy.core.request import Message
from proxy.core.text import digest, encoded, packed

DEFAULT_RESERVE = 2048
RETELL: tuple[tuple[str, Callable[[Draft, Facts], Draft]], ...] = (
    ("move_volatile", move_volatile),
    ("move_midloop", move_midloop),
    ("dedupe_context", dedupe_context),
    ("continue_final", continue_final),
)
"""Steps that look at the history as it goes out: they run again over what a cut leaves, so that no line is lost."""


def trim_history(draft: Draft, facts: Facts) -> Draft:
    """Leave the oldest turns out where the prompt passes the high watermark, down to the low one; else change nothing.

    The system messages, pinned first turns and the newest user message stay; a call and its results stay together.  A
    cut made before holds until the high mark is passed again.  Raises Uncounted where exact counts are needed first,
    Reject 400 `context_length_exceeded` where what must stay does not fit.
    """
    size = facts.lengths.max_model_len
    if size is None or not draft.entries or "rehang_task" in draft.trail:  # a task that was hung on its chat fits
        return draft
    most = facts.lengths.max_prompt
    trim = _Trim(facts, marks(size, _reserve(draft, facts), facts.trim.low_share, most), size, draft)
    held = _held(facts.cut, draft) if facts.cut is not None else None
    kept = trim.cut(held) if held is not None else draft
    kept = replace(kept, family=family_of(kept))
    known = bound(kept, family_of(kept), facts.image_tokens)
    if known <= trim.marks.high and known + _asked(draft, facts) <= size:
        return replace(kept, counted=known)
    total = trim.count(kept)
    if total > trim.marks.high:
        trim, kept, total = trim.shortened(kept, total)
    return trim.counted(kept, total) if total <= trim.marks.high else trim.shrink(kept)


_FAMILY_FIELDS = ("chat_template_kwargs", "reasoning_effort")


def family_of(draft: Draft) -> bytes:
    """Return the digest of what counts of two prompts must share to be compared: head, tools, what is gone."""
    if draft.family is not None:
        return draft.family
    fields = {name: draft.rest[name] for name in _FAMILY_FIELDS if draft.rest.get(name) is not None}
    tools = list_digest(draft.rest) if draft.tools is None else draft.tools
    gone = ",".join(map(str, sorted(draft.gone)))
    parts = packed(list(draft.head)), packed(fields), tools, encoded(gone)
    return digest(*parts, packed(draft.gap) if draft.gone else b"")


def _reserve(draft: Draft, facts: Facts) -> int:
    """Return the tokens kept free for the answer: what the client expects or allows, else 2048."""
    return hint(draft.rest) or _asked(draft, facts) or DEFAULT_RESERVE


def _asked(draft: Draft, facts: Facts) -> int:
    """Return the tokens that the client asks for, within the cap; 0 where it names no limit."""
    asked = [whole(draft.rest[name], name) for name in facts.lengths.fields if draft.rest.get(name) is not None]
    return min(asked[0], facts.lengths.cap or asked[0]) if asked else 0


def _held(cut: Cut, draft: Draft) -> Cut | None:
    """Return what holds of a stored cut: nothing where its first kept message is not one of this conversation.

    It may be told otherwise by now, for a block in front of it has come or gone, or the user has changed it: what
    stands before it is the same then, and stays left out.  Inside the turn it holds where calls still begin.
    """
    if cut.turn >= len(draft.entries):
        return None
    entry = draft.entries[cut.turn]
    same = cut.seen == entry.seen or (entry.node is not None and cut.seen in (entry.node.seen, entry.node.short))
    before = draft.entries[cut.turn - 1].node if cut.turn else None
    if not same and (before is None or entry.role != "user" or all(n.seen != cut.seen for n in before.children)):
        return None
    begins = cut.inner < len(draft.entries) and draft.entries[cut.inner].role == "assistant"
    return cut if cut.inner == cut.turn + 1 or (same and begins) else replace(cut, inner=cut.turn + 1)


@dataclass(frozen=True, slots=True)
class _Trim:
    facts: Facts
    marks: Marks
    size: int
    told: Draft

    def shortened(self, draft: Draft, total: int) -> "tuple[_Trim, Draft, int]":
        """Let restored blocks fall back to their short form, oldest first, until the low mark: before any turn goes.

        Return the trim that goes on from there, the draft and its tokens.
        """
        base, counter = self.told.restored or self.told, self._counter()
        places = [i for i, entry in enumerate(base.entries[:-1]) if entry.short and i not in draft.gone]
        saved = {i: _saved(base.entries[i], counter) for i in places}
        counter.settle()
        entries, left = list(base.entries), total
        for i in places:
            if left <= self.marks.low:
                break
            entries[i], left = _as_told(entries[i]), left - (saved[i] or 0)
        if left == total:
            return self, draft, total
        trim = replace(self, told=replace(self.told, restored=replace(base, entries=tuple(entries))))
        draft = trim.cut(draft.cut)
        return trim, draft, trim.count(draft)

    def cut(self, cut: Cut | None) -> Draft:
        """Return the draft as it goes out with this cut: what the cut took away is told anew where it must be."""
        base = self.told.restored or self.told
        places: tuple[int, ...] = ()
        if cut is not None:
            places = (*range(self._pinned_until(base), cut.turn), *range(cut.turn + 1, cut.inner))
        gone = frozenset(i for i in places if base.entries[i].role not in HEAD_ROLES)
        draft = replace(base, gone=gone, cut=cut, gap=_gap(base, self.facts), trail=self.told.trail)
        draft = _without_lost_pointers(draft)
        for name, step in RETELL:
            if name in self.facts.steps:
                draft = step(draft, self.facts)
        return replace(draft, restored=base)

    def shrink(self, draft: Draft) -> Draft:
        """Return the draft cut to the low watermark, as a process that saw the chat grow has cut it.

        Inside the newest turn the oldest call-with-results blocks go; what still does not fit is refused.
        """
        pinned, last = self.facts.trim.pinned_turns, len(draft.entries) - 1
        if draft.cut is None and anchored(draft, family_of(draft)) is None:
            found = replayed(draft, self._sizes(draft, all_turns=True), self.marks, pinned)
            draft = self.cut(found) if found is not None else draft
        while (total := self.count(draft)) > self.marks.high:
            found = next_cut(draft, self._sizes(draft), draft.cut, last, self.marks, pinned)
            if found is None or found == draft.cut:
                break
            draft = self.cut(found)
        if total >= self.size:
            raise too_long(total, self.size)
        most = self.facts.lengths.max_prompt
        if most is not None and total > most:
            raise over_limit(total, most)
        return self.counted(draft, total)

    def count(self, draft: Draft) -> int:
        """Return the prompt's tokens; raises Uncounted where something has to be asked first."""
        counter = self._counter()
        total = exact(draft, family_of(draft), counter)
        counter.settle()
        return total or 0

    def counted(self, draft: Draft, total: int) -> Draft:
        """Return the draft with its count: not exact where a part is a bound, or where the prompt does not end as
        others do (an answer that goes on has no generation prompt)."""
        ends_else = draft.rest.get("continue_final_message") or draft.rest.get("add_generation_prompt") is False
        return replace(draft, counted=total, exact=not self.facts.rough and not ends_else)

    def _counter(self) -> Counter:
        return Counter(self.facts.counts, self.facts.rough)

    def _sizes(self, draft: Draft, *, all_turns: bool = False) -> Sizes:
        """Return what is to be known for a cut; `all_turns`: also of those that only a replay looks at."""
        counter, entries, starts = self._counter(), draft.entries, turn_starts(draft)
        until = self._pinned_until(draft)
        first = starts[0] if starts else len(entries)
        fixed, gap = counter.base(draft.head, draft.rest), gap_tokens(_gap(draft, self.facts), counter)
        lead = counter.stretch([m for entry in entries[:first] for m in entry.wire()])
        pinned = counter.stretch([m for entry in entries[:until] for m in entry.wire()])
        after = suffixes(draft, family_of(draft), counter)
        kept = [entry.role in HEAD_ROLES and i >= until for i, entry in enumerate(entries)]
        stays = [counter.stretch(entry.wire()) if keep else 0 for entry, keep in zip(entries, kept, strict=True)]
        own = {i: counter.stretch(entries[i].wire()) for i in (starts if all_turns else ())}
        counter.settle()

        def own_at(place: int) -> int:
            if place not in own:
                later = self._counter()
                own[place] = later.stretch(entries[place].wire())
                later.settle()
            return own[place] or 0

        before = list(accumulate((each or 0 for each in stays), initial=0))
        known = {place: tokens or 0 for place, tokens in after.items()}
        around = (fixed or 0, lead or 0, pinned or 0, gap or 0)
        return Sizes(*around, first, until, known, own_at, before.__getitem__)

    def _pinned_until(self, draft: Draft) -> int:
        starts = [i for i, entry in enumerate(draft.entries) if entry.role == "user"]
        pinned = self.facts.trim.pinned_turns
        return 0 if pinned == 0 else starts[pinned] if pinned < len(starts) else len(draft.entries)


def _saved(entry: Entry, counter: Counter) -> int | None:
    """Return what the short form of an entry saves, in tokens."""
    whole_form, short_form = counter.stretch(entry.wire()), counter.stretch(_as_told(entry).wire())
    return None if whole_form is None or short_form is None else max(0, whole_form - short_form)


def _as_told(entry: Entry) -> Entry:
    """Return an entry as its client tells it; pointers in it went with the text."""
    blocks = tuple(pair for pair in entry.blocks if pair[0] != "points")
    return entry._replace(message=entry.told, node=None, packed=None, blocks=blocks, short=False)


def _gap(draft: Draft, facts: Facts) -> Message | None:
    """Return the mark of the gap.  In a chat without a system message one would take the place of the template's."""
    if facts.trim.gap_text is None:
        return None
    in_place = facts.template.system_in_place and bool(draft.head)
    return {"role": "system" if in_place else PART, "content": facts.trim.gap_text}


def _without_lost_pointers(draft: Draft) -> Draft:
    """A pointer whose target is gone falls back to what the client tells: no pointer lacks its target."""
    if not any(kind == "points" for entry in draft.entries for kind, _ in entry.blocks):
        return draft
    standing: set[bytes] = set()
    out = []
    for i, entry in enumerate(draft.entries):
        wanted = {value for kind, value in entry.blocks if kind == "points"}
        if i not in draft.gone and not wanted <= standing:
            entry = _as_told(entry)
        if i not in draft.gone:
            standing |= standing_digests(entry)
        out.append(entry)
    return replace(draft, entries=tuple(out))


def over_limit(prompt: int, most: int) -> Reject:
    """Return the refusal of a prompt above the limit of the settings."""
    message = (
        f"This conversation is too long: its prompt has {prompt} tokens, at most {most} are taken here. "
        "Shorten the message or start a new chat."
    )
    return Reject(400, message, param="messages", code="context_length_exceeded")


def too_long(prompt: int, size: int) -> Reject:
    """Return the refusal of a prompt that does not fit, with the numbers in plain words."""
    message = (
        f"This conversation is too long for the model: its prompt has {prompt} tokens, the model takes {size} in all, "
        f"and at least 1 must be left for the answer. Shorten the message or start a new chat."
    )
    return Reject(400, message, param="messages", code="context_length_exceeded")
