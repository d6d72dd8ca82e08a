"""This file is the state of the batch between steps: each slot's tokens, pages, lengths, sampling.

The scheduler sends deltas; this applies them in the documented order and turns a step into flat
arrays, with no Python per token. It does not know models, tensors or who owns a page.

Intervals of one slot:  [0 .......... computed .......... known) . . . . page_count * page_size
                         KV in pages   tokens known, not run    pages leased ahead
A row of a step computes [computed, computed + count); one that reaches `known` samples a token,
which is appended: known grows by one.

Laws (`check`): 0 <= computed < known for an open slot before a step, prompt_len <= known; KV lies
within the pages; an empty slot holds nothing. A step that breaks a law is the scheduler's bug.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Ints, Sampling, SlotOpen, StepInput

if TYPE_CHECKING:
    from kernels.processors.base import LogitsProcessor

Longs = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """One step as flat arrays. T tokens in R rows; `slots` leaves out rows of failed slots."""

    slots: Ints  # [R]
    query_len: Ints  # [R]
    kv_len: Ints  # [R], this step's tokens included
    query_start: Ints  # [R + 1]
    ids: Longs  # [T]
    positions: Ints  # [T]
    write_index: Longs  # [T]
    page_table: Ints  # [R, pages_max]
    sampled: Longs  # [S]: the row of the step's tokens whose logits are wanted
    sampled_slots: Ints  # [S]
    told: tuple[ToldRow, ...] = ()  # rows whose prompt's log probabilities are asked for


@dataclass(frozen=True, slots=True)
class ToldRow:
    """Rows [first, first + len(tokens)) of the step predict the prompt's `tokens`, from `index`."""

    slot: int
    first: int
    index: int
    tokens: Ints
    count: int  # alternatives for each


@dataclass(frozen=True, slots=True)
class Pending:
    """Tokens of a step that is on its way: token i goes to slots[i] at positions[i]."""

    slots: Ints
    positions: Ints
    tenancy: Longs


