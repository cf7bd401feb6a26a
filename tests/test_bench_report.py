"""What the bench makes of its samples."""

import pytest

from proxy.bench.client import Sample
from proxy.bench.play import Played
from proxy.bench.report import COLUMNS, as_json, failures, figures, percentile, rows, summed


def sample(way: str, turn: int, seconds: float | None, **fields: object) -> Sample:
    values = {"task": "", "prompt_tokens": 100, "cached_tokens": 0, "generated_tokens": 10, "failure": ""} | fields
    return Sample("clock", way, turn, first_token_seconds=seconds, **values)  # type: ignore[arg-type]  # by name


def played() -> Played:
    straight = [sample("straight", turn, 1.0 + turn) for turn in range(4)]
    proxied = [sample("proxied", turn, 0.5, cached_tokens=80 if turn else 0) for turn in range(4)]
    return Played([*straight, *proxied], {("clock", "straight"): 10.0, ("clock", "proxied"): 5.0})


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [([], 0.5, None), ([3.0], 0.99, 3.0), ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0), ([1.0, 2.0, 3.0], 0.99, 3.0)],
)
def test_a_percentile_is_one_of_the_values(values: list[float], share: float, wanted: float | None) -> None:
    assert percentile(values, share) == wanted


def test_the_first_turn_is_cold_for_all_and_told_apart() -> None:
    """Tasks and failures count in tokens and requests, not in times."""
    found = figures(
        [*played().samples[:4], sample("straight", 1, 99.0, task="t"), sample("straight", 1, None, failure="x")], 10
    )
    assert (found.first_turn_p50_seconds, found.first_token_p50_seconds, found.first_token_p99_seconds) == (
        1.0,
        3.0,
        4.0,
    )
    assert (found.requests, found.failed, found.prompt_tokens, found.tokens_per_second) == (6, 1, 500, 5.0)


def test_the_ratio_says_how_many_times_as_much_straight_took() -> None:
    """A table of one row a way and one of ratios, and the same as JSON."""
    found = summed(played())
    values = as_json(found)[0]
    assert values["ratio"] == pytest.approx(
        {"first_token_p50": 6.0, "first_token_p99": 8.0, "computed_tokens": 2.5, "tokens_per_second": 2.0}
    )
    table = rows(found)
    assert [row[:2] for row in table] == [("clock", "straight"), ("", "proxied"), ("", "ratio")]
    assert {len(row) for row in table} == {len(COLUMNS)}
    assert table[1][6:] == ("60%", "160", "8.0") and table[2][4] == "6.0 x"


def test_what_is_not_told_is_not_made_up() -> None:
    """Without details in usage there is no share and no ratio of tokens; without answers no times."""
    unknown = Played(
        [sample("straight", 0, 1.0, cached_tokens=None), sample("proxied", 0, None, failure="status 500: x")]
    )
    values = as_json(summed(unknown))[0]
    assert values["ratio"] == dict.fromkeys(
        ("first_token_p50", "first_token_p99", "computed_tokens", "tokens_per_second")
    )
    assert [cell for row in rows(summed(unknown)) for cell in row].count("-") == 10
    assert failures(unknown) == ["clock, proxied: 1 of 1 requests failed: status 500: x"]
