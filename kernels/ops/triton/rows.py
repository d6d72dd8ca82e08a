# mypy: ignore-errors
"""This file is what kernels over rows of logits share: where a row's values lie, a piece of them,
and the order of floats as one of integers. It does not know what is looked for in a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(logits, edited, source, vocab):
    """Where a row's values lie, see `choose.py`."""
    row = tl.load(source).to(tl.int64)
    if row >= 0:
        place = logits + row * vocab
    else:
        place = edited + (-1 - row) * vocab
    return place


@triton.jit
def piece_of(row, piece, vocab, BLOCK: tl.constexpr):
    """int32 and float32 [BLOCK]: the tokens of a piece of the row at the pointer `row`, and their
    values; past the vocabulary's end -inf."""
    at = piece * BLOCK + tl.arange(0, BLOCK)
    return at, tl.load(row + at, mask=at < vocab, other=float("-inf"))


@triton.jit
def order_of(value):
    """int32 that are ordered as the floats are."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The float of which `order_of` is `order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
