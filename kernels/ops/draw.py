"""This file draws tokens from logits in plain torch, row by row the same in any company.

Weights are softmax(row / temperature). Top-k keeps the k largest; top-p then the fewest largest
that hold its share of what is left; min-p those of at least its share of the largest. Among equals
at an edge the lowest ids stay. The draw goes by the sum of weights in order of ids. It does not
know where the noise comes from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops.base import Filters

CANDIDATES = 512  # sorted first for top-p and min-p; if a row keeps more, all are sorted


def draw(logits: Tensor, filters: Filters, noise: Tensor) -> Tensor:
    """logits float32 [D, vocab] (overwritten), noise float64 [D] in [0, 1) -> tokens int64 [D]."""
    vocab_size = logits.shape[1]
    weights = torch.softmax(logits.div_(filters.temperature[:, None]), dim=-1)
    filtered = (filters.top_k < vocab_size) | (filters.top_p < 1.0) | (filters.min_p > 0.0)
    index = filtered.nonzero().squeeze(1)
    if len(index):
        limits = (each[index] for each in (filters.top_k, filters.top_p, filters.min_p))
        weights[index] = keep(weights.index_select(0, index), *limits)
    below = weights.double().cumsum(dim=-1)
    total = below[:, -1:]
    # noise < 1, but the product may round up to the total, past the last token
    target = torch.minimum(noise[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(below, target, right=True).squeeze(1)


def keep(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """weights [F, vocab] with all but the tokens that pass the filters set to 0. Among equals at
    the edge those with the lowest ids stay."""
    vocab_size = weights.shape[1]
    limited = top_k[top_k < vocab_size]
    candidates = max(CANDIDATES, int(limited.max()) if len(limited) else 0)
    values = weights.topk(min(candidates, vocab_size), dim=-1).values
    count, settled = keep_count(weights, values, top_k, top_p, min_p)
    if not settled:
        values = weights.sort(dim=-1, descending=True).values
        count, _ = keep_count(weights, values, top_k, top_p, min_p)
    edge = values.gather(1, count[:, None] - 1)
    kept = weights >= edge
    if not torch.equal(kept.sum(dim=-1), count):
        above = weights > edge
        equal = kept & ~above
        room = count - above.sum(dim=-1)
        kept = above | (equal & (equal.cumsum(dim=-1) <= room[:, None]))
    return weights * kept


def keep_count(
    weights: Tensor, values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, bool]:
    """How many of the largest weights each row keeps, int64 [F], at least 1; and whether `values`
    [F, M], the M largest in order, were enough to tell."""
    width, vocab_size = values.shape[1], weights.shape[1]
    wide = values.double()
    through = wide.cumsum(dim=-1)
    whole = weights.double().cumsum(dim=-1)[:, -1:]  # not sum: its order depends on the row count
    within_k = through.gather(1, top_k.clamp(max=width)[:, None] - 1)
    total = torch.where((top_k < vocab_size)[:, None], within_k, whole)
    rank = torch.arange(width, device=values.device)
    passed = rank < top_k[:, None]
    passed &= ((through - wide) < top_p[:, None] * total) | (top_p >= 1.0)[:, None]
    passed &= wide >= min_p[:, None] * wide[:, :1]
    count = passed.sum(dim=-1)
    settled = width == vocab_size or bool(((count < width) | (top_k <= width)).all())
    return count.clamp(min=1), settled
