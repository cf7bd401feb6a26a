"""How long tasks and autocompletions wait, as rules over times."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.identity import TASKS, Identity
from proxy.core.waiting import FIRST, HELD, Chat, Typing, is_held, is_typing, waits_until

TIMES = st.floats(0, 100)
USER = Identity("t", True, "c", None, "title_generation", True)
CHATS = st.none() | st.builds(Chat, st.integers(0, 2), st.booleans(), TIMES)


@given(CHATS, st.sampled_from(sorted(HELD)), TIMES, TIMES, st.floats(0, 20), st.floats(0, 5))
def test_a_task_waits_for_times_to_come_and_never_beyond_its_limit(
    chat: Chat | None, task: str, arrived: float, waited: float, hold: float, head: float
) -> None:
    """So that a loop over this rule ends."""
    now = arrived + waited
    until = waits_until(chat, task, arrived, now, hold=hold, head=head)
    assert until is None or now < until <= arrived + hold


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=20))
def test_a_key_press_goes_at_once_only_after_a_quiet_time(gaps: list[float]) -> None:
    """The first one too; all others a window later."""
    typing, now = Typing(), 100.0
    assert typing.begins(now, 0.25) == now
    for gap in gaps:
        before, now = now, now + gap
        assert typing.begins(now, 0.25) == (now if now - before >= 0.25 else now + 0.25)


def test_only_tasks_that_nobody_waits_for_are_held() -> None:
    """What is acted on before or within the answer is not, nor what belongs to no named chat."""
    held = {task for task in TASKS if is_held(replace(USER, task=task))}
    assert held == {"title_generation", "tags_generation", "follow_up_generation", "emoji_generation"}
    assert not is_held(replace(USER, chat=None)) and not is_held(replace(USER, explicit=False))
    assert not is_held(replace(USER, task=None))


def test_only_known_users_type() -> None:
    """Nothing of a caller without a name waits."""
    typing = replace(USER, task="autocomplete_generation")
    assert is_typing(typing) and not is_typing(replace(typing, proven=False)) and not is_typing(USER)


def test_a_title_long_after_the_last_answer_waits_for_its_chat_to_begin_again() -> None:
    """It comes before its chat request whenever it comes; soon after an answer it is about that one."""
    chat = Chat(ended=True, ended_at=100.0)
    assert waits_until(chat, FIRST, 105.0, 105.0, hold=10.0, head=1.5) is None
    assert waits_until(chat, FIRST, 150.0, 150.0, hold=10.0, head=1.5) == 151.5
    assert waits_until(chat, "tags_generation", 150.0, 150.0, hold=10.0, head=1.5) is None
