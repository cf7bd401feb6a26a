"""What the demo shows: the progress of what takes long, and the table of the chat told twice."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from proxy.demo.chat import Turn

MB = 1_000_000


class Screen:
    """A console that says what is being done; it is also the recipe's report."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status: Status | None = None
        self._label = ""
        self._begun = 0.0

    def step(self, label: str) -> None:
        """Show that a part is begun."""
        self._label, self._begun = label, time.monotonic()
        if self.console.is_terminal:
            self._status = self.console.status(label)
            self._status.start()
        else:
            # A log has no line that moves: say what is waited for before it takes minutes.
            self.console.print(f"  {label} ...", highlight=False, markup=False)

    def line(self, text: str) -> None:
        """Show what an installer is at, beside the seconds that have passed."""
        if self._status is None:
            return
        seconds = time.monotonic() - self._begun
        doing = " ".join(text.split()[:2])[:60] if text.startswith(("Collecting", "Downloading", "Installing")) else ""
        self._status.update(f"{self._label}  [dim]{seconds:.0f} s  {doing}[/dim]")

    def done(self, size_bytes: int, seconds: float) -> None:
        """Show that the part is whole, with its size on disk."""
        self._end(f"{size_bytes / MB:,.0f} MB", seconds)

    def note(self, text: str) -> None:
        """Show a sentence on lines of its own."""
        self.console.print(f"  {text}", style="yellow", highlight=False, markup=False)

    @contextmanager
    def waiting(self, label: str) -> Iterator[Callable[[], None]]:
        """Show `label` while the body runs, which calls what it is given now and then."""
        self.step(label)
        begun = time.monotonic()
        try:
            yield lambda: self.line("")
            self._end("", time.monotonic() - begun)
        finally:
            self.close()

    def close(self) -> None:
        """End the moving line, if there is one, also when something failed."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _end(self, size: str, seconds: float) -> None:
        self.close()
        self.console.print(f"  [green]✓[/green] {self._label:<40} {size:>9} {seconds:6.1f} s", highlight=False)


@dataclass(frozen=True, slots=True)
class Summary:
    """Turns 2 and later of one way, in two numbers."""

    cached_share: float
    time_to_first_token_seconds: float  # the median

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> "Summary":
        """Sum up the turns after the first, which nothing can be cached for."""
        later = turns[1:]
        cached = sum(turn.cached_tokens for turn in later)
        prompt = sum(turn.prompt_tokens for turn in later)
        return cls(cached / prompt, statistics.median(turn.time_to_first_token_seconds for turn in later))


def table(straight: Sequence[Turn], proxied: Sequence[Turn]) -> Table:
    """Return the table of the chat told to vLLM straight and through the proxy: equally many turns, at least two."""
    title = f"One chat of {len(straight)} turns, the time of day in its system prompt"
    result = Table(title=title, box=box.SIMPLE)  # 80 columns are enough for it
    result.add_column("\nturn", justify="right")
    for way in ("straight", "by proxy"):
        result.add_column(f"{way}:\nprompt", justify="right", no_wrap=True)
        result.add_column("\ncached", justify="right", no_wrap=True)
        result.add_column("first\ntoken", justify="right", no_wrap=True)
    for number, pair in enumerate(zip(straight, proxied, strict=True), start=1):
        result.add_row(
            str(number), *(cell for turn in pair for cell in _cells(turn)), end_section=number == len(straight)
        )
    cells = []
    for turns in (straight, proxied):
        summary = Summary.of(turns)
        prompt = sum(turn.prompt_tokens for turn in turns[1:])
        cached = sum(turn.cached_tokens for turn in turns[1:])
        cells += [f"{prompt:,}", _share(cached, summary.cached_share), f"{summary.time_to_first_token_seconds:.2f} s*"]
    result.add_row(f"2-{len(straight)}", *cells, style="bold")
    result.caption = "* median"
    return result


def _cells(turn: Turn) -> tuple[str, str, str]:
    cached = _share(turn.cached_tokens, turn.cached_share)
    return f"{turn.prompt_tokens:,}", cached, f"{turn.time_to_first_token_seconds:.2f} s"


def _share(tokens: int, share: float) -> str:
    return f"{tokens:,} ({share:.0%})"
