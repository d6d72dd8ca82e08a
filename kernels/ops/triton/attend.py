# mypy: ignore-errors
"""This file is the kernels of attention over pages: one query a row in splits of its keys, a chunk
of queries a row in tiles, and the sum of splits.

Keys are addressed through the page table token by token, so any page size will do. Products are of
the queries' dtype with float32 sums; float32 is multiplied exactly (no tf32). Pools may be
narrower, with one scale for keys and one for values. It does not know models or plans: which rows
and how many splits is decided by `kernels.attention.triton`.

Laws: only keys that a query may see are read into a result, also where a page holds NaN; a row
without keys (padding) gives zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Numbers that change from step to step are not compiled in, nor is whether the start of an array
# within another is aligned: a step would wait for the compiler.


@triton.jit
def splits_used(span, splits, split_min: tl.constexpr):
    return tl.minimum(tl.maximum(tl.cdiv(span, split_min), 1), splits)


@triton.jit
def split_chunk(span, splits, split_min: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys each split of `span` keys takes: a multiple of BLOCK."""
    return tl.cdiv(tl.cdiv(span, splits_used(span, splits, split_min)), BLOCK) * BLOCK


@triton.jit
def soft_cap(score, softcap):
    """softcap * tanh(score / softcap)."""
    return (1.0 - 2.0 / (tl.exp2(score / softcap * 2.8853900817779268) + 1.0)) * softcap


