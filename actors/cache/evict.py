"""This file is the eviction seam: which cached prefix goes first when pages are short.

It does not know pages or the tree's shape: a policy sees the history of one leaf at a time. Only
leaves without readers are ever asked about, whatever the policy says.

To add a policy: a function `(Trace) -> tuple of ints`, registered in `EVICTIONS` (built-in here, or
the entry point `histrio.eviction` of an installed package). The smallest goes first. It may rely on
`used_at` growing with every use; it must depend on its argument alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kernels.registry import Registry


class Trace(Protocol):
    """What a policy may know of a leaf. Times are ticks of the tree: one for each use."""

    @property
    def used_at(self) -> int: ...

    @property
    def created_at(self) -> int: ...

    @property
    def hit_count(self) -> int: ...


EvictionPolicy = Callable[[Trace], tuple[int, ...]]

EVICTIONS: Registry[EvictionPolicy] = Registry("eviction")


@EVICTIONS.register("lru")
def lru(trace: Trace) -> tuple[int, ...]:
    """Least recently used first."""
    return (trace.used_at,)


@EVICTIONS.register("lfu")
def lfu(trace: Trace) -> tuple[int, ...]:
    """Least often used first; among equals the least recently used."""
    return (trace.hit_count, trace.used_at)


@EVICTIONS.register("fifo")
def fifo(trace: Trace) -> tuple[int, ...]:
    """Oldest first."""
    return (trace.created_at,)
