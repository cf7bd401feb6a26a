"""What the demo prints."""

import io

import pytest
from rich.console import Console

from proxy.demo.chat import Turn
from proxy.demo.screen import Screen, Summary, table

STRAIGHT = [Turn(1000 + number, 0, 1.0 + number, "") for number in range(6)]
PROXIED = [Turn(1000, 0, 1.0, ""), *[Turn(1000, 900, 0.1 * number, "") for number in range(1, 6)]]


def printed(terminal: bool = False) -> tuple[Screen, io.StringIO]:
    """Return a screen of 80 columns and what it has printed."""
    out = io.StringIO()
    return Screen(Console(file=out, width=80, force_terminal=terminal, color_system=None)), out


def test_the_summary_leaves_the_first_turn_out() -> None:
    """
    Nothing can be cached for the first turn, so it says nothing about the cache.
    """
    summary = Summary.of(PROXIED)
    assert summary.cached_share == 0.9
    assert summary.time_to_first_token_seconds == pytest.approx(0.3)


def test_the_table_fits_into_80_columns() -> None:
    """
    No number is cut or wrapped on a plain terminal.
    """
    screen, out = printed()
    screen.console.print(table(STRAIGHT, PROXIED))
    lines = [line for line in out.getvalue().splitlines() if "%)" in line]
    assert len(lines) == 7
    assert lines[2].split() == ["3", "1,002", "0", "(0%)", "3.00", "s", "1,000", "900", "(90%)", "0.20", "s"]
    assert lines[6].split()[0] == "2-6"


def test_a_part_is_shown_with_its_size_and_seconds() -> None:
    """
    A log without moving lines shows what is begun and what it came to.
    """
    screen, out = printed()
    screen.step("torch")
    screen.line("Downloading torch-2.13.0.whl (200 MB)")
    screen.done(879_870_413, 20.5)
    assert out.getvalue().split() == ["torch", "...", "✓", "torch", "880", "MB", "20.5", "s"]


def test_a_terminal_shows_a_moving_line_that_ends() -> None:
    """
    Also after a failure no spinner is left behind.
    """
    screen, out = printed(terminal=True)
    with pytest.raises(OSError, match="gone"), screen.waiting("vLLM starts") as waiting:
        waiting()
        raise OSError("gone")
    screen.note("A [sentence] with brackets.")
    assert "vLLM starts" in out.getvalue()
    assert "✓" not in out.getvalue()
    assert "A [sentence] with brackets." in out.getvalue()
