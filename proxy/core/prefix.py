"""How much of a prompt vLLM should have from the last one, where that ends and why; and why it had less.

The prediction counts in whole blocks and never the whole prompt.  Where whole messages are shared whose tokens vLLM
counted, it is exact; within a message it is an estimate, by the tokens that vLLM counted for the characters around.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proxy.core.last_prompt import MESSAGE_CHARACTERS, LastPrompt, Mark, Prompt, Said, said_in, thinks
from proxy.core.prints import common_characters, common_in_chunks, common_prints
from proxy.core.request import Message
from proxy.core.text import reply_key, text_of

CAUSES = (
    "system", "tools", "edited", "trimmed", "expired", "template", "retokenised", "model", "salt", "unknown",
)  # fmt: skip
SHORTFALLS = ("eviction", "template", "retokenised")

ASSUMED_BLOCK_TOKENS = 16
"""vLLM's default on GPUs, taken while the served size is not known."""

GENERATION_PROMPT_TOKENS = 16
"""More than known templates put after the last message (Qwen3 without thinking: 7)."""

TOKENS_PER_CHARACTER = 0.25
"""While vLLM has counted nothing of a chat; only for estimates."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What vLLM should take from its cache: `messages` whole ones, `tokens` in whole blocks, `sure_tokens` counted.

    `cause` is empty where nothing of the last prompt and its answer was lost.  Else `message` is the index of the first
    that differs (None: it is not the messages) and `character` where its text does: there, or (not `located`) within
    the chunk that begins there; None where it is not the text.  `reply_at` is the last prompt's length, `starts` those
    of the prompts before it, in tokens.
    """

    block_tokens: int
    messages: int = 0
    tokens: int = 0
    sure_tokens: int = 0
    cause: str = ""
    message: int | None = None
    character: int | None = None
    located: bool = False
    reply_at: int | None = None
    reply_tokens: int = 0
    starts: tuple[int, ...] = ()
    thought: bool = False


def nearest(prompts: Sequence[LastPrompt], now: Prompt) -> LastPrompt | None:
    """Return the prompt that shares most whole messages with `now`, the last one of equals: branches have their own."""
    best, most = None, -1
    for each in prompts:
        shared = common_prints(each.prints, now.prints)
        if shared == len(each.prints) < len(now.prints):
            shared += 1  # its answer may be shared too
        if shared >= most:
            best, most = each, shared
    return best


def predict(
    last: LastPrompt | None,
    now: Prompt,
    block_tokens: int,
    *,
    texts: Sequence[Message] | None = None,
    trimming: bool = False,
) -> Prediction:
    """Return what `now` should reuse of `last`, and where and why that is not all of it.

    `texts` are the messages of `last` with its reply, where they are still known: the place is then exact.
    `trimming`: the proxy itself cut this prompt.
    """
    empty = Prediction(block_tokens)
    if last is None:
        return replace(empty, cause="expired" if _has_history(now) else "")
    whole = _whole(last, now)
    if whole:
        return replace(empty, cause=whole)
    shared = common_prints(last.prints, now.prints)
    if last.tools != now.tools and shared >= last.head:
        return replace(empty, cause="tools")
    thought = last.said is not None and last.said.thought
    starts = tuple(m.tokens for m in last.marks if last.roles[m.messages - 1] != "a") if thought else ()
    known = Prediction(
        block_tokens,
        reply_at=last.prompt_tokens,
        reply_tokens=last.completion_tokens,
        starts=starts,
        thought=thought,
    )
    if shared == len(now.prints):
        return _counted(known, last, now, shared, 0, whole=True)
    if shared == len(last.prints):
        return _after(known, last, now, texts)
    return _within(known, last, now, shared, texts, trimming)


def _has_history(now: Prompt) -> bool:
    return any(message.get("role") == "assistant" for message in now.messages)


def _whole(last: LastPrompt, now: Prompt) -> str:
    """Return the cause that takes the whole prompt, if there is one."""
    if last.model != now.model:
        return "model"
    if last.salt != now.salt:
        return "salt"
    return "template" if last.fields != now.fields else ""


def _within(
    known: Prediction, last: LastPrompt, now: Prompt, shared: int, texts: Sequence[Message] | None, trimming: bool
) -> Prediction:
    """The prompts part within the messages of the last one."""
    told = now.messages[shared]
    cause = _cause(last, now, shared, trimming)
    same_role = _same_role(last, told, shared)
    at, located = 0, True
    if same_role:
        before = text_of(texts[shared]) if texts is not None else None
        at, located = _place(before, last.chunks_at(shared), last.lengths[shared], text_of(told))
    elsewhere = same_role and at == last.lengths[shared] == len(text_of(told))
    if elsewhere and cause == "edited":
        cause = "unknown"
    found = _counted(known, last, now, shared, at)
    tools = last.tools != now.tools
    return replace(
        found,
        cause=cause,
        message=shared,
        character=None if elsewhere else at,
        located=located,
        tokens=0 if tools else found.tokens,
        sure_tokens=0 if tools else found.sure_tokens,
    )


def _same_role(last: LastPrompt, told: Message, shared: int) -> bool:
    role = str(told.get("role"))
    return last.roles[shared] == ("s" if role == "developer" else role[:1])


def _place(before: str | None, chunks: bytes, characters: int, now: str) -> tuple[int, bool]:
    """Return where two texts part, and whether that is the very character."""
    if before is not None:
        return common_characters(before, now), True
    at = common_in_chunks(chunks, characters, now)
    return at, at == min(characters, len(now))


