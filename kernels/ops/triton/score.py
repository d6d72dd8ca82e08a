# mypy: ignore-errors
"""This file finds log-probabilities on the device: of the token that a row got, and of the most
likely ones, from the values that were there before penalties and filters.

Pieces of the vocabulary give their sums and their largest values, which are then put together. A
value and its id are one integer, so that the larger value comes first and of equal ones the lower
id. It does not know who asked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.triton.rows import order_of, piece_of, value_of

LOW = tl.constexpr(0x7FFFFFFF)  # of a key, what is its id turned round
NOTHING = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def rank_kernel(
    logits,  # float32 [S, vocab]
    rows,  # int32 [A]
    wanted,  # int32 [A]: how many of the largest, up to TOP
    peak,  # float32 [A, pieces], written as all that follow
    mass,  # float32 [A, pieces]: sum of exp(value - peak)
    found,  # int64 [A, pieces, TOP]: the largest of each piece, in order
    vocab,
    pieces,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    nth = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows + nth).to(tl.int64)
    at, value = piece_of(logits + row * vocab, piece, vocab, BLOCK)
    value = tl.where(value == value, value, float("-inf"))
    value = tl.where(value == 0.0, 0.0, value)  # of either sign
    top = tl.max(value, 0)
    near = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    place = nth.to(tl.int64) * pieces + piece
    tl.store(peak + place, top)
    tl.store(mass + place, tl.sum(tl.exp(value - near), 0))
    key = (order_of(value).to(tl.int64) << 32) | (at ^ LOW).to(tl.int64)
    key = tl.where(at < vocab, key, NOTHING)
    for rank in range(0, tl.load(wanted + nth)):
        best = tl.max(key, 0)
        tl.store(found + place * TOP + rank, best)
        key = tl.where(key == best, NOTHING, key)


@triton.jit
def merge_kernel(
    logits,
    rows,
    wanted,
    peak,
    mass,
    found,
    result,  # int32 [2, ..]: the token that each row got
    out,  # int32 [A, 1 + 2 * TOP]: its log-probability, those of the largest, and their ids
    vocab,
    pieces,
    TOP: tl.constexpr,
    PIECES: tl.constexpr,  # a power of two >= pieces
    FOUND: tl.constexpr,  # a power of two >= pieces * TOP
):
    nth = tl.program_id(0)
    row = tl.load(rows + nth).to(tl.int64)
    count = tl.load(wanted + nth)
    first = nth.to(tl.int64) * pieces
    piece = tl.arange(0, PIECES)
    inside = piece < pieces
    tops = tl.load(peak + first + piece, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    near = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    masses = tl.load(mass + first + piece, mask=inside, other=0.0)
    total = tl.sum(tl.where(tops < float("inf"), masses * tl.exp(tops - near), 0.0), 0)
    scale = tl.log(tl.maximum(total, 1e-30))
    place = out + nth.to(tl.int64) * (1 + 2 * TOP)
    token = tl.load(result + row)
    own = tl.load(logits + row * vocab + token) - near - scale
    tl.store(place, own.to(tl.int32, bitcast=True))
    at = tl.arange(0, FOUND)
    real = (at < pieces * TOP) & (at % TOP < count)
    key = tl.load(found + first * TOP + at, mask=real, other=NOTHING)
    for rank in range(0, count):
        best = tl.max(key, 0)
        value = value_of((best >> 32).to(tl.int32))
        score = value - near - scale
        tl.store(place + 1 + rank, score.to(tl.int32, bitcast=True))
        tl.store(place + 1 + TOP + rank, ((best & LOW) ^ LOW).to(tl.int32))
        key = tl.where(key == best, NOTHING, key)
