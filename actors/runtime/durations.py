"""This file keeps how long an actor's handlers take: counts in logarithmic buckets, no clock.

It does not know actors. Each doubling is cut into eight buckets, so that a quantile is within
1/16 of the duration that it stands for. When there are many, all counts are halved: what is said is
of the last few thousand messages, not of the whole life. `take` gives what was added since it was
last called, halved or not, for who keeps the sum of all lives.

Laws, asserted by `check`: no count is negative, they add up to the total, and that is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil, frexp

from actors.runtime.tally import Counted

SPAN = 16  # of a bucket's number: a doubling has the upper half of each sixteen
LEAST_S = 1e-9  # added to each, since nothing has no logarithm
TOTAL_MAX = 8192
BOUNDS_S = tuple(2.0**exponent for exponent in range(-20, 4))  # of what is taken: 1 µs to 8 s


class Durations:
    """Of one actor."""

    __slots__ = ("_counts", "_kept", "_kept_total", "_taken", "_total", "_total_s")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by bucket, those that are not empty; the newest
        self._total = 0
        self._kept: dict[int, int] = {}  # those before, halved again and again
        self._kept_total = 0
        self._taken = [0] * (len(BOUNDS_S) + 1)  # of what was kept since `take`
        self._total_s = 0.0  # of all since `take`

    def add(self, each_s: float, count: int) -> None:
        """So many messages took so long each."""
        fraction, exponent = frexp(each_s + LEAST_S)  # the fraction is in [1/2, 1)
        bucket = exponent * SPAN + int(fraction * SPAN)
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        self._total += count
        self._total_s += each_s * count
        if self._total > TOTAL_MAX // 2:
            self._keep()

    def _keep(self) -> None:
        """What is newest is put to what was before, and that halved until it is few enough."""
        kept, taken = self._kept, self._taken
        for bucket, count in self._counts.items():
            kept[bucket] = kept.get(bucket, 0) + count
            taken[bisect_left(BOUNDS_S, middle_s(bucket))] += count
        self._counts = {}
        self._total = 0
        self._kept_total = sum(kept.values())
        while self._kept_total > TOTAL_MAX // 2:
            kept = {bucket: n // 2 for bucket, n in kept.items() if n > 1}
            self._kept_total = sum(kept.values())
        self._kept = kept

    def take(self) -> Counted | None:
        """All that was added since this was last called, by BOUNDS_S; None: nothing."""
        self._keep()
        if not any(self._taken):
            return None
        found = Counted(tuple(self._taken), self._total_s)
        self._taken = [0] * len(self._taken)
        self._total_s = 0.0
        return found

    @property
    def total(self) -> int:
        """How many the quantiles are of."""
        return self._total + self._kept_total

    def quantiles(self, *shares: float) -> list[float | None]:
        """The least durations that so large a share, in (0, 1], did not exceed; None without any.
        The shares ascend."""
        if not self.total:
            return [None] * len(shares)
        counts = dict(self._kept)
        for bucket, count in self._counts.items():
            counts[bucket] = counts.get(bucket, 0) + count
        found: list[float | None] = []
        seen = 0
        buckets = iter(sorted(counts.items()))
        bucket = 0
        for share in shares:
            while seen < ceil(share * self.total):
                bucket, count = next(buckets)
                seen += count
            found.append(middle_s(bucket))
        return found

    def check(self) -> None:
        for counts, total in ((self._counts, self._total), (self._kept, self._kept_total)):
            assert all(count > 0 for count in counts.values()), counts
            assert total == sum(counts.values()), (total, counts)
            assert total <= TOTAL_MAX // 2, total
        assert min(self._taken) >= 0, self._taken


def middle_s(bucket: int) -> float:
    """Of the durations that are counted in it."""
    exponent, part = divmod(bucket, SPAN)
    return float((part + 0.5) / SPAN * 2.0**exponent)
