"""This file is the host's side of the kernels in `pick.py`: grids and scratch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.ops.triton import pick
from kernels.ops.triton.ops import power_of_two

BLOCK = 4096  # logits of one program
STAGE_BLOCK = 128


class Picker:
    """Tokens for rows of logits. `last_token`: int32 [slot_count], where they are left for the next
    step."""

    def __init__(self, ops: Any, vocab_size: int, last_token: Tensor) -> None:
        self.pdl, self.launch = ops.pdl, ops.launch
        self.vocab_size, self.last_token = vocab_size, last_token
        self.pieces = -(-vocab_size // BLOCK)

    def pick(
        self,
        logits: Tensor,  # float32 [S, vocab]
        temperature: Tensor,  # float32 [S]
        noise: Tensor,  # float32 [S]
        slots: Tensor,  # int32 [S]; negative: padding
    ) -> Tensor:
        """int32 [2, S]: tokens, and 1 where a row failed."""
        count = logits.shape[0]
        device = logits.device
        result = torch.empty((2, count), dtype=torch.int32, device=device)
        if count == 0:
            return result
        assert logits.is_contiguous() and logits.dtype == torch.float32
        scratch = torch.empty((2, count, self.pieces), dtype=torch.float32, device=device)
        best = torch.empty((count, self.pieces), dtype=torch.int32, device=device)
        peak, mass = scratch
        pick.pick_pieces_kernel[(count, self.pieces)](
            logits,
            temperature,
            peak,
            best,
            mass,
            self.vocab_size,
            self.pieces,
            BLOCK=BLOCK,
            PDL=self.pdl,
            num_warps=4,
            **self.launch,
        )
        pick.pick_kernel[(count,)](
            logits,
            temperature,
            noise,
            peak,
            best,
            mass,
            slots,
            self.last_token,
            result,
            self.vocab_size,
            self.pieces,
            count,
            PIECES=power_of_two(self.pieces),
            BLOCK=BLOCK,
            PDL=self.pdl,
            num_warps=4,
            **self.launch,
        )
        return result

    def stage(
        self,
        packed: Tensor,  # int32 [.., B or more]
        page_table: Tensor,  # int32 [slot_count, pages_max]
        page_size: int,
        ids: Tensor,  # int64 [B], written as all that follow
        positions: Tensor,  # int32 [B]
        kv_len: Tensor,  # int32 [B]
        write_index: Tensor,  # int64 [B]
        table_rows: Tensor,  # int32 [B]
    ) -> None:
        """The inputs of a decode step from what the host knows of it; see `stage_kernel`."""
        count = len(ids)
        pick.stage_kernel[(-(-count // STAGE_BLOCK),)](
            packed,
            self.last_token,
            page_table,
            ids,
            positions,
            kv_len,
            write_index,
            table_rows,
            count,
            packed.shape[1],
            page_table.shape[1],
            PAGE=page_size,
            BLOCK=STAGE_BLOCK,
            num_warps=4,
        )
