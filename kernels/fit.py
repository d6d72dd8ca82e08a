"""This file sizes the pool of keys and values: how many pages there is memory for.

On a device that is found by trial. With a pool of a few pages the largest step is run once, with
the sampling that takes most; torch keeps what that took for the steps to come, so what is free
afterwards is there for the pool and for graphs. On a host it follows from what is free.

It does not know models or how a step is run. Law: what is returned fits, or MemoryError says how
much is missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from kernels.batch import Sampling, SlotOpen, StepInput
from kernels.kv import fitting_page_count

# Something of each kind: the trial also compiles what would be compiled at its first use.
GREEDIEST = Sampling(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((1, 1.0),),
    allowed_ids=(1, 2, 3),
    logprobs=20,
)
CACHED_FACTOR = 2  # tokens of the largest step's rows that are cached, for each that is computed


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user wants of a pool."""

    page_bytes: int  # over all layers
    page_size: int
    context_len: int
    slot_count: int
    kv_tokens: int  # 0: as many as there is memory for
    memory_fraction: float
    graph_bytes: int = 0  # left to graphs

    @property
    def least_count(self) -> int:
        """Pages with less than which a server is of no use: one for each slot, or a context."""
        return min(self.slot_count, -(-self.context_len // self.page_size))


def settle_page_count(wanted: Wanted, free_bytes: int, modest_bytes: int | None = None) -> int:
    """Pages of a pool where `free_bytes` are free; `modest_bytes` as of `fitting_page_count`."""
    usable = max(free_bytes - wanted.graph_bytes, 0)
    each = wanted.page_bytes
    kept = f"{gib(free_bytes)} are free"
    if wanted.graph_bytes:
        kept += f", graphs may take {gib(wanted.graph_bytes)} of them"
    if wanted.kv_tokens:
        count = -(-wanted.kv_tokens // wanted.page_size)
        if count * each > usable:
            raise MemoryError(
                f"a pool of {wanted.kv_tokens} tokens needs {gib(count * each)}; {kept}:"
                f" {gib(count * each - usable)} are missing"
            )
        return count
    share = int(usable * wanted.memory_fraction)
    count = fitting_page_count(
        each, wanted.page_size, wanted.context_len, wanted.slot_count, share, modest_bytes
    )
    if count < wanted.least_count:
        needed = wanted.least_count * each
        missing = int(needed / wanted.memory_fraction) - usable
        raise MemoryError(
            f"the least pool, {wanted.least_count} pages of {wanted.page_size} tokens, needs"
            f" {gib(needed)}; {kept}, and the pool gets {wanted.memory_fraction:g} of the rest:"
            f" {gib(missing)} are missing"
        )
    return count


def largest_step(
    page_size: int, context_len: int, slot_count: int, step_tokens_max: int
) -> tuple[StepInput, int]:
    """A step that takes as much memory as any, and the pages that it names. All its rows have the
    same pages: what they write there is of no use."""
    row_count = min(slot_count, step_tokens_max)
    total = min(step_tokens_max, row_count * context_len)
    counts = np.full(row_count, total // row_count, np.int32)
    counts[: total % row_count] += 1
    known = np.minimum(counts * (1 + CACHED_FACTOR), context_len)
    page_count = int(-(-known.max() // page_size))
    pages = np.arange(page_count, dtype=np.int32)
    opened = [
        SlotOpen(
            row,
            np.arange(length, dtype=np.int32) % 64,
            length,
            length - count,
            pages,
            GREEDIEST,
        )
        for row, (length, count) in enumerate(zip(known.tolist(), counts.tolist(), strict=True))
    ]
    return StepInput(np.arange(row_count, dtype=np.int32), counts, opened=opened), page_count


def step_does_not_fit(step: StepInput, error: BaseException) -> MemoryError:
    """`error` says of the largest step that it did not fit beside the weights."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", f"{error} {error.__cause__ or ''}")
    missing = f" (it needed {asked[1]} more)" if asked else ""
    return MemoryError(
        f"the largest step, {int(step.counts.sum())} tokens of {len(step.slots)} sequences, does"
        f" not fit beside the weights{missing}"
    )


def gib(byte_count: int) -> str:
    """For a person."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if byte_count >= size:
            return f"{byte_count / size:.1f} {unit}"
    return f"{byte_count} bytes"
