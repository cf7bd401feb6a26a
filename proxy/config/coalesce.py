"""Settings of coalescing: which requests share a run of vLLM, and which wait for another."""

from dataclasses import dataclass
from typing import Annotated

from proxy.config.setting import Setting

_KIB, _MIB = 1024, 1024 * 1024
# A setting reads as one paragraph; the formatter would make a column of each.
# fmt: off


@dataclass(frozen=True, slots=True)
class Coalesce:
    """Requests that need no run of their own, and tasks that wait.

    Only among requests of one user whom a trusted key or a signature names, under one key, for one model; profile off
    has none of it.
    """

    single_flight: Annotated[bool, Setting(
        "Equal requests at the same time share one run: tasks; chat requests with the same message id or "
        "Idempotency-Key, or repeated by an SDK, or with a determined answer (temperature 0 or a seed).",
        "Every request must reach vLLM, to measure it.",
    )] = True
    supersede: Annotated[bool, Setting(
        "In a named chat a request that adds text of the user to one that has no token yet takes its place: both get "
        "the newer answer. Never between different message ids.",
        "An API client sends again while the user still types.",
    )] = False
    debounce_ms: Annotated[int, Setting(
        "Autocompletions: a user's first goes at once; of those that follow within this time of each other the last "
        "goes, the others are answered empty. 0 turns it off.",
        "Suggestions should come sooner, or cost less.", "milliseconds", 0, 10_000,
    )] = 250
    window_ms: Annotated[int, Setting(
        "In a named chat every request waits so long for one that adds user messages to it, which then goes in its "
        "place: both get that answer. 0: no chat request waits.",
        "An API client sends a user's input piece by piece.", "milliseconds", 0, 10_000,
    )] = 0
    hold_seconds: Annotated[float, Setting(
        "Titles, tags, follow-ups and emoji wait at most so long while their chat is answered. 0: they never wait.",
        "Answers take longer, and nothing should slow them.", "seconds", 0, 600,
    )] = 10.0
    task_head_seconds: Annotated[float, Setting(
        "How long a title waits for its chat to begin (Open WebUI sends the first one before the chat request), and "
        "any such task for the next round of a tool loop.",
        "Tools are slow, or a slow Open WebUI sends chats later than that.", "seconds", 0, 60,
    )] = 1.5
    buffer_bytes: Annotated[int, Setting(
        "How much of a running answer is kept for those who join late (up to half of it) or read slowly; who falls "
        "further behind the quickest is cut with an error event.", "Answers are long, or memory is short.",
        "bytes", 64 * _KIB, 1024 * _MIB,
    )] = _MIB
