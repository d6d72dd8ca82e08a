"""This file lets custom processors change the logits of the rows that ask for them.

It does not know names or requests: a slot has its processors with it. They run behind the masks of
grammars and before penalties; log-probabilities are of what they leave, as they are behind masks.

Laws: a processor sees one row at a time, and that row's own tokens; one that fails, or leaves what
is no number, fails its row alone; where one would leave no token, the row stays as it was, so that
a grammar's way on is never closed.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.batch import Ints
from kernels.slots import Slots


class LogitsProcessor(Protocol):
    """Called for every token that is sampled, in any order of rows, also again after a recovery:
    its result follows from its arguments."""

    def __call__(self, row: Tensor, prompt: Ints, generated: Ints) -> None:
        """Changes `row` [vocab] float32, on the device of the step, in place. -inf bars a token.
        `prompt` and `generated` are the row's ids on the host, read-only."""
        ...


def process(logits: Tensor, slots: Slots, rows: Ints) -> str:
    """Changes logits float32 [S, vocab] of the slots `rows` [S], in place: a row at fault becomes
    NaN. What went wrong, or nothing."""
    problem = ""
    for index in np.flatnonzero(slots.columns.processed[rows]).tolist():
        slot = int(rows[index])
        tokens = slots.tokens[slot, : slots.known_len[slot]]
        tokens.flags.writeable = False
        prompt, generated = np.split(tokens, [slots.prompt_len[slot]])
        changed = logits[index].clone()
        try:
            for processor in slots.columns.processors[slot]:
                processor(changed, prompt, generated)
        except Exception as error:  # code of others: it may raise anything
            problem = f"a logits processor failed: {error!r}"
            changed = torch.full_like(logits[index], torch.nan)
        if not changed.max() == -torch.inf:  # NaN is not
            logits[index] = changed
    return problem
