"""This file is the mailbox of metrics. Actors count locally; each node flushes what changed (the
runtime sends `Flush`, so it is defined in `messages/system.py`)."""

from __future__ import annotations

from messages.base import Message
from messages.system import Counter, Flush, Gauge, Histogram, Labels


class Scrape(Message, frozen=True):
    """Ask for the Prometheus text; answered by `Page`."""


class Page(Message, frozen=True):
    text: str


In = Flush | Scrape

__all__ = ["Counter", "Flush", "Gauge", "Histogram", "In", "Labels", "Page", "Scrape"]
