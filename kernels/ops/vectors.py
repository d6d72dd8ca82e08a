"""This file reads what a model has made of a prompt from the row of its last token: the final
hidden state as an embedding, or the log probabilities of given tokens as a score.

It does not know steps, pages or what the numbers are for.

Laws: a row's numbers do not depend on other rows nor on how its token is chosen (sums in float64,
over the bare logits); a row whose numbers are none gives NaN, and others give theirs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.batch import Ints, Singles
from kernels.ops.sampling import LOGPROB_MIN
from kernels.slots import Slots

LENGTH_MIN = 1e-12  # a hidden state of zeros stays one


def reading_rows(slots: Slots, rows: Ints) -> Ints:
    """Which of the slots `rows` [S], about to get a token, get their first and want a vector."""
    is_first = slots.known_len[rows] == slots.prompt_len[rows]
    return np.flatnonzero(slots.columns.reads[rows] & is_first).astype(np.int32)


def read_vectors(
    logits: Tensor, hidden: Tensor | None, slots: Slots, rows: Ints, reading: Ints
) -> dict[int, Singles]:
    """For each of `reading`, indices of rows of logits float32 [S, vocab] and hidden float32
    [S, H]: what `Sampling.want_vector` or `label_ids` asks for."""
    found: dict[int, Singles] = {}
    for index in reading.tolist():
        label_ids = slots.columns.label_ids[rows[index]]
        if label_ids:
            row = logits[index].double()
            labels = row[torch.tensor(label_ids, device=row.device)]
            vector = (labels - torch.logsumexp(row, 0)).clamp(min=LOGPROB_MIN)
        else:
            assert hidden is not None, "a vector without hidden states"
            row = hidden[index].double()
            vector = row / row.norm().clamp(min=LENGTH_MIN)
        found[index] = vector.float().cpu().numpy()
    return found
