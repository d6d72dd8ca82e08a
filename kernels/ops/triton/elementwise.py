# mypy: ignore-errors
"""This file is the element-wise kernels between matrix products: norms, rotation with the KV write,
gate times up.

Each reads its inputs once and writes its results once; arithmetic is in float32. It does not know
models, pages or graphs: a negative `write_index` is a row of padding, whose keys go nowhere.

With PDL a kernel is started while its predecessor ends; all begin with `gdc_wait` before they touch
anything that another kernel of the step has written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rms_norm_kernel(
    x,  # [T, H]
    residual,  # [T, H], x is added to it; unused without ADD
    weight,  # float32 [H]
    out,  # [T, H]
    eps,
    x_stride,
    length: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < length
    gain = tl.load(weight + at, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * length + at
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        kept = value.to(residual.dtype.element_ty)
        tl.store(place, kept, mask=inside)
        value = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / length + eps)
    tl.store(out + row * length + at, value * scale * gain, mask=inside)


@triton.jit
def narrow(value):
    """In e4m3, cut off at its largest number; NaN stays."""
    bound = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    return bound.to(tl.float8e4nv)


@triton.jit
def rope_write_kernel(
    qkv,  # [T, (HQ + 2 * HKV) * D]
    positions,  # int32 [T]
    cos_sin,  # float32 [positions_max, D]
    k_pool,  # [rows, HKV, D]
    v_pool,
    write_index,  # int64 [T]; negative: nowhere
    q_norm,  # float32 [D]; unused without NORM
    k_norm,
    q_out,  # [T, HQ, D]
    eps,
    k_factor,  # of what goes into pools of fp8
    v_factor,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # a power of two >= D / 2
    HEADS: tl.constexpr,  # heads of one program, a power of two
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, HALF)
    half: tl.constexpr = D // 2
    inside = (head[:, None] < HQ + 2 * HKV) & (at[None, :] < half)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(positions + token).to(tl.int64)
    write = tl.load(write_index + token)
    source = qkv + token * ((HQ + 2 * HKV) * D) + head[:, None] * D + at[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    is_q = head[:, None] < HQ
    is_v = head[:, None] >= HQ + HKV
    new_first, new_second = first, second
    if NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(square / D + eps)[:, None]
        place = tl.where(is_q, at[None, :], at[None, :])
        gain_first = tl.where(
            is_q,
            tl.load(q_norm + place, mask=inside, other=0.0),
            tl.load(k_norm + place, mask=inside, other=0.0),
        )
        gain_second = tl.where(
            is_q,
            tl.load(q_norm + place + half, mask=inside, other=0.0),
            tl.load(k_norm + place + half, mask=inside, other=0.0),
        )
        new_first = new_first * scale * gain_first
        new_second = new_second * scale * gain_second
        # As the unfused operators round between norm and rotation.
        new_first = new_first.to(qkv.dtype.element_ty).to(tl.float32)
        new_second = new_second.to(qkv.dtype.element_ty).to(tl.float32)
    angle = cos_sin + position * D + at
    cos = tl.load(angle, mask=at < half, other=0.0)[None, :]
    sin = tl.load(angle + half, mask=at < half, other=0.0)[None, :]
    turned_first = new_first * cos - new_second * sin
    turned_second = new_second * cos + new_first * sin
    q_place = q_out + (token * HQ + head[:, None]) * D + at[None, :]
    to_q = inside & is_q
    tl.store(q_place, turned_first, mask=to_q)
    tl.store(q_place + half, turned_second, mask=to_q)
    if k_pool.dtype.element_ty == tl.float8e4nv:
        turned_first, turned_second = (
            narrow(turned_first * k_factor),
            narrow(turned_second * k_factor),
        )
        first, second = narrow(first * v_factor), narrow(second * v_factor)
    to_k = inside & (~is_q) & (~is_v) & (write >= 0)
    k_place = k_pool + (write * HKV + head[:, None] - HQ) * D + at[None, :]
    tl.store(k_place, turned_first, mask=to_k)
    tl.store(k_place + half, turned_second, mask=to_k)
    to_v = inside & is_v & (write >= 0)
    v_place = v_pool + (write * HKV + head[:, None] - HQ - HKV) * D + at[None, :]
    tl.store(v_place, first, mask=to_v)
    tl.store(v_place + half, second, mask=to_v)


@triton.jit
def gate_mul_kernel(
    gate_up,  # [T, 2F]
    out,  # [T, F]
    length,  # F
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,  # its tanh form; else silu
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = gate_up + row * 2 * length + at
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + length, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if GELU:  # tanh(x) = 2 * sigmoid(2 * x) - 1
        slope = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    tl.store(out + row * length + at, gate / (1.0 + tl.exp(-slope)) * up, mask=inside)
