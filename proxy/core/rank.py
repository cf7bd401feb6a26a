"""Step `rank`: tasks wait behind chats where vLLM schedules by priority."""

from dataclasses import replace

from proxy.core.draft import Draft, Facts

TASK_PRIORITY = 10
"""Chats have 0, vLLM's default; lower goes first (`--scheduling-policy priority`)."""


def rank(draft: Draft, facts: Facts) -> Draft:
    """Give a task a later place, where vLLM was seen to take one; a client's own value stays.

    Open WebUI shows nothing of a title that comes late, but everybody sees a chat that does.
    """
    if not facts.task or not facts.takes_priority or "priority" in draft.rest:
        return draft
    return replace(draft, rest={**draft.rest, "priority": TASK_PRIORITY})
