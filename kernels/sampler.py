"""This file chooses the tokens of a step on a GPU, behind its forward: temperatures and noise of
its rows; masks, where they are held to grammars; and `ops.triton.chooser` for rows with penalties,
filters, edited logits or log-probabilities.

It does not know flights or graphs, nor how the logits came to be. Law: only `sample` waits for the
device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import Ints
from kernels.guided import GuidedRows
from kernels.ops.base import Ops
from kernels.ops.sampling import Sampled, uniform
from kernels.ops.triton.chooser import Chooser
from kernels.ops.triton.picker import Picker
from kernels.slots import GREEDY_BELOW, FlatBatch, Slots
from kernels.special import Scores
from kernels.staging import Stages

NOBODY = -1  # in place of a slot


class DeviceSampler:
    """Tokens for the rows of one device's steps. `nth`: the stage of the step."""

    def __init__(
        self,
        ops: Ops,
        slots: Slots,
        guided: GuidedRows,
        picker: Picker,
        eos_ids: tuple[int, ...],
    ) -> None:
        self.ops, self.slots, self.guided, self.picker = ops, slots, guided, picker
        vocab_size, last_token = picker.vocab_size, picker.last_token
        self.device = last_token.device
        self.chooser = Chooser(slots, eos_ids, vocab_size, last_token)
        mask_len = len(last_token) * (-(-vocab_size // 32) + 4) + 64
        self.mask_stages = Stages(self.device, mask_len)

    def chances(self, rows: Ints) -> tuple[NDArray[Any], NDArray[Any]]:
        """Temperatures (0: greedy) and noise of the slots `rows`, for their next token."""
        columns = self.slots.columns
        heat = columns.temperature[rows]
        heat = np.where(heat < GREEDY_BELOW, 0.0, heat).astype(np.float32)
        generated = self.slots.known_len[rows] - self.slots.prompt_len[rows]
        noise = np.zeros(len(rows), np.float32)
        if heat.any():
            drawn = uniform(columns.seed[rows], generated, columns.choice[rows])
            # Below 1 also as float32.
            noise = np.minimum(drawn, 1.0 - 2.0**-24).astype(np.float32)
        return heat, noise

    def hold(
        self,
        logits: Tensor,
        result: Tensor,
        batch: FlatBatch,
        heat: NDArray[Any],
        noise: NDArray[Any],
        nth: int,
    ) -> tuple[NDArray[np.int64], Tensor]:
        """Keeps rows of logits to their grammars and picks again; the steps before have landed. A
        row whose grammar has jumped since does not count: its next token is known, and still to be
        computed. Returns which rows count, and what was picked."""
        rows = batch.sampled_slots
        kv_len = batch.kv_len[np.isin(batch.slots, rows)]
        counts = self.slots.known_len[rows] == kv_len
        masks = self.guided.masks(np.where(counts, rows, NOBODY).astype(np.int32))
        if masks is None:
            return np.flatnonzero(counts), result
        if len(masks.broken):
            logits[torch.from_numpy(masks.broken).to(self.device)] = torch.nan
        heat_there, noise_there, slots, barred, bits = self.mask_stages.upload(
            nth,
            heat,
            noise,
            np.where(counts, rows, NOBODY),
            masks.rows,
            masks.words.reshape(-1),
        )
        if len(masks.rows):
            self.ops.bar(logits, barred.long(), bits.view(masks.words.shape))
        picked = self.picker.pick(logits, heat_there, noise_there, slots)
        return np.flatnonzero(counts), picked

    def choose(
        self,
        logits: Tensor,
        result: Tensor,
        rows: Ints,
        counted: NDArray[np.int64],
        heat: NDArray[Any],
        noise: NDArray[Any],
        nth: int,
    ) -> Scores | None:
        """Replaces the tokens of those rows that count and ask for more than `Picker` can."""
        special = counted[~self.slots.columns.quick[rows[counted]]]
        if not len(special):
            return None
        return self.chooser.choose(logits, result, rows, special, heat, noise, nth)

    def sample(self, logits: Tensor, rows: Ints, nth: int) -> Sampled:
        """Tokens for the slots `rows` from logits float32 [S, vocab], by the same kernels as those
        of a launched step; waits for them."""
        heat, noise = self.chances(rows)
        there = (torch.from_numpy(each).to(self.device) for each in (heat, noise, rows))
        result = self.picker.pick(logits, *there)
        every = np.arange(len(rows))
        scores = self.choose(logits, result, rows, every, heat, noise, nth)
        tokens, failed = result.cpu().numpy()
        logprobs = None if scores is None else scores.told(every, tokens)
        return Sampled(tokens, failed != 0, logprobs)
