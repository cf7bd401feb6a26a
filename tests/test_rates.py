"""Rates of keys and tenants: never more than was set, nothing taken by what is refused, and told in OpenAI's shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.traffic import Rates as Settings
from proxy.core.rates import Bucket, Limit, Refusal, Use, admit, end
from proxy.core.reject import Reject
from proxy.downstream.auth import ANONYMOUS, Caller
from proxy.metrics import Metrics
from proxy.rates import MOST_TENANTS, Rates

GAPS = st.lists(st.floats(0, 40, allow_nan=False), max_size=80)


@given(st.integers(1, 300), GAPS)
def test_never_more_than_the_burst_and_the_rate_over_any_stretch_of_time(per_minute: int, gaps: list[float]) -> None:
    """And whoever is refused passes after the time that it was told."""
    limit, use, now, passed = Limit("key", requests_per_minute=per_minute), Use(), 1000.0, list[float]()
    for gap in gaps:
        now += gap
        found = admit(limit, use, now)
        if isinstance(found, Refusal):
            assert isinstance(admit(limit, use, now + found.wait_seconds), Use)
        else:
            passed.append(now)
            use = end(limit, found, 0, now)
    for i, first in enumerate(passed):
        for j in range(i, len(passed)):
            assert j - i + 1 <= per_minute + (passed[j] - first) * per_minute / 60 + 1e-6


@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 5000)), max_size=40))
def test_tokens_are_paid_by_the_requests_that_follow(per_minute: int, costs: list[tuple[float, int]]) -> None:
    """One request at a time passes the rate by its own cost at most."""
    limit, use, now, spent = Limit("tenant", tokens_per_minute=per_minute), Use(), 0.0, 0
    for gap, cost in costs:
        now += gap
        found = admit(limit, use, now)
        if isinstance(found, Refusal):
            assert found.what == "tokens" and isinstance(admit(limit, use, now + found.wait_seconds), Use)
            continue
        assert spent < per_minute + now * per_minute / 60 + 1e-6
        use, spent = end(limit, found, cost, now), spent + cost


def test_a_clock_that_stands_still_or_goes_back_fills_nothing() -> None:
    """A bucket knows the latest time that it has seen."""
    assert Bucket(1.0, 10.0).now(5.0, 60) == Bucket(1.0, 10.0)
    assert Bucket(1.0, 10.0).now(11.0, 60) == Bucket(2.0, 11.0)
    assert Bucket(1.0, 10.0).now(1e9, 60).level == 60.0


def test_so_many_at_once_and_no_more() -> None:
    """A place is free again as soon as a request has ended."""
    limit, use = Limit("key", concurrent=2), Use()
    for _ in range(2):
        found = admit(limit, use, 0.0)
        assert isinstance(found, Use)
        use = found
    assert admit(limit, use, 0.0) == Refusal("key", "concurrent", 2, 1)
    assert isinstance(admit(limit, end(limit, use, 5, 0.0), 0.0), Use)
    assert end(limit, Use(), 0, 0.0).running == 0


def caller(**limits: int) -> Caller:
    """Return a key's caller with these limits."""
    return Caller("a", True, False, False, None, Limit("key", **limits))


def refused(rates: Rates, who: Caller, tenant: str = "u") -> Reject:
    """Return how a request is refused."""
    with pytest.raises(Reject) as caught, rates.entered(who, tenant):
        pass
    return caught.value


def test_what_the_tenant_is_refused_costs_the_key_nothing() -> None:
    """Nothing is taken before all agree; another tenant of the key goes on."""
    rates = Rates(Settings(tenant_requests_per_minute=1), Metrics())
    key = caller(requests_per_minute=2)
    with rates.entered(key, "u"):
        pass
    for _ in range(5):
        assert refused(rates, key).message.startswith("This user may use 1 requests a minute")
    with rates.entered(key, "v"):
        pass
    assert refused(rates, key, "w").message.startswith("This API key may use 2 requests a minute")


def test_a_refusal_is_one_that_sdks_wait_for() -> None:
    """429, OpenAI's type and code, whole seconds."""
    rates = Rates(Settings(), Metrics())
    with rates.entered(caller(concurrent=1), "u"):
        reject = refused(rates, caller(concurrent=1))
    assert (reject.status, reject.kind, reject.code) == (429, "requests", "rate_limit_exceeded")
    assert reject.headers == {"Retry-After": "1"} and reject.message == (
        "This API key may have 1 requests at once. Try again in 1 second."
    )
    with rates.entered(caller(tokens_per_minute=60), "u") as ticket:
        ticket.tokens = 100
    reject = refused(rates, caller(tokens_per_minute=60))
    assert reject.kind == "tokens" and 39 <= int(reject.headers["Retry-After"]) <= 41


def test_a_request_that_fails_gives_its_place_back() -> None:
    """However it ends."""
    rates = Rates(Settings(tenant_concurrent=1), Metrics())
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), rates.entered(ANONYMOUS, "u"):
            raise ZeroDivisionError
    assert rates.on(ANONYMOUS) and not Rates(Settings(), Metrics()).on(ANONYMOUS)


def test_the_table_of_tenants_is_bounded() -> None:
    """Those that run are never forgotten."""
    rates = Rates(Settings(tenant_concurrent=1), Metrics())
    with rates.entered(ANONYMOUS, "first"):
        for i in range(MOST_TENANTS + 10):
            with rates.entered(ANONYMOUS, str(i)):
                pass
        assert refused(rates, ANONYMOUS, "first").status == 429
        assert len(rates._used) == MOST_TENANTS
