"""This file holds all series: what the nodes have flushed, merged.

It does not know the text format. Counters and histograms are sums over nodes and time; a gauge is
the last value of each node, and their sum is shown.
Laws: a name has one kind, the first that it came with; at most `SERIES_MAX` series are kept; what
is refused for either reason is counted, never raised, since metrics must not hurt what they
measure.
"""

from __future__ import annotations

from actors.metrics.histogram import Histogram
from messages.metrics import Flush, Labels

SERIES_MAX = 20_000

Series = tuple[str, Labels]


class Board:
    def __init__(self, series_max: int = SERIES_MAX) -> None:
        self.series_max = series_max
        self.counters: dict[Series, float] = {}
        self.gauges: dict[Series, dict[str, float]] = {}  # by node
        self.histograms: dict[Series, Histogram] = {}
        self.kinds: dict[str, str] = {}
        self.refused_count = 0

    def merge(self, flush: Flush) -> None:
        for counter in flush.counters:
            key = (counter.name, counter.labels)
            if counter.increase < 0 or not self._admit(key, "counter", key in self.counters):
                self.refused_count += counter.increase < 0
                continue
            self.counters[key] = self.counters.get(key, 0.0) + counter.increase
        for gauge in flush.gauges:
            key = (gauge.name, gauge.labels)
            if self._admit(key, "gauge", key in self.gauges):
                self.gauges.setdefault(key, {})[flush.node] = gauge.value
        for part in flush.histograms:
            key = (part.name, part.labels)
            if not self._admit(key, "histogram", key in self.histograms):
                continue
            histogram = self.histograms.get(key) or Histogram(part.bounds)
            if histogram.fits(part.bounds, part.counts):
                histogram.merge(part.counts, part.total)
                self.histograms[key] = histogram
            else:
                self.refused_count += 1

    def gauge(self, key: Series) -> float:
        return sum(self.gauges[key].values())

    def check(self) -> None:
        assert self.series_count <= self.series_max, f"{self.series_count} series"
        for kind, table in (
            ("counter", self.counters),
            ("gauge", self.gauges),
            ("histogram", self.histograms),
        ):
            for name, labels in table:
                assert self.kinds[name] == kind, f"{name}{labels} is no {kind}"
        for histogram in self.histograms.values():
            histogram.check()

    @property
    def series_count(self) -> int:
        return len(self.counters) + len(self.gauges) + len(self.histograms)

    def _admit(self, key: Series, kind: str, is_known: bool) -> bool:
        if is_known:
            return True
        if self.series_count >= self.series_max or self.kinds.get(key[0], kind) != kind:
            self.refused_count += 1
            return False
        self.kinds[key[0]] = kind
        return True
