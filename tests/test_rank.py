"""Tasks wait behind chats where vLLM takes a priority."""

from dataclasses import replace

from proxy.core.draft import Draft, Facts
from proxy.core.ledger import Ledger
from proxy.core.rank import TASK_PRIORITY, rank

TASK = Facts(frozenset(), Ledger(0), task=True, takes_priority=True)


def test_a_task_goes_later() -> None:
    """Lower goes first in vLLM, chats have 0."""
    assert rank(Draft((), (), {}), TASK).rest == {"priority": TASK_PRIORITY} and TASK_PRIORITY > 0


def test_nothing_else_is_ranked() -> None:
    """No chat, no task that has a priority of its own, nothing where vLLM was not seen to take one."""
    plain, own = Draft((), (), {}), Draft((), (), {"priority": -1})
    assert rank(plain, replace(TASK, task=False)) is plain
    assert rank(own, TASK) is own
    assert rank(plain, replace(TASK, takes_priority=False)) is plain
