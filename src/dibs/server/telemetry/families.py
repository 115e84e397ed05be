"""Counts and histograms that take a whole batch at once, and hand themselves to Prometheus when it asks.

Those of the client library take one observation at a time, which a batch of 500 tasks would feel.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

OTHER = "other"

Values = tuple[str, ...]


class Labels:
    """Admits the first so many distinct values of labels; whatever comes later is `other`. So no caller can make the
    number of series grow."""

    def __init__(self, limit: int, width: int) -> None:
        self._limit = limit
        self._known: dict[Values, Values] = {}
        self._other = (OTHER,) * width
        self._lock = threading.Lock()

    def of(self, *values: str) -> Values:
        """Returns the values, or `other` for each."""
        found = self._known.get(values)
        if found is not None:
            return found
        with self._lock:
            if len(self._known) >= self._limit:
                return self._other
            return self._known.setdefault(values, values)

    def known(self) -> list[Values]:
        """Those that were admitted."""
        return [*self._known]


class Counts:
    """A counter, or with `gauge` a number that may fall, for each combination of labels."""

    def __init__(self, name: str, doc: str, labels: Sequence[str] = (), *, gauge: bool = False) -> None:
        self.name = name
        self._doc = doc
        self.labels = labels
        self._gauge = gauge
        self._values: dict[Values, float] = {}
        self._lock = threading.Lock()
        if not labels:
            self._values[()] = 0

    def add(self, values: Values, count: float = 1) -> None:
        """Adds to one combination, from any thread."""
        with self._lock:
            self._values[values] = self._values.get(values, 0) + count

    def inc(self, *values: str) -> None:
        """Adds one."""
        self.add(values)

    def dec(self, *values: str) -> None:
        """Takes one away."""
        self.add(values, -1)

    def set_all(self, values: dict[Values, float]) -> None:
        """Replaces all combinations by others."""
        self._values = values

    def family(self) -> Metric:
        """Returns it as it stands."""
        kind = GaugeMetricFamily if self._gauge else CounterMetricFamily
        family = kind(self.name, self._doc, labels=self.labels)
        for values, count in list(self._values.items()):
            family.add_metric(values, count)
        return family


class Bins:
    """A histogram for each combination of labels."""

    def __init__(self, name: str, doc: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self.name = name
        self._doc = doc
        self.labels = labels
        self._bounds = bounds
        self._texts = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._values: dict[Values, tuple[list[int], list[float]]] = {}
        self._lock = threading.Lock()
        if not labels:
            self._of(())

    def add(self, values: Values, value: float, count: int = 1) -> None:
        """Adds the same observation so many times, from any thread."""
        with self._lock:
            bins, total = self._of(values)
            bins[bisect_left(self._bounds, value)] += count
            total[0] += value * count

    def add_since(self, values: Values, times_ms: Sequence[int], now_ms: int) -> None:
        """Adds how many seconds ago each of many times was, given in ascending order: one search for each bound does
        for all of them. What is yet to come was now."""
        ahead = len(times_ms) - bisect_right(times_ms, now_ms)
        passed = times_ms[: len(times_ms) - ahead] if ahead else times_ms
        with self._lock:
            bins, total = self._of(values)
            bins[0] += ahead
            left = len(passed)
            for index, bound in enumerate(self._bounds):
                older = bisect_left(passed, now_ms - bound * 1000, 0, left)
                bins[index] += left - older
                left = older
                if not left:
                    break
            bins[-1] += left
            total[0] += (now_ms * len(passed) - sum(passed)) / 1000

    def _of(self, values: Values) -> tuple[list[int], list[float]]:
        found = self._values.get(values)
        if found is None:
            found = self._values[values] = [0] * len(self._texts), [0.0]
        return found

    def family(self) -> Metric:
        """Returns it as it stands."""
        family = HistogramMetricFamily(self.name, self._doc, labels=self.labels)
        with self._lock:
            for values, (bins, total) in self._values.items():
                family.add_metric(values, [*zip(self._texts, _running(bins), strict=True)], total[0])
        return family


def _running(counts: Iterable[int]) -> Iterable[float]:
    total = 0
    for count in counts:
        total += count
        yield total