class Slots:
    """`slot_count` places for sequences of up to `context_len` tokens."""

    def __init__(self, slot_count: int, context_len: int, page_size: int, page_count: int) -> None:
        self.page_size, self.page_count = page_size, page_count
        self.context_len = context_len
        pages_max = -(-context_len // page_size)
        self.tokens = np.zeros((slot_count, context_len + 1), np.int32)
        self.page_table = np.zeros((slot_count, pages_max), np.int32)
        self.known_len = np.zeros(slot_count, np.int32)
        self.computed_len = np.zeros(slot_count, np.int32)
        self.prompt_len = np.zeros(slot_count, np.int32)
        self.leased_count = np.zeros(slot_count, np.int32)
        self.open = np.zeros(slot_count, np.bool_)
        self.failed = np.zeros(slot_count, np.bool_)  # awaits its closing; computes nothing
        self.tenancy = np.zeros(slot_count, np.int64)  # how many tenants a slot has had
        self.columns = SamplingColumns(slot_count)

    def apply(self, step: StepInput) -> None:
        """Closes, opens and grows, in this order."""
        for slot in step.closed.tolist():
            self.close(slot)
        for opened in step.opened:
            self.fill(opened)
        if len(step.grown_slots):
            self.grow(step.grown_slots, step.grown_pages)

    def close(self, slot: int) -> None:
        assert self.open[slot], f"slot {slot} is closed but empty"
        self.open[slot] = self.failed[slot] = False
        self.known_len[slot] = self.computed_len[slot] = self.prompt_len[slot] = 0
        self.leased_count[slot] = 0
        self.columns.clear(slot)

    def fill(self, opened: SlotOpen) -> None:
        slot, known = opened.slot, len(opened.tokens)
        assert not self.open[slot], f"slot {slot} is opened but not empty"
        assert 0 < opened.prompt_len <= known <= self.context_len, (opened.prompt_len, known)
        assert 0 <= opened.cached_len < known, (opened.cached_len, known)
        leased = len(opened.pages)
        assert leased <= self.page_table.shape[1], leased
        assert opened.cached_len <= leased * self.page_size, (opened.cached_len, leased)
        self.open[slot] = True
        self.tenancy[slot] += 1
        self.tokens[slot, :known] = opened.tokens
        self.page_table[slot, :leased] = opened.pages
        self.known_len[slot], self.computed_len[slot] = known, opened.cached_len
        self.prompt_len[slot], self.leased_count[slot] = opened.prompt_len, leased
        self.columns.fill(slot, opened.sampling)

    def grow(self, slots: Ints, pages: Ints) -> None:
        """Appends pages[i] to slots[i]; a slot may come several times."""
        assert len(slots) == len(pages), (len(slots), len(pages))
        assert self.open[slots].all(), slots[~self.open[slots]]
        order = np.argsort(slots, kind="stable")
        slots, pages = slots[order], pages[order]
        first = np.searchsorted(slots, slots)  # where each slot's run begins
        nth = np.arange(len(slots)) - first
        at = self.leased_count[slots] + nth
        assert at.max() < self.page_table.shape[1], "more pages than the context has"
        self.page_table[slots, at] = pages
        np.add.at(self.leased_count, slots, 1)

    def flatten(self, step: StepInput) -> FlatBatch:
        """The step as flat arrays, its deltas being applied; changes nothing. Where all rows decode
        the longest come first: what is computed side by side then ends at about the same time."""
        keep = ~self.failed[step.slots]
        slots, counts = step.slots[keep], step.counts[keep]
        if len(slots) > 1 and counts.max() == 1:
            order = np.argsort(-self.computed_len[slots], kind="stable")
            slots = slots[order]
        assert self.open[slots].all(), f"rows of empty slots: {slots[~self.open[slots]]}"
        assert len(np.unique(slots)) == len(slots), f"a slot in two rows: {slots}"
        assert (counts > 0).all(), counts
        computed = self.computed_len[slots]
        kv_len = computed + counts
        known = self.known_len[slots]
        assert (kv_len <= known).all(), (slots, kv_len, known)
        leased = self.leased_count[slots]
        assert (kv_len <= leased * self.page_size).all(), (slots, kv_len, leased)

        start = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=start[1:])
        total = int(start[-1])
        slot_of = np.repeat(slots, counts)
        positions = np.arange(total, dtype=np.int32) - np.repeat(start[:-1] - computed, counts)
        page = self.page_table[slot_of, positions // self.page_size].astype(np.int64)
        pages_max = -(-int(kv_len.max(initial=1)) // self.page_size)
        sampling = kv_len == known
        return FlatBatch(
            slots=slots,
            query_len=counts.astype(np.int32),
            kv_len=kv_len.astype(np.int32),
            query_start=start,
            ids=self.tokens[slot_of, positions].astype(np.int64),
            positions=positions.astype(np.int32),
            write_index=page * self.page_size + positions % self.page_size,
            page_table=self.page_table[slots, :pages_max],
            sampled=(start[1:][sampling] - 1).astype(np.int64),
            sampled_slots=slots[sampling],
            told=self.told(slots, start, computed, kv_len)
            if self.columns.tells[slots].any()
            else (),
        )

    def told(self, slots: Ints, start: Ints, begin: Ints, end: Ints) -> tuple[ToldRow, ...]:
        """For rows that compute [begin, end): the prompt tokens behind each of these."""
        rows = []
        for row in np.flatnonzero(self.columns.tells[slots]).tolist():
            slot, first = int(slots[row]), int(begin[row])
            last = min(int(end[row]), int(self.prompt_len[slot]) - 1)
            count = self.columns.prompt_logprobs[slot]
            assert count is not None
            if first < last or first == 0:
                tokens = self.tokens[slot, first + 1 : last + 1].copy()
                rows.append(ToldRow(slot, int(start[row]), first + 1, tokens, count))
        return tuple(rows)

    def settle(self, batch: FlatBatch, slots: Ints, tokens: Ints, failed: Ints) -> None:
        """Records that `batch` ran: its tokens have KV, `tokens` are appended to `slots`, and
        `failed` slots compute no more."""
        self.computed_len[batch.slots] = batch.kv_len
        self.tokens[slots, self.known_len[slots]] = tokens
        self.known_len[slots] += 1
        self.failed[failed] = True

    def room(self, slots: Ints) -> Ints:
        """How many more tokens of each have a place in its pages."""
        placed = np.minimum(self.leased_count[slots] * self.page_size, self.context_len)
        return np.maximum(placed - self.known_len[slots], 0)

    def extend(self, slots: Ints, tokens: Ints) -> None:
        """Appends tokens[i] to slots[i], not computed; a slot may come several times, in order."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            self.tokens[slot, self.known_len[slot]] = token
            self.known_len[slot] += 1

    def advance(self, batch: FlatBatch) -> Pending:
        """Records that `batch` is on its way: its tokens will have KV, and each sampled slot gets a
        token that only the device knows (`UNKNOWN`) until `record`."""
        slots = batch.sampled_slots
        pending = Pending(slots, self.known_len[slots].copy(), self.tenancy[slots].copy())
        self.computed_len[batch.slots] = batch.kv_len
        self.tokens[slots, pending.positions] = UNKNOWN
        self.known_len[slots] += 1
        return pending

    def record(self, pending: Pending, tokens: Ints, failed: Flags) -> Flags:
        """Fills in what `advance` left open, where the slot has its tenant still. A failed row has
        no token. Returns the rows that had failed before, whose tokens count for nothing."""
        slots = pending.slots
        same = self.open[slots] & (self.tenancy[slots] == pending.tenancy)
        before = same & self.failed[slots]
        self.tokens[slots[same], pending.positions[same]] = tokens[same]
        self.failed[slots[same & failed]] = True
        return before

    def clear(self) -> None:
        """Empties every slot."""
        for slot in np.flatnonzero(self.open).tolist():
            self.close(slot)

    def check(self) -> None:
        """Asserts the laws of this file."""
        empty = ~self.open
        for column in (self.known_len, self.computed_len, self.prompt_len, self.leased_count):
            assert (column[empty] == 0).all(), f"an empty slot holds something: {column[empty]}"
        assert not (self.failed & empty).any(), "an empty slot has failed"
        running = self.open & ~self.failed
        assert (self.computed_len[running] < self.known_len[running]).all(), "nothing to compute"
        assert (self.computed_len >= 0).all()
        assert (self.prompt_len <= self.known_len).all(), (self.prompt_len, self.known_len)
        assert (self.known_len <= self.context_len + 1).all(), self.known_len
        assert (self.computed_len <= self.leased_count * self.page_size).all(), "KV past the pages"
        leased = np.arange(self.page_table.shape[1]) < self.leased_count[:, None]
        pages = self.page_table[leased]
        assert ((pages >= 0) & (pages < self.page_count)).all(), "a page outside the pool"
        self.columns.check(self.open)


class SamplingColumns:
    """The sampling parameters of all slots, a column each."""

    def __init__(self, slot_count: int) -> None:
        self.temperature = np.zeros(slot_count, np.float64)
        self.top_k = np.zeros(slot_count, np.int64)
        self.top_p = np.ones(slot_count, np.float64)
        self.min_p = np.zeros(slot_count, np.float64)
        self.presence = np.zeros(slot_count, np.float64)
        self.frequency = np.zeros(slot_count, np.float64)
        self.repetition = np.ones(slot_count, np.float64)
        self.seed = np.zeros(slot_count, np.uint64)
        self.choice = np.zeros(slot_count, np.uint64)
        self.min_tokens = np.zeros(slot_count, np.int32)
        self.ignore_eos = np.zeros(slot_count, np.bool_)
        self.logprobs: list[int | None] = [None] * slot_count
        self.stop_ids: list[tuple[int, ...]] = [()] * slot_count
        self.bias_ids: list[tuple[int, ...]] = [()] * slot_count
        self.bias_values: list[tuple[float, ...]] = [()] * slot_count
        self.allowed_ids: list[tuple[int, ...]] = [()] * slot_count
        self.bad_sequences: list[tuple[tuple[int, ...], ...]] = [()] * slot_count
        self.restricted = np.zeros(slot_count, np.bool_)  # by one of these two
        self.processors: list[tuple[LogitsProcessor, ...]] = [()] * slot_count
        self.processed = np.zeros(slot_count, np.bool_)  # whether there are any
        self.prompt_logprobs: list[int | None] = [None] * slot_count
        self.tells = np.zeros(slot_count, np.bool_)  # whether there are any
        self.label_ids: list[tuple[int, ...]] = [()] * slot_count
        self.reads = np.zeros(slot_count, np.bool_)  # wants a vector, or of these ids
        # A row needs the most likely token of the bare logits and nothing else.
        self.plain = np.ones(slot_count, np.bool_)
        # As `plain`, or a draw at a temperature from all tokens.
        self.quick = np.ones(slot_count, np.bool_)

    def fill(self, slot: int, sampling: Sampling) -> None:
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.presence[slot] = sampling.presence_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.repetition[slot] = sampling.repetition_penalty
        self.seed[slot] = sampling.seed % 2**64
        self.choice[slot] = sampling.choice % 2**64
        self.min_tokens[slot] = sampling.min_tokens
        self.ignore_eos[slot] = sampling.ignore_eos
        self.logprobs[slot] = sampling.logprobs
        self.stop_ids[slot] = sampling.stop_ids
        self.bias_ids[slot] = tuple(token for token, _ in sampling.logit_bias)
        self.bias_values[slot] = tuple(value for _, value in sampling.logit_bias)
        self.allowed_ids[slot] = sampling.allowed_ids
        self.bad_sequences[slot] = sampling.bad_sequences
        self.processors[slot] = sampling.processors
        self.processed[slot] = bool(sampling.processors)
        self.prompt_logprobs[slot] = sampling.prompt_logprobs
        self.tells[slot] = sampling.prompt_logprobs is not None
        self.label_ids[slot] = sampling.label_ids
        self.reads[slot] = sampling.reads
        self.restricted[slot] = bool(sampling.allowed_ids or sampling.bad_sequences)
        bare = (
            sampling.presence_penalty == 0.0
            and sampling.frequency_penalty == 0.0
            and sampling.repetition_penalty == 1.0
            and sampling.min_tokens == 0
            and sampling.logprobs is None
            and not sampling.logit_bias
            and not self.restricted[slot]
        )
        greedy = sampling.temperature < GREEDY_BELOW
        whole = sampling.top_k <= 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0
        self.plain[slot] = bare and greedy
        self.quick[slot] = bare and (greedy or whole)

    def clear(self, slot: int) -> None:
        self.fill(slot, NOTHING)

    def check(self, open_slots: Flags) -> None:
        assert self.plain[~open_slots].all(), "an empty slot has sampling parameters"
        assert not self.processed[~open_slots].any(), "an empty slot has processors"


GREEDY_BELOW = 1e-5  # a temperature that small leaves one token in float32 anyway
NOTHING = Sampling(temperature=0.0)
UNKNOWN = -1  # a token that the device has chosen and the host hasn't read yet
