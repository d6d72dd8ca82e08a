"""This file is the host's side of the kernels in `choose.py` and `score.py`: which rows need which,
scratch, and the table of what each slot has said.

Nothing here waits for the device: what rows ask for goes up in one copy through pinned memory, and
log-probabilities come back through it with the step.

Memory: the table is int32 [slots, vocab], made at the first row with penalties and kept (256 slots
of 151,936 tokens: 148 MiB). While it is chosen for, a row takes a copy of its logits if they are
edited, two if tokens are taken out, and as much again if it is filtered. Without room `choose`
raises torch.OutOfMemoryError before anything is launched, and the step is one for which there is no
memory, like any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import Ints
from kernels.ops.triton import choose, narrow, score
from kernels.ops.triton.ops import power_of_two
from kernels.ops.triton.picker import BLOCK
from kernels.slots import Slots
from kernels.special import (
    NO_ENTRIES,
    SCORE_LEN,
    TOP,
    Edits,
    Entries,
    Limits,
    Scores,
    Told,
    penalized,
)
from kernels.staging import STAGES, Stages, pinned

SEARCH_BLOCK = 4096  # logits of one turn of a program that reads a whole row
SEARCH_WARPS = 16
# Pivots of the first look at a row, in temperatures below its largest value. What lies under the
# first weighs nothing: e^-104 is 0 in float32.
FAR = (104.0, 13.0, 9.0, 6.0, 4.0, 2.5, 1.2, 0.4)
ENTRY_BLOCK = 256
MARK_BLOCK = 1024
WARPS = {"num_warps": 4}


class Chooser:
    """Tokens for rows that are not `quick`, in place of those that `Picker` has picked."""

    def __init__(
        self, slots: Slots, eos_ids: tuple[int, ...], vocab_size: int, last_token: Tensor
    ) -> None:
        self.slots, self.vocab_size, self.last_token = slots, vocab_size, last_token
        self.device = last_token.device
        self.pieces = -(-vocab_size // BLOCK)
        self.far = torch.tensor(FAR, dtype=torch.float32, device=self.device)
        self.edits = Edits(slots, eos_ids, vocab_size)
        self.told = Told(slots)
        self.table: Tensor | None = None
        slot_count = len(slots.known_len)
        self.stages = Stages(self.device, 64 * slot_count + 4096)
        self.landings: list[Tensor | None] = [None] * STAGES

    def choose(
        self,
        logits: Tensor,  # float32 [S, vocab], bare; stay
        result: Tensor,  # int32 [2, S or more], as of `Picker.pick`; changed
        rows: Ints,  # [S] slots
        special: NDArray[Any],  # [D] which of them are chosen for
        heat: NDArray[Any],  # float32 [S]; 0: greedy
        noise: NDArray[Any],  # float32 [S], in [0, 1)
        nth: int,  # the stage of the step
    ) -> Scores | None:
        """Puts the choice on the stream: replaces tokens in `result` and `last_token`, but for rows
        that have failed. Log-probabilities of the rows that ask, once the step has landed."""
        own, columns = rows[special], self.slots.columns
        count, device = len(own), self.device
        assert logits.is_contiguous() and result.is_contiguous()
        heat, noise = heat[special], noise[special]
        limits = Limits.of(columns, own, heat > 0, self.vocab_size)
        counts = penalized(columns, own)
        marks = self.told.missing(own[counts])
        entries = self.edits.of_rows(own)
        changed = np.array(sorted({*np.flatnonzero(counts).tolist(), *entries}), np.int32)
        parts = [entries.get(row, NO_ENTRIES) for row in changed.tolist()]
        narrowed = np.array([row for row, each in enumerate(parts) if each.narrows], np.int32)
        source = special.astype(np.int32)
        source[changed] = -1 - np.arange(len(changed), dtype=np.int32)
        asks = np.array([columns.logprobs[slot] is not None for slot in own.tolist()], np.bool_)
        wanted = np.array(
            [min(columns.logprobs[slot] or 0, TOP, self.vocab_size) for slot in own[asks].tolist()],
            np.int32,
        )

        if counts.any() and self.table is None:
            shape = len(self.slots.known_len), self.vocab_size
            self.table = torch.zeros(shape, dtype=torch.int32, device=device)
        table = self.last_token if self.table is None else self.table  # then nothing looks at it
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        edited = torch.empty((len(changed) + len(narrowed), self.vocab_size), **floats)
        peak, mass = torch.empty((2, count, self.pieces), **floats)
        best, equal = torch.empty((2, count, self.pieces), dtype=torch.int32, device=device)
        cut_scratch = self.cut_scratch(len(limits.filtered))
        scratch = self.score_scratch(len(wanted))

        twins = len(changed) + np.arange(len(narrowed), dtype=np.int32)
        up = self.stages.upload(
            nth,
            source,
            special,
            own,
            counts,
            heat,
            noise,
            limits.top_k,
            limits.top_p,
            limits.min_p,
            limits.filtered,
            np.full(count, -np.inf, np.float32),
            np.zeros(count, np.int32),
            marks.cleared,
            marks.slots,
            marks.tokens,
            special[asks],
            wanted,
            *self.edit_arrays(own[changed], special[changed], counts[changed], parts, narrowed),
            changed[narrowed],
            twins,
        )
        there, edit = up[:17], up[17:]
        source_there, column, slot, counted, heat_there, noise_there = there[:6]
        top_k, top_p, min_p, filtered, edge, room = there[6:12]
        cleared, mark_slots, mark_tokens, scored, wanted_there = there[12:]
        vocab, pieces = self.vocab_size, self.pieces
        if len(cleared):
            choose.clear_kernel[(len(cleared), pieces)](table, cleared, vocab, BLOCK=BLOCK, **WARPS)
        if len(mark_slots):
            choose.mark_kernel[(-(-len(mark_slots) // MARK_BLOCK),)](
                table, mark_slots, mark_tokens, len(mark_slots), vocab, BLOCK=MARK_BLOCK, **WARPS
            )
        if len(changed):
            self.edit(logits, edited, table, source_there, edit)
        choose.peak_kernel[(count, pieces)](
            logits, edited, source_there, peak, best, vocab, pieces, BLOCK=BLOCK, **WARPS
        )
        if len(filtered):
            rows_of = logits, edited, source_there, filtered
            limits_there = heat_there, top_k, top_p, min_p
            self.narrow(rows_of, limits_there, peak, cut_scratch, edge, room)
        choose.weigh_kernel[(count, pieces)](
            logits,
            edited,
            source_there,
            heat_there,
            edge,
            peak,
            mass,
            equal,
            vocab,
            pieces,
            BLOCK=BLOCK,
            **WARPS,
        )
        choose.choose_kernel[(count,)](
            logits,
            edited,
            source_there,
            heat_there,
            noise_there,
            edge,
            room,
            peak,
            best,
            mass,
            equal,
            column,
            slot,
            counted,
            table,
            self.last_token,
            result,
            vocab,
            pieces,
            result.shape[1],
            PIECES=power_of_two(pieces),
            BLOCK=BLOCK,
            **WARPS,
        )
        self.told.advance(own[counts])
        if not len(wanted):
            return None
        landed = self.score(logits, result, scored, wanted_there, scratch, nth)
        return Scores(special[asks].astype(np.int32), wanted, landed)

    def edit_arrays(
        self,
        own: Ints,  # [E] slots
        origin: NDArray[Any],  # [E] rows of the logits
        counts: NDArray[np.bool_],  # [E] whether they are penalized
        parts: list[Entries],  # [E]
        narrowed: Ints,  # which of them get a twin
    ) -> list[NDArray[Any]]:
        """What `edit_kernel` and `alter_kernel` read."""
        columns = self.slots.columns
        twin = np.full(len(own), -1, np.int32)
        twin[narrowed] = len(own) + np.arange(len(narrowed))
        starts = np.zeros(len(own) + 1, np.int32)
        np.cumsum([len(each.tokens) for each in parts], out=starts[1:])
        return [
            origin,
            np.where(counts, own, -1),
            columns.repetition[own].astype(np.float32),
            columns.frequency[own].astype(np.float32),
            columns.presence[own].astype(np.float32),
            twin,
            np.array([each.empty for each in parts], np.int32),
            starts,
            np.concatenate([each.tokens for each in parts] or [np.empty(0, np.int32)]),
            np.concatenate([each.added for each in parts] or [np.empty(0, np.float32)]),
        ]

    def edit(
        self, logits: Tensor, edited: Tensor, table: Tensor, source: Tensor, arrays: list[Tensor]
    ) -> None:
        origin, slots, repetition, frequency, presence, twin, empty = arrays[:7]
        starts, tokens, added, narrowed, twins = arrays[7:]
        choose.edit_kernel[(len(origin), self.pieces)](
            logits,
            edited,
            table,
            origin,
            slots,
            repetition,
            frequency,
            presence,
            twin,
            empty,
            self.vocab_size,
            BLOCK=BLOCK,
            **WARPS,
        )
        if len(tokens):
            choose.alter_kernel[(len(origin),)](
                edited, twin, starts, tokens, added, self.vocab_size, BLOCK=ENTRY_BLOCK, **WARPS
            )
        if len(narrowed):
            choose.prefer_kernel[(len(narrowed),)](
                edited,
                source,
                narrowed,
                twins,
                self.vocab_size,
                BLOCK=SEARCH_BLOCK,
                num_warps=SEARCH_WARPS,
            )

    def cut_scratch(self, count: int) -> list[Tensor]:
        """What `narrow` writes for `count` rows, beside their cuts."""
        floats: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        pieces, pivots = self.pieces, len(FAR)
        return [
            torch.empty((count, pivots), **floats),
            torch.empty((count, pieces, pivots), **ints),
            torch.empty((count, pieces, pivots), **floats),
            torch.empty((count, 4), **ints),
            torch.empty((count, self.vocab_size), **floats),
        ]

    def narrow(
        self,
        rows: tuple[Tensor, ...],  # logits, edited, source, filtered
        limits: tuple[Tensor, ...],  # temperature, top_k, top_p, min_p
        peak: Tensor,
        scratch: list[Tensor],
        edge: Tensor,
        room: Tensor,
    ) -> None:
        pivots, counts, masses, span, found = scratch
        heat, top_k, top_p, min_p = limits
        filtered, vocab, pieces = rows[3], self.vocab_size, self.pieces
        sizes: dict[str, Any] = {"PIVOTS": len(FAR), "PIECES": power_of_two(pieces)}
        grid = (len(filtered), pieces)
        narrow.tally_kernel[grid](
            *rows,
            heat,
            peak,
            self.far,
            pivots,
            counts,
            masses,
            vocab,
            pieces,
            BLOCK=BLOCK,
            **sizes,
            **WARPS,
        )
        narrow.gather_kernel[grid](
            *rows,
            top_k,
            top_p,
            pivots,
            counts,
            masses,
            span,
            found,
            vocab,
            pieces,
            BLOCK=BLOCK,
            **sizes,
            **WARPS,
        )
        narrow.narrow_kernel[(len(filtered),)](
            filtered,
            heat,
            peak,
            top_k,
            top_p,
            min_p,
            pivots,
            counts,
            masses,
            span,
            found,
            edge,
            room,
            vocab,
            pieces,
            BLOCK=SEARCH_BLOCK,
            **sizes,
            num_warps=SEARCH_WARPS,
        )

    def score_scratch(self, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
        if not count:
            return None
        device = self.device
        return (
            torch.empty((2, count, self.pieces), dtype=torch.float32, device=device),
            torch.empty((count, self.pieces, TOP), dtype=torch.int64, device=device),
            torch.empty((count, SCORE_LEN), dtype=torch.int32, device=device),
        )

    def score(
        self,
        logits: Tensor,
        result: Tensor,
        rows: Tensor,  # int32 [A]
        wanted: Tensor,  # int32 [A]
        scratch: Any,
        nth: int,
    ) -> NDArray[np.int32]:
        """int32 [A, SCORE_LEN] of the host, there once the step has ended."""
        (peak, mass), found, out = scratch
        count, pieces = len(rows), self.pieces
        score.rank_kernel[(count, pieces)](
            logits,
            rows,
            wanted,
            peak,
            mass,
            found,
            self.vocab_size,
            pieces,
            TOP=TOP,
            BLOCK=BLOCK,
            **WARPS,
        )
        score.merge_kernel[(count,)](
            logits,
            rows,
            wanted,
            peak,
            mass,
            found,
            result,
            out,
            self.vocab_size,
            pieces,
            TOP=TOP,
            PIECES=power_of_two(pieces),
            FOUND=power_of_two(pieces * TOP),
            **WARPS,
        )
        landing = self.landings[nth]
        if landing is None:
            landing = pinned(len(self.slots.known_len) * SCORE_LEN, self.device)
            self.landings[nth] = landing
        landing = landing[: count * SCORE_LEN].view(count, SCORE_LEN)
        landing.copy_(out, non_blocking=True)
        return landing.numpy()
