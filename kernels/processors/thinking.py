"""This file ends reasoning that has grown too long: it leaves the end's ids as the only ones."""

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
    """As `actors.processors.thinking` declares them, settled."""

    @property
    def budget(self) -> int: ...
    @property
    def begin_ids(self) -> Sequence[int]: ...
    @property
    def end_ids(self) -> Sequence[int]: ...


def thinking_budget(params: Params) -> LogitsProcessor:
    begin_ids, end_ids = np.array(params.begin_ids), np.array(params.end_ids)

    def limit(row: Tensor, prompt: Ints, generated: Ints) -> None:
        tokens = np.concatenate((prompt, generated))
        begun = end_of_last(tokens, begin_ids)
        if begun is None or end_of_last(tokens[begun:], end_ids) is not None:
            return
        nth = len(tokens) - begun - params.budget
        if nth >= 0:
            # The ids of the end, one a token, from the budget's on; the last one ends the span.
            token = int(end_ids[nth % len(end_ids)])
            kept = row[token].item()
            row.fill_(-torch.inf)
            row[token] = kept

    return limit


def end_of_last(tokens: Ints, ids: Ints) -> int | None:
    """Where the last occurrence of `ids` ends."""
    if len(tokens) < len(ids):
        return None
    found = np.flatnonzero((sliding_window_view(tokens, len(ids)) == ids).all(axis=1))
    return int(found[-1]) + len(ids) if len(found) else None
