"""This file bars tokens by masks of bits in plain torch; it does not know whose masks they are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# For each byte of a mask, what its eight bits add: nothing, or -inf.
ADDED = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0.0),
    np.float32(-np.inf),
)


def bar(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """See `Ops.bar`. To add to logits costs a fiftieth of filling them by a mask, where each bit is
    a branch."""
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        added = torch.from_numpy(np.take(ADDED, words.numpy().view(np.uint8), axis=0))
    else:
        bits = words[:, :, None] >> torch.arange(32, device=words.device)
        added = torch.where((bits & 1).bool(), 0.0, -torch.inf)
    logits.index_add_(0, rows, added.flatten(1)[:, :vocab_size])
