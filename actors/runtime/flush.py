"""This file sends a node's counts to the actor `metrics`, a while after something has changed.

It does not know what is counted. Law: a node where nothing changes sends nothing; what could not be
sent because `metrics` was not there is kept and sent when it is back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from actors.runtime.durations import BOUNDS_S

if TYPE_CHECKING:
    from actors.runtime.life import Life
    from actors.runtime.node import Node

METRICS_PATH = "metrics"
FLUSH_S = 1.0  # from the first change to its flush


class Flusher:
    """Of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._alarm: asyncio.TimerHandle | None = None
        self._said_depths: dict[str, int] = {}
        self._said_troubles: dict[str, int] = {}
        self._is_closed = False

    def soon(self) -> None:
        """Something changed, or `metrics` is back."""
        if self._alarm is None and not self._is_closed:
            due_s = self._node.time() + FLUSH_S
            self._alarm = self._node.loop.call_at(due_s, self._flush, due_s)

    def close(self) -> None:
        self._is_closed = True
        if self._alarm is not None:
            self._alarm.cancel()

    def life_ended(self, life: Life) -> None:
        self._count_handlers(life)

    def _flush(self, due_s: float) -> None:
        node = self._node
        entry = node.entry(METRICS_PATH)
        if entry.address is None:
            self._alarm = None
            return
        lag_s = max(0.0, node.time() - due_s)
        node.tally.gauge("histrio_loop_lag_seconds", lag_s, (("node", node.name),))
        any_waits = self._count_depths()
        self._count_troubles()
        for life in node.lives.values():
            self._count_handlers(life)
        flush = node.tally.take(node.name)
        self._alarm = None  # not before: what is counted here is sent with this one
        node.route(None, entry, flush, None, None, None)
        if any_waits:  # until it is said that nothing waits any more
            self.soon()

    def _count_handlers(self, life: Life) -> None:
        taken = life.durations.take()
        if taken is not None:
            labels = (("actor", life.address.path),)
            self._node.tally.add("histrio_handler_seconds", taken, BOUNDS_S, labels)

    def _count_troubles(self) -> None:
        node = self._node
        if node.transport is None:
            return
        for kind, count in node.transport.troubles().items():
            increase = count - self._said_troubles.get(kind, 0)
            if increase:
                self._said_troubles[kind] = count
                labels = (("kind", kind), ("node", node.name))
                node.tally.count("histrio_link_troubles_total", increase, labels)

    def _count_depths(self) -> bool:
        node = self._node
        depths = {path: len(life.mailbox) for path, life in node.lives.items()}
        for path, depth in depths.items():
            if self._said_depths.get(path) != depth:
                node.tally.gauge("histrio_mailbox_depth", depth, (("actor", path),))
        self._said_depths = depths
        return any(depths.values())
