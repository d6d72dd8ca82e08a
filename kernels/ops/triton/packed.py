# mypy: ignore-errors
"""This file is the decode kernel over pools of fp8 (e4m3), which it reads two numbers at a time.

Matrix units want halves, and what brings bytes into their order one by one takes longer than memory
does. So a pool is read as 16-bit words; of a word both bytes are made halves by shifts (their value
times 2**-8, exactly), and even and odd columns are multiplied apart. Otherwise it is what
`decode_kernel` of `attend.py` is, without shared keys, and for queries of two bytes only. The
caller puts the 2**8 into the scales.

Laws: those of `attend.py`; but a NaN in a pool is read as a number: whoever wrote it has failed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.ops.triton.attend import split_chunk, splits_used, weigh

# The same for two words in a register, which the compiler does not see by itself.
LOW = tl.constexpr("""{
    .reg .b32 sign, rest;
    and.b32 sign, $1, 0x00800080;
    shl.b32 sign, sign, 8;
    and.b32 rest, $1, 0x007f007f;
    shl.b32 rest, rest, 7;
    or.b32 $0, sign, rest;
}""")
HIGH = tl.constexpr("""{
    .reg .b32 sign, rest;
    and.b32 sign, $1, 0x80008000;
    and.b32 rest, $1, 0x7f007f00;
    shr.b32 rest, rest, 1;
    or.b32 $0, sign, rest;
}""")


@triton.jit
def low(word, ASM: tl.constexpr):
    """The byte of even columns as a half."""
    if ASM:
        return tl.inline_asm_elementwise(LOW, "=r,r", [word], tl.float16, is_pure=True, pack=2)
    return (((word & 0x80) << 8) | ((word & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def high(word, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(HIGH, "=r,r", [word], tl.float16, is_pure=True, pack=2)
    return ((word & 0x8000) | ((word & 0x7F00) >> 1)).to(tl.float16, bitcast=True)


@triton.jit
def half(value):
    """bfloat16 reaches further than a half; no query does."""
    wide = value.to(tl.float32)
    return tl.minimum(tl.maximum(wide, -65504.0), 65504.0).to(tl.float16)


@triton.jit(do_not_specialize=["splits", "slots"])
def decode_packed_kernel(
    q,  # [R, HKV * G, D]
    k_pool,  # uint16 [rows, HKV, D / 2]
    v_pool,
    page_table,  # int32 [slots, pages_max]
    table_rows,  # int32 [R]
    kv_len,  # int32 [R]
    part,  # float32 [R, HKV * G, slots, D]; a row of one split goes to `out`
    part_lse,  # float32 [R, HKV * G, slots], to the base 2
    out,  # [R, HKV * G, D]
    scale,  # as those of `decode_kernel`, times 2**8
    v_scale,
    softcap,
    pages_max,
    splits,
    slots,
    HKV: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,  # a power of two >= D / 2
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT_MIN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    length = tl.load(kv_len + row)
    table = page_table + tl.load(table_rows + row).to(tl.int64) * pages_max
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    begin = first + split * split_chunk(length - first, splits, SPLIT_MIN, BLOCK)
    end = begin + split_chunk(length - first, splits, SPLIT_MIN, BLOCK)
    end = tl.minimum(end, length)
    if begin >= end and split > 0:
        return
    words: tl.constexpr = D // 2
    member = tl.arange(0, ROWS)
    at = tl.arange(0, WIDE)
    key = tl.arange(0, BLOCK)
    own = (member < G)[:, None] & (at < words)[None, :]
    q_head = head * G + member
    place_q = (row * HKV * G + q_head[:, None]) * D + 2 * at[None, :]
    even = half(tl.load(q + place_q, mask=own, other=0.0))
    odd = half(tl.load(q + place_q + 1, mask=own, other=0.0))
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed_even = tl.zeros([ROWS, WIDE], tl.float32)
    mixed_odd = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(begin, end, BLOCK):
        spot = start + key
        seen = spot < end
        page = tl.load(table + spot // PAGE, mask=seen, other=0).to(tl.int64)
        place = ((page * PAGE + spot % PAGE) * HKV + head) * words
        load = seen[:, None] & (at < words)[None, :]
        keys = tl.load(k_pool + place[:, None] + at[None, :], mask=load, other=0)
        values = tl.load(v_pool + place[:, None] + at[None, :], mask=load, other=0)
        keys = tl.trans(keys)
        score = tl.dot(odd, high(keys, ASM), tl.dot(even, low(keys, ASM))) * scale
        peak, total, weight, shrink = weigh(score, seen[None, :], softcap, peak, total, CAP)
        narrow = weight.to(tl.float16)
        mixed_even = tl.dot(narrow, low(values, ASM), mixed_even * shrink[:, None])
        mixed_odd = tl.dot(narrow, high(values, ASM), mixed_odd * shrink[:, None])
    safe = tl.where(total > 0.0, total, 1.0)
    mixed_even = mixed_even / safe[:, None] * v_scale
    mixed_odd = mixed_odd / safe[:, None] * v_scale
    if splits_used(length - first, splits, SPLIT_MIN) == 1:
        tl.store(out + place_q, mixed_even, mask=own)
        tl.store(out + place_q + 1, mixed_odd, mask=own)
    else:
        lse = tl.where(total > 0.0, peak + tl.log2(safe), float("-inf"))
        place = (row * HKV * G + q_head) * slots + split
        target = part + place[:, None] * D + 2 * at[None, :]
        tl.store(target, mixed_even, mask=own)
        tl.store(target + 1, mixed_odd, mask=own)
        tl.store(part_lse + place, lse, mask=member < G)
