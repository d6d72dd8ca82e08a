# mypy: ignore-errors
"""This file is the kernels whose sums have one order whatever else is in the call: products of
matrices, and attention over pages for decode rows and prompts alike.

A sum is cut at fixed places (`SPLIT` keys, `CHUNK` columns) counted from the beginning, each piece
is summed by itself, and pieces are added one after the other. Who adds them is free: the program
that has computed them, or a second kernel where more programs are wanted; the bits are the same.
What joins pieces is made of sums and explicit fused products, of which a compiler can make one
thing only. It does not know models or plans.

Law: a row's result depends on that row, its keys and the launch's constants alone. It rests on the
matrix units treating all rows of a tile alike, which `tests/kernels/gpu/test_fixed.py` looks at.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.triton.attend import attend, block

NOTHING = tl.constexpr(-1e30)  # the peak of no keys


@triton.jit(do_not_specialize=["M", "each"])
def linear_fixed_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N]; unused without BIAS
    out,  # [M, N]
    part,  # float32 [SPLITS, M, N]; written instead of `out` where `each` is less than SPLITS
    M,
    N,
    each,  # pieces of one program: all of them, or 1
    K: tl.constexpr,
    CHUNK: tl.constexpr,  # columns of a piece
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    SWATH: tl.constexpr,  # tiles of rows that follow each other, so that weights stay in the cache
):
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    nth = tl.program_id(0)
    swath = nth // (SWATH * columns)
    height = tl.minimum(rows - swath * SWATH, SWATH)
    within = nth - swath * SWATH * columns
    m = (swath * SWATH + within % height) * BM + tl.arange(0, BM)
    n = within // height * BN + tl.arange(0, BN)
    at = tl.arange(0, BK)
    x_row = x + m.to(tl.int64)[:, None] * K + at[None, :]
    w_row = weight + n.to(tl.int64)[:, None] * K + at[None, :]
    EXACT: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
    first = tl.program_id(1) * each
    total = tl.zeros([BM, BN], tl.float32)
    for split in range(first, first + each):
        piece = tl.zeros([BM, BN], tl.float32)
        for begin in range(split * CHUNK, tl.minimum((split + 1) * CHUNK, K), BK):
            inside = (begin + at < K)[None, :]
            a = tl.load(x_row + begin, mask=(m < M)[:, None] & inside, other=0.0)
            b = tl.load(w_row + begin, mask=(n < N)[:, None] & inside, other=0.0)
            piece = tl.dot(a, tl.trans(b), piece, input_precision=EXACT)
        total += piece
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    valid = (m < M)[:, None] & (n < N)[None, :]
    if each == SPLITS:
        if BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out + place, total, mask=valid)
    else:
        tl.store(part + first.to(tl.int64) * M * N + place, total, mask=valid)


@triton.jit(do_not_specialize=["M"])
def linear_sum_kernel(
    part,  # float32 [SPLITS, M, N]
    bias,  # [N]
    out,  # [M, N]
    M,
    N,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = M.to(tl.int64) * N
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(part + split * count + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total, mask=inside)


@triton.jit
def join(peak, total, mixed, next_peak, next_total, next_mixed):
    """Softmax over keys and over the keys that follow them."""
    higher = tl.maximum(peak, next_peak)
    left, right = tl.exp2(peak - higher), tl.exp2(next_peak - higher)
    total = tl.fma(total, left, next_total * right)
    wide_left = tl.broadcast_to(left[:, None], mixed.shape)
    mixed = tl.fma(mixed, wide_left, next_mixed * right[:, None])
    return higher, total, mixed


@triton.jit(
    do_not_specialize=["each", "slots"],
    do_not_specialize_on_alignment=["table_rows", "query_start", "kv_len"],
)
def attend_fixed_kernel(
    q,  # [T, HKV * G, D]
    k_pool,  # [rows, HKV, D]
    v_pool,
    page_table,  # int32 [.., pages_max]
    table_rows,  # int32 [R]
    query_start,  # int32 [R + 1]
    kv_len,  # int32 [R]
    part,  # float32 [R, HKV * G, slots, D]; for rows of one query of which `each` splits aren't all
    state,  # float32 [R, HKV * G, slots, 2]: peak and total
    out,  # [T, HKV * G, D]
    scale,  # times log2(e), and what keys are to be multiplied with
    v_scale,  # what values are to be multiplied with
    softcap,  # times log2(e)
    pages_max,
    each,  # splits of one program
    slots,  # splits that there is room for in `part`
    HKV: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,  # a power of two >= G
    TILE: tl.constexpr,  # queries
    D: tl.constexpr,
    WIDE: tl.constexpr,  # a power of two >= D
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,  # keys of one product
    SPLIT: tl.constexpr,  # keys
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    # The longest tiles first: those at the end of their rows see the most keys.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1) % HKV
    row = tl.program_id(2).to(tl.int64)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    if tile * TILE >= count:
        return
    length = tl.load(kv_len + row)
    tile_end = tl.minimum(length - count + (tile + 1) * TILE, length)
    tile_begin = 0
    if WINDOW > 0:
        tile_begin = tl.maximum(length - count + tile * TILE - WINDOW + 1, 0) // BLOCK * BLOCK
    first = tl.maximum(tl.program_id(1) // HKV * each, tile_begin // SPLIT)
    last = tl.minimum((tl.program_id(1) // HKV + 1) * each, tl.cdiv(tile_end, SPLIT))
    alone = tl.cdiv(tile_end, SPLIT) - tile_begin // SPLIT <= each
    if (first >= last) & ((tile_end > 0) | (tl.program_id(1) >= HKV)):
        return  # what is left are rows of padding, which get zeros
    table = page_table + tl.load(table_rows + row).to(tl.int64) * pages_max
    nth = tl.arange(0, TILE * GROUP)
    token = tile * TILE + nth // GROUP
    at = tl.arange(0, WIDE)
    key = tl.arange(0, BLOCK)
    valid = (token < count) & (nth % GROUP < G)
    own = valid[:, None] & (at < D)[None, :]
    q_head = head * G + nth % GROUP
    place_q = ((start + token).to(tl.int64) * (HKV * G) + q_head)[:, None] * D + at[None, :]
    query = tl.load(q + place_q, mask=own, other=0.0)
    position = length - count + token
    peak = tl.full([TILE * GROUP], NOTHING, tl.float32)
    total = tl.zeros([TILE * GROUP], tl.float32)
    mixed = tl.zeros([TILE * GROUP, WIDE], tl.float32)
    for split in range(first, last):
        own_peak = tl.full([TILE * GROUP], NOTHING, tl.float32)
        own_total = tl.zeros([TILE * GROUP], tl.float32)
        own_mixed = tl.zeros([TILE * GROUP, WIDE], tl.float32)
        begin = tl.maximum(split * SPLIT, tile_begin)
        end = tl.minimum((split + 1) * SPLIT, tile_end)
        for at_key in range(begin, end, BLOCK):
            spot = at_key + key
            there = spot < end
            keys, values = block(k_pool, v_pool, table, spot, there, head, at, HKV, D, PAGE)
            seen = spot[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (spot[None, :] > position[:, None] - WINDOW)
            own_peak, own_total, own_mixed = attend(
                query, keys, values, seen, scale, softcap, own_peak, own_total, own_mixed, CAP
            )
        peak, total, mixed = join(peak, total, mixed, own_peak, own_total, own_mixed)
    if alone:
        mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None] * v_scale
        tl.store(out + place_q, mixed, mask=own)
    else:
        place = (row * (HKV * G) + q_head) * slots + first
        tl.store(part + place[:, None] * D + at[None, :], mixed, mask=own)
        tl.store(state + place * 2, peak, mask=valid)
        tl.store(state + place * 2 + 1, total, mask=valid)


@triton.jit(do_not_specialize=["each", "slots"])
def join_fixed_kernel(
    part,  # float32 [R, HQ, slots, D]
    state,  # float32 [R, HQ, slots, 2]
    kv_len,  # int32 [R]
    out,  # [R, HQ, D]
    v_scale,
    each,
    slots,
    HQ: tl.constexpr,
    G: tl.constexpr,  # heads of one program
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Rows of one query whose keys several programs have seen to."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(kv_len + row)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK
    first, last = begin // SPLIT, tl.cdiv(length, SPLIT)
    if last - first <= each:
        return  # it is there already
    member = tl.arange(0, GROUP)
    head = tl.program_id(1) * G + member
    at = tl.arange(0, WIDE)
    own = (member < G)[:, None] & (at < D)[None, :]
    peak = tl.full([GROUP], NOTHING, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    mixed = tl.zeros([GROUP, WIDE], tl.float32)
    for split in range(first, last):
        place = (row * HQ + head) * slots + split
        next_peak = tl.load(state + place * 2, mask=member < G, other=NOTHING)
        next_total = tl.load(state + place * 2 + 1, mask=member < G, other=0.0)
        next_mixed = tl.load(part + place[:, None] * D + at[None, :], mask=own, other=0.0)
        peak, total, mixed = join(peak, total, mixed, next_peak, next_total, next_mixed)
    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None] * v_scale
    tl.store(out + (row * HQ + head)[:, None] * D + at[None, :], mixed, mask=own)
