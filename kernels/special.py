"""This file says, in arrays of the host, what rows ask for that are not `quick`: limits of a draw,
added and barred tokens, which tokens a penalty has to count, log-probabilities.

The host knows how many tokens a row has when a step is launched, not which the last ones are. All
of this follows from the number; the tokens themselves are counted on the device. What does depend
on them, bad sequences of several tokens, needs the steps before to have landed. It does not know
kernels.

Laws: a token is named once in a row's entries; a slot's tokens are told to the device once, in the
order in which they became known, and from the beginning for each tenant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Ints, Singles, TokenLogprobs
from kernels.ops.sampling import LOGPROB_MIN, restrict_completes
from kernels.slots import SamplingColumns, Slots

NO_LIMIT = 1 << 30  # of top-k
TOP = 20  # most log-probabilities of a row, beside its own token's
SCORE_LEN = 1 + 2 * TOP  # int32 of one row: its token's, those of the best, their ids


def needs_tokens(columns: SamplingColumns, rows: Ints) -> bool:
    """Whether what the slots `rows` may get depends on tokens that may not have landed."""
    return any(
        len(bad) > 1
        for slot in rows[columns.restricted[rows]].tolist()
        for bad in columns.bad_sequences[slot]
    )


def penalized(columns: SamplingColumns, rows: Ints) -> NDArray[np.bool_]:
    return (
        (columns.repetition[rows] != 1.0)
        | (columns.presence[rows] != 0.0)
        | (columns.frequency[rows] != 0.0)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Of the rows of a step that are special, in order; see `choose.narrow_kernel`."""

    top_k: Ints
    top_p: Singles
    min_p: Singles
    filtered: Ints  # which rows are

    @staticmethod
    def of(columns: SamplingColumns, rows: Ints, drawn: NDArray[Any], vocab_size: int) -> Limits:
        wanted = columns.top_k[rows]
        is_off = (wanted <= 0) | (wanted >= vocab_size)
        top_k = np.where(is_off, NO_LIMIT, wanted).astype(np.int32)
        top_p = np.minimum(columns.top_p[rows], 1.0).astype(np.float32)
        min_p = np.minimum(columns.min_p[rows], 1.0).astype(np.float32)
        some = drawn & ((top_k < NO_LIMIT) | (top_p < 1.0) | (min_p > 0.0))
        return Limits(top_k, top_p, min_p, np.flatnonzero(some).astype(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Tokens of one row whose values change: twice the token, and 1 if it may come; what is added.
    With `narrows` those that may not come are taken out if others are left; with `empty` all that
    are not named are taken out with them."""

    tokens: Ints
    added: Singles
    narrows: bool = False
    empty: bool = False


NO_ENTRIES = Entries(np.empty(0, np.int32), np.empty(0, np.float32))


class Edits:
    """What is added to and taken out of each slot's logits. Made anew when it changes: with the
    tenant, and when `min_tokens` are there."""

    def __init__(self, slots: Slots, eos_ids: tuple[int, ...], vocab_size: int) -> None:
        self.slots, self.eos_ids, self.vocab_size = slots, eos_ids, vocab_size
        self.kept: dict[int, tuple[tuple[Any, ...], Entries]] = {}

    def of_rows(self, rows: Ints) -> dict[int, Entries]:
        """For the next token of each of the slots `rows`; by row, where there are any."""
        columns, slots = self.slots.columns, self.slots
        early = slots.known_len[rows] - slots.prompt_len[rows] < columns.min_tokens[rows]
        maybe = early | columns.restricted[rows]
        found = (
            (row, self.of(slot))
            for row, (slot, is_sure) in enumerate(zip(rows.tolist(), maybe.tolist(), strict=True))
            if is_sure or columns.bias_ids[slot]
        )
        return {row: entries for row, entries in found if entries is not NO_ENTRIES}

    def of(self, slot: int) -> Entries:
        """For the slot's next token."""
        columns, slots = self.slots.columns, self.slots
        said = slots.tokens[slot, slots.prompt_len[slot] : slots.known_len[slot]]
        early = bool(len(said) < columns.min_tokens[slot])
        barred = tuple(
            bad[-1] for bad in columns.bad_sequences[slot] if restrict_completes(bad[:-1], said)
        )
        if not (early or barred or columns.bias_ids[slot] or columns.allowed_ids[slot]):
            return NO_ENTRIES
        key = int(slots.tenancy[slot]), early, barred
        if slot in self.kept and self.kept[slot][0] == key:
            return self.kept[slot][1]
        entries = self.made(columns, slot, early, barred)
        self.kept[slot] = key, entries
        return entries

    def made(
        self, columns: SamplingColumns, slot: int, early: bool, barred: tuple[int, ...]
    ) -> Entries:
        ends: tuple[int, ...] = ()
        if early:
            ends = (*columns.stop_ids[slot], *(() if columns.ignore_eos[slot] else self.eos_ids))
        biased, allowed = columns.bias_ids[slot], columns.allowed_ids[slot]
        tokens = np.unique(np.array((*biased, *ends, *allowed, *barred), np.int64))
        added = np.zeros(len(tokens), np.float64)
        np.add.at(added, np.searchsorted(tokens, biased), columns.bias_values[slot])
        added[np.isin(tokens, ends)] = -np.inf
        stays = np.isin(tokens, allowed) if allowed else np.ones(len(tokens), np.bool_)
        stays &= ~np.isin(tokens, barred)
        real = (tokens >= 0) & (tokens < self.vocab_size)
        return Entries(
            (2 * tokens + stays)[real].astype(np.int32),
            added[real].astype(np.float32),
            narrows=bool(allowed or barred),
            empty=bool(allowed),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """What the device's table of said tokens does not have yet: slots to be cleared; then, for each
    token, its slot, and twice the token, and 1 if it was generated."""

    cleared: Ints
    slots: Ints
    tokens: Ints


class Told:
    """How far the device's table knows the tokens of each slot."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.tenancy = np.full(len(slots.known_len), -1, np.int64)
        self.told_len = np.zeros(len(slots.known_len), np.int64)

    def missing(self, rows: Ints) -> Marks:
        """What is to be told of the slots `rows`."""
        slots = self.slots
        known = slots.known_len[rows].astype(np.int64)
        # More than there are: a step was given up after its token had been counted.
        anew = (self.tenancy[rows] != slots.tenancy[rows]) | (self.told_len[rows] > known)
        begin = np.where(anew, 0, self.told_len[rows])
        parts = []
        for slot, first, last in zip(rows.tolist(), begin.tolist(), known.tolist(), strict=True):
            if first < last:
                tokens = slots.tokens[slot, first:last]
                assert (tokens >= 0).all(), f"slot {slot} has tokens that only the device knows"
                generated = np.arange(first, last) >= slots.prompt_len[slot]
                parts.append((np.full(last - first, slot, np.int32), 2 * tokens + generated))
        if not parts:
            return Marks(rows[anew], np.empty(0, np.int32), np.empty(0, np.int32))
        own, tokens = (np.concatenate(each).astype(np.int32) for each in zip(*parts, strict=True))
        return Marks(rows[anew], own, tokens)

    def advance(self, rows: Ints) -> None:
        """The table has all tokens of the slots, and the one that the step chooses."""
        self.tenancy[rows] = self.slots.tenancy[rows]
        self.told_len[rows] = self.slots.known_len[rows] + 1

    def check(self) -> None:
        """A step that was given up may have left its token in the table."""
        assert (self.tenancy <= self.slots.tenancy).all(), "a tenant who has not come yet"
        same = self.slots.open & (self.tenancy == self.slots.tenancy)
        ahead = self.told_len[same] > self.slots.known_len[same] + 1
        assert not ahead.any(), "the table knows more than there is"


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Log-probabilities of a step on their way: of row columns[i] of the sampled ones, `wanted[i]`
    beside its own token's. `landed` int32 [A, SCORE_LEN] counts once the step has ended."""

    columns: Ints
    wanted: Ints
    landed: NDArray[np.int32]

    def told(self, columns: NDArray[Any], tokens: Ints) -> list[TokenLogprobs | None]:
        """Of the sampled rows `columns` that got `tokens`; None for those that did not ask."""
        most = int(self.wanted.max(initial=0))
        values = self.landed[:, : 1 + most].view(np.float32).tolist()
        ids = self.landed[:, 1 + TOP : 1 + TOP + most].tolist()
        rows = zip(self.columns.tolist(), self.wanted.tolist(), values, ids, strict=True)
        asked = {column: row for column, *row in rows}
        return [
            entry(token, *asked[column]) if column in asked else None
            for column, token in zip(columns.tolist(), tokens.tolist(), strict=True)
        ]


def entry(token: int, count: int, values: list[float], ids: list[int]) -> TokenLogprobs:
    """Of one row, from its own token's log-probability and those of the best; `count` are real."""
    found = zip(ids[:count], values[1 : 1 + count], strict=True)
    pairs = sorted(
        (pair for pair in found if pair[1] > LOGPROB_MIN), key=lambda pair: (-pair[1], pair[0])
    )
    return TokenLogprobs(token, max(values[0], LOGPROB_MIN), tuple(pairs))
