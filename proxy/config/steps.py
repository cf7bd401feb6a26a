"""Settings of the rewriting: which steps are on, and what they go by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from proxy.config import checks
from proxy.config.setting import Setting
from proxy.core.draft import GAP_TEXT

Profile = Literal["off", "safe", "balanced", "max"]
_WHY = "To find out which step matters, or to do without one."
# A setting reads as one paragraph; the formatter would make a column of each.
# fmt: off


@dataclass(frozen=True, slots=True)
class Steps:
    """Switches of single steps; unset, the profile decides. Profile off has none on, whatever is set here."""

    keep_tools: Annotated[bool | None, Setting("Keep the order of the tools list.", _WHY)] = None
    spell_arguments: Annotated[bool | None, Setting(
        "Write tool arguments given as an object as JSON text.", _WHY,
    )] = None
    restore_history: Annotated[bool | None, Setting(
        "Send earlier messages as they were sent before (profile safe: white space and argument spelling only).", _WHY,
    )] = None
    move_volatile: Annotated[bool | None, Setting(
        "Move changing text of the system message next to the newest user message.", _WHY,
    )] = None
    move_midloop: Annotated[bool | None, Setting(
        "Move a block put before an already sent message to the end of a tool loop.", _WHY,
    )] = None
    dedupe_context: Annotated[bool | None, Setting(
        "Replace a document that stands earlier in the prompt by a pointer to it.", _WHY,
    )] = None
    rehang_task: Annotated[bool | None, Setting(
        "Send titles, tags and follow-ups as the chat's own prompt plus an instruction.", _WHY,
    )] = None
    continue_final: Annotated[bool | None, Setting(
        "Continue a last message of the assistant instead of answering it.", _WHY,
    )] = None
    trim_history: Annotated[bool | None, Setting("Take out the oldest turns of what does not fit.", _WHY)] = None
    clamp_lengths: Annotated[bool | None, Setting("Hold answers to the limits of [lengths].", _WHY)] = None
    salt: Annotated[bool | None, Setting("Keep cached prefixes of different callers apart ([salt]).", _WHY)] = None
    rank: Annotated[bool | None, Setting("Let tasks wait behind chats where vLLM schedules by priority.", _WHY)] = None


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools list."""

    order: Annotated[Literal["session", "name"], Setting(
        "Keep a session's first order, or sort by name.", "Sessions of one set of tools should share their prefix.",
    )] = "session"


@dataclass(frozen=True, slots=True)
class Volatile:
    """Text of the system message that changes between requests."""

    tags: Annotated[tuple[str, ...], Setting(
        "Further tags whose element is known to change.", "A filter of yours adds a block of its own.",
        allowed="names without angle brackets", check=checks.tags,
    )] = ()


@dataclass(frozen=True, slots=True)
class History:
    """What comes back of earlier turns."""

    thinking: Annotated[bool, Setting(
        "Send the reasoning of earlier replies again, where the chat template renders it.",
        "Replies of a model that reasons are to be reused whole, for a longer prompt.",
    )] = False
    document_leads: Annotated[tuple[str, ...], Setting(
        "How further machine-made blocks in front of a user message begin.",
        "The document template was changed in Open WebUI, or another program adds documents.",
    )] = ()


@dataclass(frozen=True, slots=True)
class Trim:
    """How a conversation is cut that outgrows the model's context."""

    low_share: Annotated[float, Setting(
        "A cut goes down to this share of what fits; nothing is cut before it no longer fits.",
        "Lower: rarer cuts, which each cost a cold prompt. Higher: more of the conversation stays.", "", 0.1, 0.95,
    )] = 0.6
    pinned_turns: Annotated[int, Setting(
        "First turns that are never left out.", "The first message holds the task.", "turns", 0, 1000,
    )] = 0
    gap: Annotated[bool, Setting(
        "Say in the prompt where something was left out.", "The model mentions the gap where it should not.",
    )] = True
    gap_text: Annotated[str, Setting(
        "The sentence for it.", "Conversations are held in another language.",
        check=checks.not_empty, allowed="any text but the empty one",
    )] = GAP_TEXT
    stream_comment: Annotated[bool, Setting(
        "Begin a stream with a comment that tells what was left out, beside the reply header.",
        "A client shows comments of the stream.",
    )] = False


@dataclass(frozen=True, slots=True)
class Salt:
    """Who shares cached prefixes with whom: who shares may learn from times what others asked."""

    isolation: Annotated[Literal["key", "tenant", "session", "shared"], Setting(
        "Share within a key (one key, or none: all), a tenant, a session, or among all.",
        "Users of one key must not learn of each other's prompts (tenant), or all may share (shared).",
        flag="--isolation",
    )] = "key"
    secret: Annotated[str | None, Setting(
        "What salts are made from. Unset, one is made at the first start and kept beside the database.",
        "Several proxies in front of one vLLM must make the same salts.", secret=True,
        check=checks.long_secret, allowed="at least 16 characters",
    )] = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Limits of answers, in tokens."""

    max_output_tokens: Annotated[int, Setting(
        "Most tokens of an answer; more is lowered. Does not hold for models seen to reason, unless named in "
        "lengths.models.", "Answers are cut short, or take a place too long.", "tokens", 1, 100_000_000,
        flag="--max-output-tokens",
    )] = 8192
    default_output_tokens: Annotated[int | None, Setting(
        "Limit for a request that has none; unset, the cap holds.", "Answers without a limit are mostly too long.",
        "tokens", 1, 100_000_000,
    )] = None
    models: Annotated[Mapping[str, int], Setting(
        "Cap of single models, by name.", "One model may, or must not, answer at length.", "tokens", 1, 100_000_000,
    )] = field(default_factory=dict)
    users: Annotated[Mapping[str, int], Setting(
        "Cap of single users, by the id that a trusted key or a signature gives them; it comes before a key's.",
        "Some may, or must not, get long answers.", "tokens", 1, 100_000_000,
    )] = field(default_factory=dict)
    max_prompt_tokens: Annotated[int | None, Setting(
        "Most tokens of a chat's prompt: a longer conversation is cut to it, what cannot be cut is refused. Unset, "
        "the model's own length holds.", "Long prompts take more than their share of the cache.", "tokens", 1,
        100_000_000,
    )] = None
