"""What prometheus_client shows of the collectors that it lacks."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from proxy.collectors import Bulk, Lean

BOUNDS, VALUES = (0.1, 0.5, 1.0), (0.05, 0.1, 0.2, 0.5, 0.7, 3.0)


def test_values_in_bulk_make_the_histogram_that_single_ones_make() -> None:
    """Bounds belong to their own bucket; nothing but `_created` differs."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bulk = Bulk("x_seconds", "Gaps.", BOUNDS)
    ours.register(bulk)
    single = Histogram("x_seconds", "Gaps.", buckets=BOUNDS, registry=theirs)
    for _ in range(2):
        bulk.add(VALUES)
        bulk.add(())
        for value in VALUES:
            single.observe(value)
    shown = generate_latest(Lean(theirs)).decode()
    assert 'x_seconds_bucket{le="0.1"} 4.0' in shown and "_created" not in shown
    assert generate_latest(ours).decode() == shown


def test_the_lean_view_leaves_out_nothing_but_when_series_began() -> None:
    """Twice as many series are twice the memory of whoever collects them."""
    registry = CollectorRegistry()
    Counter("y", "Some.", ("how",), registry=registry).labels("a").inc(3)
    names = [sample.name for family in Lean(registry).collect() for sample in family.samples]
    assert names == ["y_total"]
    assert any(sample.name == "y_created" for family in registry.collect() for sample in family.samples)
