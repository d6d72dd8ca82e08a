"""This file computes in float32 on a CPU so that a result's bits depend on its own row alone.

Vectorised libraries give an element other bits in a vector's tail than in its middle, and matrix
products choose their order of summation by the shape of the whole call. Two means keep that out:

- elementwise work is made of operations that IEEE 754 rounds correctly (+ - * / sqrt, round,
  shifts), each a call of its own so that none is contracted; sums fold halves onto each other. What
  is correctly rounded is equal in lanes and tails.
- products are called in one fixed shape per weight (`TILE` rows, padded), on memory aligned alike,
  so that the library has no choice to make. That a row's place in the tile doesn't matter either is
  verified per shape by `tile_rows`; where it does, the tile is one row, which has one place.

It does not know models or pools.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

TILE = 16  # rows; a tile of any 4-byte matrix then starts on a cache line. 16 costs a lone row 2x

LOG2_E = 1.44269504
LN_2_HIGH = 0.693359375  # few bits: n * LN_2_HIGH is exact
LN_2_LOW = -2.12194440e-4
EXP_POLYNOMIAL = (  # Cephes expf, relative error 2e-7
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
GELU_SCALE = 0.7978845608028654  # sqrt(2 / pi)
GELU_CUBIC = 0.044715
EXP_MIN = -87.0  # below: 0
EXP_MAX = 88.0  # above: the value there


def exp(x: Tensor) -> Tensor:
    """e**x of float32, any shape; exactly 1 at 0 and 0 below -87. NaN stays NaN."""
    r = x.clamp(EXP_MIN, EXP_MAX)
    n = (r * LOG2_E).round_()
    r.sub_(n * LN_2_HIGH)
    r.sub_(n * LN_2_LOW)
    y = r * EXP_POLYNOMIAL[0]
    for coefficient in EXP_POLYNOMIAL[1:]:
        y.add_(coefficient).mul_(r)
    y.mul_(r).add_(r).add_(1.0)
    # 2**n by its exponent bits; a NaN's n is some integer, and NaN times it is NaN
    power = n.nan_to_num_(0.0).to(torch.int32).add_(127).bitwise_left_shift_(23)
    y.mul_(power.view(torch.float32))
    return y.masked_fill_(x < EXP_MIN, 0.0)


def fold_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept with length 1, by adding halves: one order a length."""
    length = x.shape[-1]
    while length > 1:
        half = (length + 1) // 2
        folded = x[..., :half].clone()
        folded[..., : length - half] += x[..., half:length]
        x, length = folded, half
    return x


def silu(x: Tensor) -> Tensor:
    """x / (1 + e**-x)."""
    return x / exp(-x).add_(1.0)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of float32."""
    return (1.0 - 2.0 / exp(x * (2.0 / cap)).add_(1.0)).mul_(cap)


def gelu(x: Tensor) -> Tensor:
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2, written as x * sigmoid(2 * ...)."""
    inner = (x * x * GELU_CUBIC).add_(1.0).mul_(x).mul_(-2.0 * GELU_SCALE)
    return x / exp(inner).add_(1.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension."""
    mean = fold_sum(x * x) / x.shape[-1]
    return x / mean.add_(eps).sqrt_() * weight


def tile_rows(weight: Tensor) -> int:
    """How many rows a product with `weight` [N, K] may take at once: `TILE`, or 1 if here a row's
    result depends on its place in the tile."""
    x = probe(TILE, weight.shape[1])
    products = [functional.linear(x.roll(shift, 0), weight).roll(-shift, 0) for shift in (0, 1, 7)]
    return TILE if all(torch.equal(product, products[0]) for product in products) else 1


def linear(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """x [T, K] times weight [N, K] transposed -> [T, N], in tiles of `rows` (see `tile_rows`)."""
    count = x.shape[0]
    padded = aligned_rows(x, rows)
    out = torch.empty(padded.shape[0], weight.shape[0], dtype=x.dtype)
    transposed = weight.t()
    if rows == 1:  # a lone row begins on a cache line only by chance: it is moved to one
        x_row, out_row = torch.empty(1, x.shape[1]), torch.empty(1, weight.shape[0])
        for row in range(count):
            torch.mm(x_row.copy_(padded[row]), transposed, out=out_row)
            out[row] = out_row[0]
        return out
    for begin in range(0, padded.shape[0], rows):
        torch.mm(padded[begin : begin + rows], transposed, out=out[begin : begin + rows])
    return out[:count]


def aligned_rows(x: Tensor, rows: int) -> Tensor:
    """x with zero rows added up to a multiple of `rows`, contiguous and on a cache line."""
    missing = -x.shape[0] % rows
    if missing:
        return functional.pad(x, (0, 0, 0, missing))
    return aligned(x)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it if it isn't contiguous from a cache line on (views of files are not)."""
    if x.is_contiguous() and x.data_ptr() % 64 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def bmm_is_placeless(count: int, m: int, k: int, n: int, transposed: bool) -> bool:
    """Whether each of `count` products [m, k] x [k, n] of one call has the same bits in any place;
    `transposed`: the right factors lie as [n, k]."""
    a = probe(count * m, k).view(count, m, k)
    b = probe(count * n, k).view(count, n, k).transpose(1, 2)
    if not transposed:
        b = b.contiguous()
    products = [
        torch.bmm(a.roll(shift, 0), b.roll(shift, 0)).roll(-shift, 0) for shift in (0, 1, 3)
    ]
    return all(torch.equal(product, products[0]) for product in products)


def probe(rows: int, columns: int) -> Tensor:
    """Numbers without pattern, the same each time."""
    generator = torch.Generator().manual_seed(rows * 1_000_003 + columns)
    return torch.randn(rows, columns, generator=generator)
