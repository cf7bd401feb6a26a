"""The steps in their order, and the loop that runs them.

The order has reasons: history is put back first, so that every later step sees what was sent; volatile text moves
once it is known what the history tells, documents become pointers once all text is in its place; lengths and salt
come last, for they look at no text.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from proxy.core.clamp_lengths import clamp_lengths
from proxy.core.continue_final import continue_final
from proxy.core.counting import Question, Uncounted
from proxy.core.dedupe_context import dedupe_context
from proxy.core.draft import HEAD_ROLES, Cut, Draft, Entry, Facts, records_of
from proxy.core.keep_tools import keep_tools, list_digest
from proxy.core.learned_lines import Lines
from proxy.core.ledger import Record
from proxy.core.move_midloop import move_midloop
from proxy.core.move_volatile import move_volatile
from proxy.core.rank import rank
from proxy.core.rehang_task import rehang_task
from proxy.core.reject import Reject
from proxy.core.request import ChatRequest
from proxy.core.restore_history import restore_history
from proxy.core.salt import add_salt
from proxy.core.spell_arguments import spell_arguments
from proxy.core.text import message_digest
from proxy.core.trim_history import family_of, trim_history

Step = Callable[[Draft, Facts], Draft]

PIPELINE: tuple[tuple[str, Step], ...] = (
    ("keep_tools", keep_tools),
    ("spell_arguments", spell_arguments),
    ("restore_history", restore_history),
    ("move_volatile", move_volatile),
    ("move_midloop", move_midloop),
    ("dedupe_context", dedupe_context),
    ("rehang_task", rehang_task),
    ("continue_final", continue_final),
    ("trim_history", trim_history),
    ("clamp_lengths", clamp_lengths),
    ("salt", add_salt),
    ("rank", rank),
)
MOVES_TEXT = frozenset(
    {"keep_tools", "restore_history", "move_volatile", "move_midloop", "dedupe_context", "rehang_task"}
)
"""Steps that move text.  Without them, and without a cut, vLLM is told what the client told."""

NEEDS_PROMPT = MOVES_TEXT | {"trim_history"}
EXACT_PROMPT = ("echo", "prompt_logprobs", "return_token_ids", "truncate_prompt_tokens", "documents", "chat_template")
"""Fields whose callers ask about exactly their prompt: no text of theirs moves."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The request to send, what the ledger is to remember, the names of the steps that changed something.

    `left_out` counts the messages that a cut left out; `counted` are the prompt's tokens, a sure upper bound unless
    `exact`; `tools` is the digest of the list that goes up.  With `questions` it is no answer yet: they must be counted
    and the pipeline run again.
    """

    request: ChatRequest
    records: tuple[Record, ...]
    trail: tuple[str, ...]
    failed: tuple[tuple[str, str], ...] = ()
    lines: Lines | None = None
    cut: Cut | None = None
    left_out: int = 0
    family: bytes = b""
    counted: int | None = None
    exact: bool = False
    questions: tuple[Question, ...] = ()
    tools: bytes = b""


def rewrite(request: ChatRequest, facts: Facts) -> Rewritten:
    """Run every step that is on.

    A step that fails is left out, named in `failed` with the class of its error, and costs nobody an answer; Reject
    is no failure but an answer to the client.
    """
    draft = draft_of(request)
    failed: list[tuple[str, str]] = []
    movable = moves_text(request.rest)
    for name, step in PIPELINE:
        if name == "move_volatile":
            draft = replace(draft, restored=draft)
        if name not in facts.steps or (name in NEEDS_PROMPT and not movable):
            continue
        try:
            after = step(draft, facts)
        except Reject:
            raise
        except Uncounted as open_questions:
            return Rewritten(request, (), (), questions=open_questions.questions)
        except Exception as error:
            failed.append((name, type(error).__name__))
            continue
        draft = after if _same(draft, after) else replace(after, trail=(*draft.trail, name))
    sent = request if not draft.trail else draft.request()
    family = family_of(draft) if "trim_history" in facts.steps else b""
    return Rewritten(
        sent,
        records_of(draft, facts.leads),
        draft.trail,
        tuple(failed),
        draft.lines,
        draft.cut,
        len(draft.gone),
        family,
        draft.counted,
        draft.exact,
        tools=list_digest(draft.rest) if draft.tools is None else draft.tools,
    )


def _same(before: Draft, after: Draft) -> bool:
    """Say whether two drafts send the same; entries that only learned their node are the same."""
    if before is after:
        return True
    if before.gone != after.gone or len(before.entries) != len(after.entries):
        return False
    if before.head is not after.head and before.head != after.head:
        return False
    if before.rest is not after.rest and (before.rest != after.rest or _spelled(before.rest) != _spelled(after.rest)):
        return False
    if before.entries is after.entries:
        return True
    pairs = zip(before.entries, after.entries, strict=True)
    return all(a.message is b.message and a.note is b.note for a, b in pairs)


def _spelled(rest: Mapping[str, object]) -> list[tuple[str, int]]:
    """1 == True == 1.0 in Python, so values are told apart by identity."""
    return [(key, id(value)) for key, value in rest.items()]


def draft_of(request: ChatRequest) -> Draft:
    """Take a request apart: the leading system messages, then one entry a message."""
    messages = request.messages
    size = next((i for i, message in enumerate(messages) if message.get("role") not in HEAD_ROLES), len(messages))
    entries = tuple(Entry(message, message_digest(message), message) for message in messages[size:])
    return Draft(messages[:size], entries, request.rest)


def moves_text(rest: Mapping[str, object]) -> bool:
    """Say whether the request leaves its prompt to us: one answer, and no field that asks about exactly its prompt."""
    return not any(rest.get(field) not in (None, False) for field in EXACT_PROMPT)
