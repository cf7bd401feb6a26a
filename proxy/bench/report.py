"""Sums up what was played: one line a scenario and way, the ratio of the two, as values, table rows and JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.bench.client import Sample
from proxy.bench.play import Played

WAYS = ("straight", "proxied")
COLUMNS = ("scenario", "way", "requests", "failed", "first token p50", "p99", "cached", "computed", "tokens/s")


@dataclass(frozen=True, slots=True)
class Figures:
    """One way of one scenario.  Times to first token are of chats' later turns (of all, if there was only one)."""

    requests: int
    failed: int
    first_token_p50_seconds: float | None
    first_token_p99_seconds: float | None
    first_turn_p50_seconds: float | None
    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int
    seconds: float

    @property
    def cached_share(self) -> float | None:
        """The part of all prompts, 0 to 1, that came from the cache; None where the server does not tell."""
        return None if self.cached_tokens is None or not self.prompt_tokens else self.cached_tokens / self.prompt_tokens

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that were not cached."""
        return None if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all users together."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


def figures(samples: Sequence[Sample], seconds: float) -> Figures:
    """Sum up the samples of one way of one scenario, which took that many seconds."""
    good = [each for each in samples if not each.failure]
    chats = [each for each in good if not each.task]
    later = _times([each for each in chats if each.turn > 0] or chats)
    told = [each.cached_tokens for each in good]
    cached = sum(each for each in told if each is not None) if any(each is not None for each in told) else None
    return Figures(
        requests=len(samples),
        failed=len(samples) - len(good),
        first_token_p50_seconds=percentile(later, 0.50),
        first_token_p99_seconds=percentile(later, 0.99),
        first_turn_p50_seconds=percentile(_times([each for each in chats if each.turn == 0]), 0.50),
        prompt_tokens=sum(each.prompt_tokens for each in good),
        cached_tokens=cached,
        generated_tokens=sum(each.generated_tokens for each in good),
        seconds=seconds,
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that `share` of them do not pass; None of none."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * share) - 1] if ordered else None


def _times(samples: Sequence[Sample]) -> list[float]:
    return [each.first_token_seconds for each in samples if each.first_token_seconds is not None]


def summed(played: Played) -> Mapping[str, Mapping[str, Figures]]:
    """Return the figures by scenario and way, in the order in which they were played."""
    names = list(dict.fromkeys(sample.scenario for sample in played.samples))
    return {
        name: {
            way: figures(
                [each for each in played.samples if (each.scenario, each.way) == (name, way)],
                played.seconds.get((name, way), 0.0),
            )
            for way in WAYS
        }
        for name in names
    }


def failures(played: Played) -> list[str]:
    """Return a sentence for each scenario and way in which requests failed, with the first reason."""
    out = []
    for name, ways in summed(played).items():
        for way, found in ways.items():
            if found.failed:
                why = next(each.failure for each in played.samples if each.failure and _of(each) == (name, way))
                out.append(f"{name}, {way}: {found.failed} of {found.requests} requests failed: {why}")
    return out


def _of(sample: Sample) -> tuple[str, str]:
    return sample.scenario, sample.way


def ratio(straight: float | None, proxied: float | None) -> float | None:
    """Return how many times as much the straight way took; None where one of them is not known or nothing."""
    return straight / proxied if straight and proxied else None


def rows(found: Mapping[str, Mapping[str, Figures]]) -> list[tuple[str, ...]]:
    """Return the lines of the table: both ways of each scenario, then how many times as much straight took."""
    out = []
    for name, ways in found.items():
        out += [_row(name if way == WAYS[0] else "", way, ways[way]) for way in WAYS]
        ratios = ratios_of(ways)
        told = {key: "-" if value is None else f"{value:.1f} x" for key, value in ratios.items()}
        cells = (
            told["first_token_p50"],
            told["first_token_p99"],
            "",
            told["computed_tokens"],
            told["tokens_per_second"],
        )
        out.append(("", "ratio", "", "", *cells))
    return out


def _row(name: str, way: str, found: Figures) -> tuple[str, ...]:
    share, computed = found.cached_share, found.computed_tokens
    return (
        name,
        way,
        str(found.requests),
        str(found.failed),
        _seconds(found.first_token_p50_seconds),
        _seconds(found.first_token_p99_seconds),
        "-" if share is None else f"{share:.0%}",
        "-" if computed is None else f"{computed:,}",
        f"{found.tokens_per_second:.1f}",
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def ratios_of(ways: Mapping[str, Figures]) -> Mapping[str, float | None]:
    """Return straight divided by proxied; of the throughput proxied by straight, so that above 1 is always better."""
    straight, proxied = ways[WAYS[0]], ways[WAYS[1]]
    return {
        "first_token_p50": ratio(straight.first_token_p50_seconds, proxied.first_token_p50_seconds),
        "first_token_p99": ratio(straight.first_token_p99_seconds, proxied.first_token_p99_seconds),
        "computed_tokens": ratio(straight.computed_tokens, proxied.computed_tokens),
        "tokens_per_second": ratio(proxied.tokens_per_second, straight.tokens_per_second),
    }


def as_json(found: Mapping[str, Mapping[str, Figures]]) -> list[Mapping[str, object]]:
    """Return the scenarios as JSON values; figures that are not known are null."""
    return [
        {"scenario": name, **{way: _figures_json(ways[way]) for way in WAYS}, "ratio": ratios_of(ways)}
        for name, ways in found.items()
    ]


def _figures_json(found: Figures) -> Mapping[str, object]:
    values: dict[str, object] = {name: getattr(found, name) for name in Figures.__slots__}
    names = ("cached_share", "computed_tokens", "tokens_per_second")
    return values | {name: getattr(found, name) for name in names}
