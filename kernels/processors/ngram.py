"""This file bars tokens that would repeat a run of generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
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


class Runs:
    """What has followed each run of `size - 1` tokens. A row's tokens only grow, so each is looked
    at once; where they are others than before, all are read again."""

    def __init__(self, size: int) -> None:
        self.before = size - 1
        self.seen = np.empty(64, np.int32)  # [:count] were looked at
        self.count = 0
        # By the hash of a run: each token that has followed it, and where it did so last.
        self.followed: dict[int, dict[int, int]] = {}

    def read(self, tokens: Ints) -> None:
        if not np.array_equal(tokens[: self.count], self.seen[: self.count]):
            self.followed.clear()
            self.count = 0
        if len(tokens) > len(self.seen):
            self.seen = np.resize(self.seen, 2 * len(tokens))
        self.seen[self.count : len(tokens)] = tokens[self.count :]
        for place in range(max(self.count, self.before), len(tokens)):
            key = self.key(tokens, place)
            self.followed.setdefault(key, {})[int(tokens[place])] = place
        self.count = len(tokens)

    def key(self, tokens: Ints, place: int) -> int:
        return hash(tokens[place - self.before : place].tobytes())

    def after(self, tokens: Ints, first: int) -> list[int]:
        """What has followed, at place `first` or later, the run that is at the end as well."""
        end = len(tokens)
        run = tokens[end - self.before :]
        return [
            token
            for token, place in self.followed.get(self.key(tokens, end), {}).items()
            if place >= first and np.array_equal(tokens[place - self.before : place], run)
        ]


def no_repeat_ngram(params: Params) -> LogitsProcessor:
    size, window = params.size, params.window
    allowed_ids = np.array(params.allowed_ids, np.int32)

    runs = Runs(size)

    def bar(row: Tensor, prompt: Ints, generated: Ints) -> None:
        if len(generated) < size:
            return
        runs.read(generated)
        first = len(generated) - window + size - 1 if window else 0  # where a run may end
        ids = np.setdiff1d(np.array(runs.after(generated, first), np.int64), allowed_ids)
        row.index_fill_(0, torch.from_numpy(ids).to(row.device), -torch.inf)

    return bar
