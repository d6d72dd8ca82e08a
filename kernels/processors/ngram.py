"""This file bars tokens that would repeat a run of generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from kernels.batch import Ints
from kernels.processors.base import LogitsProcessor


class Params(Protocol):
    """As `actors.processors.ngram` declares them."""

    @property
    def size(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def allowed_ids(self) -> Sequence[int]: ...


def no_repeat_ngram(params: Params) -> LogitsProcessor:
    size, window = params.size, params.window
    allowed_ids = np.array(params.allowed_ids, np.int32)

    def bar(row: Tensor, prompt: Ints, generated: Ints) -> None:
        seen = generated[-window:] if window else generated
        if len(seen) < size:
            return
        runs = sliding_window_view(seen, size)
        begun = (runs[:, :-1] == seen[len(seen) - size + 1 :]).all(axis=1)
        ids = np.setdiff1d(runs[begun, -1], allowed_ids)
        row.index_fill_(0, torch.from_numpy(ids.astype(np.int64)).to(row.device), -torch.inf)

    return bar
