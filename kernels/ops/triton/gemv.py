# mypy: ignore-errors
"""This file is the product of a matrix with one row, with what stands before and after it in a
decoder fused in: the norm of the input, gate times up, the sum into the residual.

One row is bound by reading the weight once. Each program owns a few output rows and walks over K in
wide steps; with PDL it asks for its first weights before it waits for its input. It does not know
models. The order of reduction depends on K and the launch's constants, never on other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def read(place, mask, EVEN: tl.constexpr, POLICY: tl.constexpr):
    if EVEN:
        return tl.load(place, eviction_policy=POLICY)
    return tl.load(place, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def gemv_kernel(
    weight,  # [N, K], or [2N, K] with GATED
    x,  # [K]
    norm,  # [K]: gain of the RMS norm of x; unused without NORM
    bias,  # [N]; unused without BIAS
    out,  # [N]
    eps,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,  # out = silu(first N rows) * last N rows
    ADD: tl.constexpr,  # out += instead of out =
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,  # N is a multiple of ROWS, and K of BLOCK
    POLICY: tl.constexpr,  # what becomes of weights in the cache
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    valid = row < N
    base = weight + row.to(tl.int64)[:, None] * K + at[None, :]
    other = base + N.to(tl.int64) * K  # the row to multiply with, of GATED
    within = valid[:, None] & (at < K)[None, :]
    first = read(base, within, EVEN, POLICY)
    if GATED:
        first_up = read(other, within, EVEN, POLICY)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = read(x + at, at < K, EVEN, "").to(tl.float32)
    if NORM:
        square = value * value
        value *= read(norm + at, at < K, EVEN, "").to(tl.float32)
    total = first.to(tl.float32) * value[None, :]
    if GATED:
        total_up = first_up.to(tl.float32) * value[None, :]
    for begin in tl.static_range(BLOCK, K, BLOCK):
        inside = begin + at < K
        within = valid[:, None] & inside[None, :]
        value = read(x + begin + at, inside, EVEN, "").to(tl.float32)
        part = read(base + begin, within, EVEN, POLICY)
        if NORM:
            square += value * value
            value *= read(norm + begin + at, inside, EVEN, "").to(tl.float32)
        total += part.to(tl.float32) * value[None, :]
        if GATED:
            part = read(other + begin, within, EVEN, POLICY)
            total_up += part.to(tl.float32) * value[None, :]
    result = tl.sum(total, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(square, 0) / K + eps)
        result *= scale
    if GATED:
        up = tl.sum(total_up, 1)
        if NORM:
            up *= scale
        result = result / (1.0 + tl.exp(-result)) * up
    if BIAS:
        result += tl.load(bias + row, mask=valid, other=0.0).to(tl.float32)
    if ADD:
        result += tl.load(out + row, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row, result, mask=valid)
