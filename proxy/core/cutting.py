"""Where a history that outgrew its context is cut: whole turns, oldest first, from the high mark to the low one."""

from collections.abc import Callable
from dataclasses import dataclass

from proxy.core.counting import Counter
from proxy.core.draft import HEAD_ROLES, PART, Cut, Draft
from proxy.core.estimate import upper_bound
from proxy.core.notes import in_front
from proxy.core.request import Message
from proxy.core.text import text_of

_X: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True, slots=True)
class Marks:
    """The watermarks of a request, in tokens of its prompt: what fits, and what a cut goes down to."""

    high: int
    low: int


def marks(max_model_len: int, reserve: int, low_share: float, most: int | None = None) -> Marks:
    """Return the watermarks: the prompt plus its reserve, which is never above a quarter of the context, must fit.

    `most` is the most tokens that the settings allow for a prompt, None for what fits.
    """
    high = max_model_len - min(max(reserve, 1), max_model_len // 4)
    high = high if most is None else min(high, most)
    return Marks(high, int(high * low_share))


def turn_starts(draft: Draft) -> list[int]:
    """Return the places of the user messages that begin a turn and are still sent, oldest first."""
    return [i for i, entry in enumerate(draft.entries) if entry.role == "user" and i not in draft.gone]


def request_ends(draft: Draft) -> list[int]:
    """Return where requests ended: at a user message, at a tool result that an assistant message answers, at the end.

    Only places that are still sent.
    """
    last = len(draft.entries) - 1
    roles = [entry.role for entry in draft.entries] + ["assistant"]
    ends = [
        i for i, role in enumerate(roles[:-1]) if role == "user" or (role == "tool" and roles[i + 1] == "assistant")
    ]
    return [i for i in (*ends, *(() if ends and ends[-1] == last else (last,))) if i not in draft.gone]


def bound(draft: Draft, family: bytes, image_tokens: int) -> int:
    """Return a sure upper bound of the prompt's tokens, without asking.

    vLLM's own count of the longest prompt of this family that is the beginning of this one, plus the bytes of what is
    new; of everything where nothing was counted.
    """
    anchor = anchored(draft, family)
    start = 0 if anchor is None else anchor + 1
    new = [message for i, sent in draft.wired().items() if i >= start for message in sent]
    if anchor is not None and (node := draft.entries[anchor].node) is not None:
        return node.upto + upper_bound(new, per_image=image_tokens)
    return upper_bound([*draft.head, *new], draft.rest.get("tools"), per_image=image_tokens)


def anchored(draft: Draft, family: bytes) -> int | None:
    """Return the place of the last message up to which vLLM counted a prompt of this family."""
    found = None
    for i, entry in enumerate(draft.entries):
        if entry.node is None:
            if i not in draft.gone:
                break
        elif entry.node.family == family and entry.node.upto:
            found = i
    return found


def exact(draft: Draft, family: bytes, counter: Counter) -> int | None:
    """Return the prompt's tokens as vLLM would count them; None where something has to be asked first."""
    anchor, wired = anchored(draft, family), draft.wired()
    if anchor is not None and (node := draft.entries[anchor].node) is not None:
        new = [message for i, sent in wired.items() if i > anchor for message in sent]
        added = counter.stretch(new, _turn_until(draft, anchor))
        return None if added is None else node.upto + added
    starts = turn_starts(draft)
    first = starts[0] if starts else len(draft.entries)
    opening = [message for i, sent in wired.items() if i <= first for message in sent]
    # A system message of ours at the front of all others takes the place of the template's own.
    lead = next((i for i, message in enumerate(opening) if message.get("role") not in HEAD_ROLES), len(opening))
    base = counter.base([*draft.head, *opening[:lead]], draft.rest)
    own, after = counter.stretch(opening[lead:]), suffixes(draft, family, counter).get(first, 0)
    return None if base is None or own is None or after is None else base + own + after


def _turn_until(draft: Draft, place: int) -> list[Message]:
    start = max((i for i in turn_starts(draft) if i <= place), default=0)
    return [message for i, sent in draft.wired().items() if start <= i <= place for message in sent]


def gap_tokens(gap: Message | None, counter: Counter) -> int | None:
    """Return what the sentence that marks the gap costs; 0 where there is none."""
    if gap is None or gap.get("role") != PART:
        return 0 if gap is None else counter.stretch([gap])
    marked, plain = counter.stretch([in_front(_X, text_of(gap))]), counter.stretch([_X])
    return None if marked is None or plain is None else marked - plain


def suffixes(draft: Draft, family: bytes, counter: Counter) -> dict[int, int | None]:
    """Return, for each place where a request ended, the tokens of what follows it to the end of the prompt.

    From vLLM's own counts where two of them were counted in one family, else asked piece by piece.
    """
    ends, wired, gap = request_ends(draft), draft.wired(), draft.gap_place()
    out: dict[int, int | None] = {}
    after: int | None = 0
    for place in range(len(ends) - 1, -1, -1):
        if place < len(ends) - 1:
            between = _known(draft, ends[place], ends[place + 1], family, gap)
            if between is None:
                between = _asked(draft, wired, ends[place], ends[place + 1], counter)
            after = None if after is None or between is None else after + between
        out[ends[place]] = after
    return out


def _known(draft: Draft, start: int, end: int, family: bytes, gap: int | None) -> int | None:
    """Return the tokens of what follows the message at `start` up to that at `end` by vLLM's own two counts."""
    one, other = draft.entries[start].node, draft.entries[end].node
    if one is None or other is None or not one.upto or not other.upto or one.family != other.family:
        return None
    places = range(start + 1, end + 1)
    if one.family != family and any(i in draft.gone or i == gap for i in places):
        return None
    told = all(i in draft.gone or draft.entries[i].node is not None for i in places)
    return other.upto - one.upto if told else None


def _asked(draft: Draft, wired: dict[int, tuple[Message, ...]], start: int, end: int, counter: Counter) -> int | None:
    kept = [message for i in range(start + 1, end + 1) for message in wired.get(i, ())]
    return counter.stretch(kept, _turn_until(draft, start) if kept and kept[0].get("role") == "tool" else ())


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a decision to cut rests on, in tokens.

    `fixed`: head, tools and generation prompt; `lead`: what stands before the first turn, which is at `first`;
    `pinned`: that and the turns that stay, which end at `until`; `gap`: the sentence that marks it; `after`: what
    follows each place where a request ended; `own`: the user message at a place; `stays`: what stays before a place,
    wherever the cut is.
    """

    fixed: int
    lead: int
    pinned: int
    gap: int
    first: int
    until: int
    after: dict[int, int]
    own: Callable[[int], int]
    stays: Callable[[int], int]

    def uncut(self, end: int) -> int:
        """Return the size of the prompt that ended at `end`, with nothing left out."""
        return self.fixed + self.lead + self.own(self.first) + self.after[self.first] - self.after[end]

    def from_cut(self, cut: Cut, end: int) -> int:
        """Return the size of the prompt that ended at `end`, with this cut."""
        after = self.after.get(cut.inner - 1, self.after[cut.turn]) - self.after[end]
        kept = self.own(cut.turn) + after + self.stays(cut.inner)
        return self.fixed + self.gap + self._before(cut.turn) + kept

    def _before(self, turn: int) -> int:
        """Return what stays before a turn that itself stays, or that a cut begins at."""
        if turn >= self.until:
            return self.pinned
        return self.uncut(turn) - self.fixed - self.own(turn)

    def least(self, start: int, end: int) -> int:
        """Return that size without the user message at `start` where the cut is: what is known without asking."""
        return self.fixed + self.gap + self.pinned + self.after[start] - self.after[end] + self.stays(start)


def next_cut(draft: Draft, sizes: Sizes, cut: Cut | None, end: int, limits: Marks, pinned: int) -> Cut | None:
    """Return where a prompt that ends at `end` and is over the high mark is cut; `cut` where nothing more can go.

    Whole turns go, the fewest that bring it under the low mark; where all but the newest turn are not enough, its
    oldest calls with their results go too, the fewest again, never the newest of them.
    """
    all_starts = [i for i, entry in enumerate(draft.entries[: end + 1]) if entry.role == "user"]
    held = cut.turn if cut is not None else -1
    starts = [start for start in all_starts[pinned + 1 :] if start > held]
    for start in starts:
        if sizes.least(start, end) <= limits.low:
            found = cut_at(draft, start)
            if sizes.from_cut(found, end) <= limits.low:
                return found
    newest = all_starts[-1] if all_starts else None
    if newest is None:
        return cut
    least = cut_at(draft, newest) if starts else cut
    if least is not None and least is not cut and sizes.from_cut(least, end) <= limits.high:
        return least
    held = least.inner if least is not None and least.turn == newest else newest + 1
    inner = least
    for place in _block_ends(draft, held, end):
        if place - 1 in sizes.after:
            inner = _cut(draft, newest, place)
            if sizes.from_cut(inner, end) <= limits.low:
                break
    return inner


def cut_at(draft: Draft, start: int) -> Cut:
    """Return the cut in front of the turn that begins at `start`."""
    return _cut(draft, start, start + 1)


def _cut(draft: Draft, turn: int, inner: int) -> Cut:
    # As it was first told: a block that comes to stand in front of it goes again with the next turn.
    entry = draft.entries[turn]
    return Cut(turn, entry.node.seen if entry.node is not None else entry.seen, inner)


def _block_ends(draft: Draft, start: int, end: int) -> list[int]:
    """Return where each call with its results ends, from `start` on; the newest one is never among them."""
    return [i for i in range(start + 1, end + 1) if draft.entries[i].role == "assistant"]


def replayed(draft: Draft, sizes: Sizes, limits: Marks, pinned: int) -> Cut | None:
    """Return where the prompt begins once the marks were replayed over a chat from its front; None: no cut.

    A fresh process so cuts where one that saw the chat grow has cut.
    """
    cut: Cut | None = None
    for end in request_ends(draft):
        if end < sizes.first:
            continue
        total = sizes.uncut(end) if cut is None else sizes.from_cut(cut, end)
        if total > limits.high:
            cut = next_cut(draft, sizes, cut, end, limits, pinned)
    return cut