def _cause(last: LastPrompt, now: Prompt, shared: int, trimming: bool) -> str:
    if shared < last.head or (shared == last.head and now.messages[shared].get("role") in ("system", "developer")):
        moved = _dropped(last, now, shared)
        return "trimmed" if moved and shared > 0 else "system"
    if trimming and last.lengths[shared] > len(text_of(now.messages[shared])):
        return "trimmed"  # a document fell back to its short form
    return "trimmed" if (trimming or shared == last.head) and _dropped(last, now, shared) else "edited"


def _dropped(last: LastPrompt, now: Prompt, shared: int) -> bool:
    """Say whether the last prompt goes on in this one after something of it was left out (and a sentence put there)."""
    rest = now.prints[shared : shared + 2]
    for put_in, value in enumerate(rest):
        for i in range(shared + 1, len(last.prints)):
            tail = last.prints[i:]
            if last.prints[i] == value and now.prints[shared + put_in : shared + put_in + len(tail)] == tail:
                return i > shared + put_in
    return False


def _after(
    known: Prediction, last: LastPrompt, now: Prompt, texts: Sequence[Message] | None
) -> Prediction:  # fmt: skip
    """The whole last prompt is shared: what of its answer?"""
    shared, said = len(last.prints), last.said
    told = now.messages[shared]
    if told.get("role") != "assistant" or said is None or last.prompt_tokens is None:
        return _counted(known, last, now, shared, 0)
    if said_in(told) == said.whole and thinks(told) == said.thought:
        # The last token of an answer was drawn and never computed.
        tokens = last.prompt_tokens + max(last.completion_tokens - 1, 0)
        return _in_blocks(replace(known, messages=shared + 1), tokens, tokens)
    before = text_of(texts[shared]) if texts is not None and len(texts) > shared else None
    at, located = _place(before, said.chunks, said.characters, text_of(told))
    lost_thought = said.thought and not thinks(told)
    if lost_thought:
        at = 0
    cut_short = said.cut and at == min(said.characters, len(text_of(told)))
    cause = "" if cut_short else "template" if lost_thought else _told_otherwise(said, told)
    part = last.completion_tokens * at / max(said.characters, 1)
    found = _in_blocks(replace(known, messages=shared), last.prompt_tokens + part, last.prompt_tokens)
    if not cause:
        return found
    return replace(found, cause=cause, message=shared, character=at, located=located)


def _told_otherwise(said: Said, told: Message) -> str:
    """A reply with other white space, or arguments spelled anew, is the same text in other tokens."""
    return "retokenised" if reply_key(told) == said.key else "edited"


def _counted(
    known: Prediction, last: LastPrompt, now: Prompt, shared: int, characters: int, *, whole: bool = False
) -> Prediction:
    """Count `shared` whole messages (`whole`: all there are) and the characters shared of the next one, in tokens."""
    marks = last.marks
    low = next((m for m in reversed(marks) if m.messages <= shared), Mark(0, 0))
    sure = low.tokens
    if low.messages and last.roles[low.messages - 1] != "a" and not _answer_follows(now, low.messages):
        sure = max(sure - GENERATION_PROMPT_TOKENS, 0)
    found = replace(known, messages=shared)
    if low.messages == shared and not characters:
        return _in_blocks(found, sure, sure, whole=whole)
    high = next((m for m in marks if m.messages > shared), None)
    more = last.weight(low.messages, shared) + (characters + MESSAGE_CHARACTERS // 2 if characters else 0)
    if high is not None:
        rate = (high.tokens - low.tokens) / max(last.weight(low.messages, high.messages), 1)
    else:
        rate = low.tokens / max(last.weight(0, low.messages), 1) if low.messages else TOKENS_PER_CHARACTER
    return _in_blocks(found, sure + more * max(rate, 0.0), sure, whole=whole)


def _answer_follows(now: Prompt, messages: int) -> bool:
    return messages >= len(now.messages) or now.messages[messages].get("role") == "assistant"


def _in_blocks(found: Prediction, tokens: float, sure: int, *, whole: bool = False) -> Prediction:
    size = found.block_tokens
    if whole:
        return replace(found, tokens=usable_tokens(int(tokens), size), sure_tokens=usable_tokens(sure, size))
    return replace(found, tokens=int(tokens) // size * size, sure_tokens=sure // size * size)


def usable_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Return the most that vLLM takes from its cache for a prompt: full blocks, and never its last token."""
    return max(prompt_tokens - 1, 0) // block_tokens * block_tokens


def judge(
    prediction: Prediction, cached_tokens: int, *, prompt_tokens: int | None = None, repeated: bool = False
) -> str:
    """Return why vLLM took less than was counted: one of SHORTFALLS, empty where it did not.

    Told apart by where the cached part ends: before the last generation prompt blocks were evicted; in it, or at the
    first token of the reply, the template renders the turn in another way; later, the reply has other tokens.  A reply
    shorter than two blocks cannot tell the last two apart: `repeated` says that the turn before lost it there too.
    """
    size = prediction.block_tokens
    sure = prediction.sure_tokens
    if prompt_tokens is not None:
        sure = min(sure, usable_tokens(prompt_tokens, size))
    if cached_tokens >= sure:
        return ""
    begun = prediction.reply_at
    if cached_tokens == 0 or begun is None:
        return "eviction"
    end = cached_tokens + size  # the first block that was not cached
    if end <= begun - GENERATION_PROMPT_TOKENS:
        thought_away = prediction.thought and any(cached_tokens <= at < end + size for at in prediction.starts)
        return "template" if thought_away else "eviction"
    if end <= begun:
        return "template"
    if cached_tokens <= begun:
        return "template" if repeated or prediction.reply_tokens >= 2 * size else "retokenised"
    return "retokenised"
