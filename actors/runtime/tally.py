"""This file counts what actors report, until the node flushes it. It does not know who shows it.

Law: what `take` returned is counted once; an untouched tally is not dirty and costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from messages.system import Counter, Flush, Gauge, Histogram, Labels

SERIES_MAX = 4096  # per node; a label that grows without bound must not take the memory


class Counted(NamedTuple):
    """Values by the bounds of a histogram."""

    counts: tuple[int, ...]  # one more than there are bounds
    total: float


class Tally:
    """Counters as increases, gauges as last values, histograms as counts per bucket."""

    def __init__(self, became_dirty: Callable[[], None] = lambda: None) -> None:
        self._became_dirty = became_dirty
        self._is_clean = True
        self.counters: dict[tuple[str, Labels], float] = {}
        self.gauges: dict[tuple[str, Labels], float] = {}
        self.histograms: dict[tuple[str, Labels], tuple[tuple[float, ...], list[int], float]] = {}
        self.lost_count = 0  # series refused past SERIES_MAX

    @property
    def is_dirty(self) -> bool:
        return bool(self.counters or self.gauges or self.histograms)

    def count(self, name: str, increase: float, labels: Labels) -> None:
        assert increase >= 0, (name, increase)
        key = (name, labels)
        self._soil()
        if key in self.counters:
            self.counters[key] += increase
        elif self._has_room():
            self.counters[key] = increase

    def gauge(self, name: str, value: float, labels: Labels) -> None:
        key = (name, labels)
        self._soil()
        if key in self.gauges or self._has_room():
            self.gauges[key] = value

    def observe(
        self,
        name: str,
        value: float,
        bounds: tuple[float, ...],
        labels: Labels,
        times: int = 1,
    ) -> None:
        """Counts into the first bucket whose upper bound is at least `value`."""
        key = (name, labels)
        self._soil()
        row = self._row(key, bounds)
        if row is not None:
            row[1][bisect_left(bounds, value)] += times
            self.histograms[key] = (bounds, row[1], row[2] + value * times)

    def add(self, name: str, counted: Counted, bounds: tuple[float, ...], labels: Labels) -> None:
        """Many values at once, which somebody has counted by the same bounds."""
        key = (name, labels)
        self._soil()
        row = self._row(key, bounds)
        if row is not None:
            counts = list(map(sum, zip(row[1], counted.counts, strict=True)))
            self.histograms[key] = (bounds, counts, row[2] + counted.total)

    def _row(
        self, key: tuple[str, Labels], bounds: tuple[float, ...]
    ) -> tuple[tuple[float, ...], list[int], float] | None:
        """None: there is no room."""
        row = self.histograms.get(key)
        if row is None and self._has_room():
            row = (bounds, [0] * (len(bounds) + 1), 0.0)
        assert row is None or row[0] == bounds, f"{key[0]} has two sets of bounds"
        return row

    def _soil(self) -> None:
        if self._is_clean:
            self._is_clean = False
            self._became_dirty()

    def _has_room(self) -> bool:
        if len(self.counters) + len(self.gauges) + len(self.histograms) < SERIES_MAX:
            return True
        self.lost_count += 1
        return False

    def take(self, node: str) -> Flush:
        """Returns what changed and starts from nothing."""
        flush = Flush(
            node=node,
            counters=tuple(Counter(n, ls, v) for (n, ls), v in self.counters.items()),
            gauges=tuple(Gauge(n, ls, v) for (n, ls), v in self.gauges.items()),
            histograms=tuple(
                Histogram(n, ls, bounds, tuple(counts), total)
                for (n, ls), (bounds, counts, total) in self.histograms.items()
            ),
        )
        self.counters.clear()
        self.gauges.clear()
        self.histograms.clear()
        self._is_clean = True
        return flush
