"""This file says where a load's time went on the device: its steps by kind and number of rows.

An event is recorded behind each launch; where the device never waits, the time between two is that
of a step. It does not know loads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from kernels.runner import Runner

ROW_BOUNDS = (4, 16, 32, 64, 96, 128, 160, 192, 224, 256)


@dataclass
class Steps:
    """What was launched, in order: kind; rows, tokens, keys, milliseconds of the host."""

    facts: list[tuple[str, int, int, int, float]] = field(default_factory=list)
    events: list[torch.cuda.Event] = field(default_factory=list)

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    def by_kind(self) -> list[dict[str, Any]]:
        """Of each kind: steps, their milliseconds together and in the mean; what a mean one had."""
        torch.cuda.synchronize()
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 6)
        for (kind, rows, tokens, keys, host_ms), begin, end in zip(
            self.facts, self.events, self.events[1:], strict=False
        ):
            if kind == "decode":
                kind += f" to {next((n for n in ROW_BOUNDS if rows <= n), rows):3}"
            values = (1, begin.elapsed_time(end), rows, tokens, keys, host_ms)
            sums[kind] = [a + b for a, b in zip(sums[kind], values, strict=True)]
        return [
            {
                "kind": kind,
                "steps": int(count),
                "sum_ms": total,
                "mean_ms": total / count,
                "rows": rows / count,
                "tokens": tokens / count,
                "keys_a_row": keys / max(rows, 1),
                "host_ms": host_ms / count,
            }
            for kind, (count, total, rows, tokens, keys, host_ms) in sorted(sums.items())
        ]


@contextmanager
def watched(runner: Runner) -> Iterator[Steps]:
    """While it lasts, each launch is noted. The runner must be one that launches ahead."""
    seen = Steps()
    steps = runner.steps
    assert steps is not None
    launch, graph_for = runner.launch, steps.graph_for
    kinds: list[str] = []

    def noted_graph(batch: Any) -> Any:
        graph = graph_for(batch)
        kinds.append("launched" if graph is None else type(graph).__name__)
        return graph

    def noted(step: Any) -> Any:
        if not seen.events:
            seen.mark()
        begin_s = perf_counter()
        flight = launch(step)
        host_ms = 1e3 * (perf_counter() - begin_s)
        if kinds:
            seen.mark()
            tokens = int(step.counts.sum())
            keys = int(runner.slots.computed_len[step.slots].sum())
            kind = kinds.pop()
            if kind == "DecodeGraph":
                kind = "decode"
            seen.facts.append((kind, len(step.slots), tokens, keys, host_ms))
        return flight

    runner.launch, steps.graph_for = noted, noted_graph  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del runner.launch, steps.graph_for
