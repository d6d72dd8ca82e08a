"""This file keeps how long an actor's handlers take: counts in logarithmic buckets, no clock.

It does not know actors. Each doubling is cut into eight buckets, so that a quantile is within
1/16 of the duration that it stands for. When there are many, all counts are halved: what is said is
of the last few thousand messages, not of the whole life.

Laws, asserted by `check`: no count is negative, they add up to the total, and that is bounded.
"""

from __future__ import annotations

from math import ceil, frexp

SPAN = 16  # of a bucket's number: a doubling has the upper half of each sixteen
LEAST_S = 1e-9  # added to each, since nothing has no logarithm
TOTAL_MAX = 8192


class Durations:
    """Of one actor."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by bucket, those that are not empty
        self.total = 0

    def add(self, each_s: float, count: int) -> None:
        """So many messages took so long each."""
        fraction, exponent = frexp(each_s + LEAST_S)  # the fraction is in [1/2, 1)
        bucket = exponent * SPAN + int(fraction * SPAN)
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.total += count
        if self.total > TOTAL_MAX:
            self._halve()

    def _halve(self) -> None:
        while self.total > TOTAL_MAX:
            self._counts = {bucket: n // 2 for bucket, n in self._counts.items() if n > 1}
            self.total = sum(self._counts.values())

    def quantiles(self, *shares: float) -> list[float | None]:
        """The least durations that so large a share, in (0, 1], did not exceed; None without any.
        The shares ascend."""
        if not self.total:
            return [None] * len(shares)
        found: list[float | None] = []
        seen = 0
        buckets = iter(sorted(self._counts.items()))
        bucket = 0
        for share in shares:
            while seen < ceil(share * self.total):
                bucket, count = next(buckets)
                seen += count
            found.append(middle_s(bucket))
        return found

    def check(self) -> None:
        assert all(count > 0 for count in self._counts.values()), self._counts
        assert self.total == sum(self._counts.values()), (self.total, self._counts)
        assert self.total <= TOTAL_MAX, self.total


def middle_s(bucket: int) -> float:
    """Of the durations that are counted in it."""
    exponent, part = divmod(bucket, SPAN)
    return float((part + 0.5) / SPAN * 2.0**exponent)
