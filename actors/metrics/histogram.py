"""This file merges histograms: counts per bucket, as nodes flush them.

It does not know names or labels. A bucket with bound b counts the observations in (previous, b];
the last one counts what is above all bounds.
Law: `sum(counts)` is the number of observations merged, and no bucket ever shrinks.
"""

from __future__ import annotations

from itertools import accumulate


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), f"bounds must rise: {bounds}"
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def fits(self, bounds: tuple[float, ...], counts: tuple[int, ...]) -> bool:
        """Whether these buckets can be merged into ours."""
        return bounds == self.bounds and len(counts) == len(self.counts) and min(counts) >= 0

    def merge(self, counts: tuple[int, ...], total: float) -> None:
        assert len(counts) == len(self.counts), f"{len(counts)} counts, {len(self.counts)} buckets"
        for index, count in enumerate(counts):
            self.counts[index] += count
        self.total += total

    def cumulative(self) -> list[int]:
        """For each bound, and then for infinity: how many observations were at most that."""
        return list(accumulate(self.counts))

    @property
    def count(self) -> int:
        return sum(self.counts)

    def check(self) -> None:
        assert len(self.counts) == len(self.bounds) + 1
        assert min(self.counts) >= 0, f"a bucket shrank: {self.counts}"
