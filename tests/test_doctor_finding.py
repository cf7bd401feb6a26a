"""What a list of findings means for a script."""

import pytest

from proxy.doctor.finding import Finding, State, exit_code, printable


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["well", "note"], 0),
        (["well", "mend", "failed"], 1),
        (["well", "failed", "note"], 2),
        ([], 2),
    ],
)
def test_the_exit_code_says_the_worst_that_can_be_acted_on(states: list[State], code: int) -> None:
    """Something to mend beats something that could not be checked; notes count for nothing."""
    assert exit_code([Finding("vLLM", "x", state, "y") for state in states]) == code


def test_what_a_server_says_does_not_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\n", 5) == "a?[2J"
