"""This file judges by their heartbeats which peers hang. It does not know sockets or clocks.

Death is seen elsewhere and at once; this is for the node that lives and does nothing: stopped,
spinning, or waiting for a lock. A node whose own loop was late accuses nobody: what it did not hear
it may just not have read.
"""

from __future__ import annotations


class Pulse:
    """When each peer was last heard. `tick` is to be called every `beat_s`."""

    def __init__(self, *, beat_s: float, hang_s: float, now_s: float) -> None:
        self.beat_s = beat_s
        self.hang_s = hang_s
        self.late_count = 0  # ticks that came so late that nobody could be accused
        self._tick_s = now_s
        self._heard_s: dict[str, float] = {}
        self._factors: dict[str, float] = {}  # of peers that may be silent for longer

    def be_patient(self, peer: str, factor: float, now_s: float) -> None:
        """From now on `peer` may be silent for `factor` times `hang_s`. 1 is the normal."""
        self._factors[peer] = factor
        self.hear(peer, now_s)

    def add(self, peer: str, now_s: float) -> None:
        self._heard_s[peer] = now_s

    def drop(self, peer: str) -> None:
        self._heard_s.pop(peer, None)

    def hear(self, peer: str, now_s: float) -> None:
        if peer in self._heard_s:
            self._heard_s[peer] = now_s

    def tick(self, now_s: float) -> tuple[str, ...]:
        """The peers that have been silent for `hang_s` of this node's own attention."""
        late_s = now_s - self._tick_s - self.beat_s
        self._tick_s = now_s
        if late_s > self.beat_s:
            self.late_count += 1
            for peer, heard_s in self._heard_s.items():
                self._heard_s[peer] = min(now_s, heard_s + late_s)
        return tuple(
            peer
            for peer, heard_s in self._heard_s.items()
            if now_s - heard_s > self.hang_s * self._factors.get(peer, 1.0)
        )