@triton.jit
def block(
    k_pool,
    v_pool,
    table,
    spot,  # int [BLOCK]: which keys of the row
    there,  # bool [BLOCK]: whether the row has them
    head,  # of keys
    at,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Keys and values by way of the page table, both [BLOCK, WIDE]; zeros where there are none."""
    page = tl.load(table + spot // PAGE, mask=there, other=0).to(tl.int64)
    place = ((page * PAGE + spot % PAGE) * HKV + head) * D
    load = there[:, None] & (at < D)[None, :]
    keys = tl.load(k_pool + place[:, None] + at[None, :], mask=load, other=0.0)
    values = tl.load(v_pool + place[:, None] + at[None, :], mask=load, other=0.0)
    return keys, values


@triton.jit
def weigh(score, seen, softcap, peak, total, CAP: tl.constexpr):
    """A block more under the softmax of those before: the new peak and total, what these keys weigh
    ([Q, BLOCK]), and by how much what has been summed shrinks ([Q])."""
    if CAP:
        score = soft_cap(score, softcap)
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(peak - higher)
    return higher, total * shrink + tl.sum(weight, 1), weight, shrink


@triton.jit
def attend(query, keys, values, seen, scale, softcap, peak, total, mixed, CAP: tl.constexpr):
    """`weigh`, and the weighted values added to `mixed`, [Q, WIDE]."""
    EXACT: tl.constexpr = "ieee" if query.dtype == tl.float32 else "tf32"
    score = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=EXACT) * scale
    peak, total, weight, shrink = weigh(score, seen, softcap, peak, total, CAP)
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weight.to(query.dtype), values.to(query.dtype), input_precision=EXACT)
    return peak, total, mixed


@triton.jit(do_not_specialize=["splits", "slots"])
def decode_kernel(
    q,  # [R, HKV * G, D]
    k_pool,  # [rows, HKV, D]
    v_pool,
    page_table,  # int32 [slots, pages_max]
    table_rows,  # int32 [R]
    kv_len,  # int32 [R]
    shared,  # int32 [R]: keys that `shared_kernel` sees to; unused without SHARED
    part,  # float32 [R, HKV * G, slots, D]; a row of one split goes to `out`
    part_lse,  # float32 [R, HKV * G, slots], to the base 2
    out,  # [R, HKV * G, D]
    scale,  # times log2(e), and what keys are to be multiplied with
    v_scale,  # what values are to be multiplied with
    softcap,  # times log2(e)
    pages_max,
    splits,
    slots,  # splits, and those of the shared keys
    HKV: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two >= G, and what a product needs
    D: tl.constexpr,
    WIDE: tl.constexpr,  # a power of two >= D
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT_MIN: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAP: tl.constexpr,
    SHARED: tl.constexpr,
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
    if SHARED:
        first = tl.load(shared + row)
    begin = first + split * split_chunk(length - first, splits, SPLIT_MIN, BLOCK)
    end = begin + split_chunk(length - first, splits, SPLIT_MIN, BLOCK)
    end = tl.minimum(end, length)
    if begin >= end and split > 0:
        return
    member = tl.arange(0, ROWS)
    at = tl.arange(0, WIDE)
    key = tl.arange(0, BLOCK)
    own = (member < G)[:, None] & (at < D)[None, :]
    q_head = head * G + member
    query = tl.load(q + (row * HKV * G + q_head[:, None]) * D + at[None, :], mask=own, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(begin, end, BLOCK):
        spot = start + key
        seen = spot < end
        keys, values = block(k_pool, v_pool, table, spot, seen, head, at, HKV, D, PAGE)
        peak, total, mixed = attend(
            query, keys, values, seen[None, :], scale, softcap, peak, total, mixed, CAP
        )
    safe = tl.where(total > 0.0, total, 1.0)
    mixed = mixed / safe[:, None] * v_scale
    if not SHARED and splits_used(length - first, splits, SPLIT_MIN) == 1:
        tl.store(out + (row * HKV * G + q_head[:, None]) * D + at[None, :], mixed, mask=own)
    else:
        lse = tl.where(total > 0.0, peak + tl.log2(safe), float("-inf"))
        place = (row * HKV * G + q_head) * slots + split
        tl.store(part + place[:, None] * D + at[None, :], mixed, mask=own)
        tl.store(part_lse + place, lse, mask=member < G)


@triton.jit(do_not_specialize=["rows", "splits", "slots"])
def shared_kernel(
    q,  # [R, HKV * G, D]
    k_pool,
    v_pool,
    page_table,
    shared,  # int32 [R]: 0, or the length
    source,  # int32 [2]: row of the page table, length
    part,  # float32 [R, HKV * G, slots, D]; those from `splits` on are written
    part_lse,
    scale,
    v_scale,
    softcap,
    pages_max,
    rows,
    splits,
    slots,
    HKV: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,  # a power of two >= G
    TILE: tl.constexpr,  # rows of one program
    D: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    SHARES: tl.constexpr,  # splits of the shared keys
    PDL: tl.constexpr,
):
    """Keys at the start of many rows, read once for a tile of them."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    length = tl.load(source + 1)
    chunk = tl.cdiv(tl.cdiv(length, SHARES), BLOCK) * BLOCK
    begin = split * chunk
    end = tl.minimum(begin + chunk, length)
    if begin >= end:
        return
    table = page_table + tl.load(source).to(tl.int64) * pages_max
    nth = tl.arange(0, TILE * GROUP)
    at = tl.arange(0, WIDE)
    key = tl.arange(0, BLOCK)
    row = (tile * TILE + nth // GROUP).to(tl.int64)
    sharing = tl.load(shared + row, mask=row < rows, other=0) > 0
    valid = sharing & (nth % GROUP < G)
    own = valid[:, None] & (at < D)[None, :]
    place_q = row * HKV * G + head * G + nth % GROUP
    query = tl.load(q + place_q[:, None] * D + at[None, :], mask=own, other=0.0)
    peak = tl.full([TILE * GROUP], float("-inf"), tl.float32)
    total = tl.zeros([TILE * GROUP], tl.float32)
    mixed = tl.zeros([TILE * GROUP, WIDE], tl.float32)
    for start in range(begin, end, BLOCK):
        spot = start + key
        seen = spot < end
        keys, values = block(k_pool, v_pool, table, spot, seen, head, at, HKV, D, PAGE)
        peak, total, mixed = attend(
            query, keys, values, seen[None, :], scale, softcap, peak, total, mixed, CAP
        )
    place = place_q * slots + splits + split
    tl.store(part + place[:, None] * D + at[None, :], mixed / total[:, None] * v_scale, mask=own)
    tl.store(part_lse + place, peak + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["splits", "slots"])
def combine_kernel(
    part,  # float32 [R, HQ, slots, D]
    part_lse,  # float32 [R, HQ, slots]
    kv_len,  # int32 [R]
    shared,
    source,
    out,  # [R, HQ, D]
    splits,
    slots,
    HQ: tl.constexpr,
    EACH: tl.constexpr,  # heads of one program
    D: tl.constexpr,
    WIDE: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two >= slots
    BLOCK: tl.constexpr,
    SPLIT_MIN: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    length = tl.load(kv_len + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if SHARED:
        first = tl.load(shared + row)
    if not SHARED and splits_used(length - first, splits, SPLIT_MIN) == 1:
        return  # it is there already
    chunk = split_chunk(length - first, splits, SPLIT_MIN, BLOCK)
    nth = tl.arange(0, SLOTS)
    at = tl.arange(0, WIDE)
    used = (nth < splits) & ((first + nth * chunk < length) | (nth == 0))
    if SHARED:
        common = tl.cdiv(tl.cdiv(tl.load(source + 1), SHARES), BLOCK) * BLOCK
        used = used | ((nth >= splits) & (nth < slots) & ((nth - splits) * common < first))
    for member in tl.static_range(EACH):
        head = tl.program_id(1) * EACH + member
        place = (row * HQ + head) * slots + nth
        lse = tl.load(part_lse + place, mask=used, other=float("-inf"))
        peak = tl.maximum(tl.max(lse, 0), -1e30)
        weight = tl.exp2(lse - peak)
        load = used[:, None] & (at < D)[None, :]
        parts = tl.load(part + place[:, None] * D + at[None, :], mask=load, other=0.0)
        mixed = tl.sum(parts * weight[:, None], 0) / tl.maximum(tl.sum(weight, 0), 1e-30)
        tl.store(out + (row * HQ + head) * D + at, mixed, mask=at < D)


@triton.jit(do_not_specialize_on_alignment=["table_rows", "query_start", "kv_len"])
def prefill_kernel(
    q,  # [T, HQ, D]
    k_pool,
    v_pool,
    page_table,
    table_rows,  # int32 [R]
    query_start,  # int32 [R + 1]
    kv_len,  # int32 [R]
    out,  # [T, HQ, D]
    scale,  # as those of `decode_kernel`
    v_scale,
    softcap,
    pages_max,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,  # queries
    BLOCK: tl.constexpr,  # keys
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    # The longest tiles first: those at the end of their rows see the most keys.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    if tile * TILE >= count:
        return
    length = tl.load(kv_len + row)
    table = page_table + tl.load(table_rows + row).to(tl.int64) * pages_max
    nth = tile * TILE + tl.arange(0, TILE)
    at = tl.arange(0, WIDE)
    key = tl.arange(0, BLOCK)
    own = (nth < count)[:, None] & (at < D)[None, :]
    place_q = ((start + nth).to(tl.int64)[:, None] * (HKV * G) + head) * D + at[None, :]
    query = tl.load(q + place_q, mask=own, other=0.0)
    position = length - count + nth
    end = tl.minimum(length - count + (tile + 1) * TILE, length)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - count + tile * TILE - WINDOW + 1, 0) // BLOCK * BLOCK
    peak = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, WIDE], tl.float32)
    for first in range(begin, end, BLOCK):
        spot = first + key
        there = spot < end
        keys, values = block(k_pool, v_pool, table, spot, there, head // G, at, HKV, D, PAGE)
        seen = spot[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (spot[None, :] > position[:, None] - WINDOW)
        peak, total, mixed = attend(
            query, keys, values, seen, scale, softcap, peak, total, mixed, CAP
        )
    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None] * v_scale
    tl.store(out + place_q, mixed, mask=own)


@triton.jit(do_not_specialize_on_alignment=["table_rows"])
def gather_kernel(
    k_pool,  # [rows, WIDTH]
    v_pool,
    page_table,
    table_rows,  # int32 [R]
    kv_start,  # int32 [R + 1]
    k_out,  # [kv_start[R], WIDTH]
    v_out,
    k_scale,  # of pools narrower than the results
    v_scale,
    pages_max,
    WIDTH: tl.constexpr,  # HKV * D
    WIDE: tl.constexpr,  # a power of two >= WIDTH
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys and values of rows, one after the other."""
    row, block = tl.program_id(0), tl.program_id(1)
    start = tl.load(kv_start + row)
    spot = block * BLOCK + tl.arange(0, BLOCK)
    there = spot < tl.load(kv_start + row + 1) - start
    table = page_table + tl.load(table_rows + row).to(tl.int64) * pages_max
    page = tl.load(table + spot // PAGE, mask=there, other=0).to(tl.int64)
    at = tl.arange(0, WIDE)
    mask = there[:, None] & (at < WIDTH)[None, :]
    source = (page * PAGE + spot % PAGE)[:, None] * WIDTH + at[None, :]
    target = (start + spot).to(tl.int64)[:, None] * WIDTH + at[None, :]
    keys = tl.load(k_pool + source, mask=mask, other=0.0)
    values = tl.load(v_pool + source, mask=mask, other=0.0)
    if k_pool.dtype.element_ty != k_out.dtype.element_ty:
        keys, values = keys.to(tl.float32) * k_scale, values.to(tl.float32) * v_scale
    tl.store(k_out + target, keys, mask=mask)
    tl.store(v_out + target, values, mask=mask)
