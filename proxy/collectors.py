"""Collectors that prometheus_client lacks: a histogram filled in bulk, and a registry's view without `_created`."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Bulk(Collector):
    """A histogram that takes many values at once, without a lock for each: the gaps between an answer's tokens."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name, self._text, self._buckets = name, text, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def add(self, values: Iterable[float]) -> None:
        """Count every value."""
        for value in values:
            self._counts[bisect_left(self._buckets, value)] += 1
            self._sum += value

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram with the cumulative counts that the exposition format wants."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._buckets), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class Lean(Collector):
    """What the registry holds without the `_created` samples, which would double the number of series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield every family, shortened."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
