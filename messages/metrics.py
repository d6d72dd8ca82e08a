"""This file is the mailbox of metrics. Actors count locally; each node flushes what changed."""

from __future__ import annotations

from messages.base import Message, Part

Labels = tuple[tuple[str, str], ...]


class Counter(Part, frozen=True):
    name: str
    labels: Labels
    increase: float


class Gauge(Part, frozen=True):
    name: str
    labels: Labels
    value: float


class Histogram(Part, frozen=True):
    """Observations since the last flush, by the bucket bounds of `actors/metrics/histogram.py`."""

    name: str
    labels: Labels
    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # len(bounds) + 1
    total: float


class Flush(Message, frozen=True):
    """What changed on one node since its last flush."""

    node: str
    counters: tuple[Counter, ...] = ()
    gauges: tuple[Gauge, ...] = ()
    histograms: tuple[Histogram, ...] = ()


class Scrape(Message, frozen=True):
    """Ask for the Prometheus text; answered by `Page`."""


class Page(Message, frozen=True):
    text: str


In = Flush | Scrape
