"""This file computes a step in parts where there was no memory for all of it at once.

It does not know devices, models or why memory is short: it cuts a step in two by its tokens, and
what doesn't fit again, until it fits or is small. Laws: a row computes its tokens in order, and
none after one that did not fit; each row gets one token at most; what did not fit is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import chain
from typing import Any

import numpy as np

from kernels.batch import Ints, StepInput, StepOutput, no_ints

CUTS_MAX = 4  # into sixteen parts at most: with less than that a step is of no use to anybody

Rows = tuple[Ints, Ints]  # slots, counts


def run_in_parts(
    step: StepInput, run: Callable[[StepInput], StepOutput], detail: str
) -> StepOutput:
    """`step` has failed with `detail`, its deltas applied and nothing else done. `run` computes
    rows; it raises MemoryError, with nothing done. Rows that don't fit at all are `starved`."""
    outputs: list[StepOutput] = []
    starved: set[int] = set()

    def compute(rows: Rows, cuts_left: int) -> None:
        going = ~np.isin(rows[0], list(starved))
        slots, counts = rows[0][going], rows[1][going]
        if not len(slots):
            return
        try:
            outputs.append(run(StepInput(slots, counts)))
        except MemoryError:
            if cuts_left and counts.sum() > 1:
                for half in halves(slots, counts):
                    compute(half, cuts_left - 1)
            else:
                starved.update(slots.tolist())

    parts = (
        halves(step.slots, step.counts) if step.counts.sum() > 1 else [(step.slots, step.counts)]
    )
    for part in parts:
        compute(part, CUTS_MAX - 1)
    return merged(outputs, np.array(sorted(starved), np.int32), detail)


def halves(slots: Ints, counts: Ints) -> Iterator[Rows]:
    """Cuts rows of two tokens or more in two of about as many; one row may be cut itself."""
    ends = np.cumsum(counts)
    cut = int(ends[-1]) // 2
    first = np.clip(counts - (ends - cut), 0, counts).astype(np.int32)
    for part in (first, (counts - first).astype(np.int32)):
        yield slots[part > 0], part[part > 0]


def merged(outputs: list[StepOutput], starved: Ints, detail: str) -> StepOutput:
    """The outputs of consecutive steps as that of one: one after the other, whatever it is."""
    last = StepOutput(no_ints(), no_ints(), failed=starved, starved=starved)
    parts = {part.name: [getattr(o, part.name) for o in (*outputs, last)] for part in fields(last)}
    values: dict[str, Any] = {
        name: np.concatenate(each) if isinstance(each[0], np.ndarray) else list(chain(*each))
        for name, each in parts.items()
        if name not in ("logprobs", "detail")
    }
    values["failed"] = np.unique(values["failed"])
    if any(each is not None for each in parts["logprobs"]):
        rows = ([None] * len(o.slots) if o.logprobs is None else o.logprobs for o in outputs)
        values["logprobs"] = list(chain(*rows))
    details = (output.detail for output in outputs if output.detail)
    return StepOutput(**values, detail=detail if len(starved) else next(details, ""))
