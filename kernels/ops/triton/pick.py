# mypy: ignore-errors
"""This file picks tokens on the device: the largest logit, or a draw at a temperature.

Two kernels: one reduces pieces of the vocabulary, the other picks the piece and then the token. A
draw inverts the cumulative distribution in order of ids at one given number of [0, 1), as
`kernels.ops.sampling` does. It does not know filters, penalties or log-probabilities.

Laws: among equals the lowest id wins; a row with a logit that is no number fails alone; a row's
token depends on its logits, temperature and number alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pick_pieces_kernel(
    logits,  # float32 [S, vocab]
    temperature,  # float32 [S]; 0: greedy
    peak,  # float32 [S, pieces]
    best,  # int32 [S, pieces]: where the piece's peak stands
    mass,  # float32 [S, pieces]: sum of exp((logit - peak) / temperature)
    vocab,
    pieces,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    heat = tl.load(temperature + row)
    value = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
    # A NaN makes the piece's peak NaN whatever maxnum says: its weight is counted apart.
    bad = tl.sum((value != value).to(tl.int32), 0) > 0
    value = tl.where(value == value, value, float("-inf"))
    top = tl.max(value, 0)
    where = tl.min(tl.where(value == top, at, 2147483647), 0)
    weight = tl.where(value == float("-inf"), 0.0, tl.exp((value - top) / tl.maximum(heat, 1e-6)))
    tl.store(peak + row * pieces + piece, tl.where(bad, float("nan"), top))
    tl.store(best + row * pieces + piece, where)
    tl.store(mass + row * pieces + piece, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["count"])
def pick_kernel(
    logits,  # float32 [S, vocab]
    temperature,  # float32 [S]
    noise,  # float32 [S], in [0, 1)
    peak,
    best,
    mass,
    slots,  # int32 [S]; negative: padding
    last_token,  # int32 [slot_count]
    result,  # int32 [2, S]: tokens, then 1 where the row failed
    vocab,
    pieces,
    count,  # S
    PIECES: tl.constexpr,  # a power of two >= pieces
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    nth = tl.arange(0, PIECES)
    inside = nth < pieces
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tops = tl.load(peak + row * pieces + nth, mask=inside, other=float("-inf"))
    bad = tl.sum((tops != tops).to(tl.int32), 0) > 0
    tops = tl.where(tops == tops, tops, float("-inf"))
    top = tl.max(tops, 0)
    failed = bad | (top == float("-inf")) | (top == float("inf"))
    heat = tl.load(temperature + row)
    where = tl.load(best + row * pieces + nth, mask=inside, other=2147483647)
    token = tl.min(tl.where(tops == top, where, 2147483647), 0)
    if (heat > 0.0) & (~failed):
        masses = tl.load(mass + row * pieces + nth, mask=inside, other=0.0)
        scaled = tl.where(tops == float("-inf"), 0.0, masses * tl.exp((tops - top) / heat))
        through = tl.cumsum(scaled, 0)
        total = tl.sum(scaled, 0)
        target = tl.load(noise + row) * total
        # The first piece whose end lies past the target; rounding may leave none: the last one
        # that weighs anything.
        last = tl.max(tl.where(scaled > 0.0, nth, 0), 0)
        chosen = tl.min(tl.where((through > target) & (scaled > 0.0), nth, last), 0)
        before = tl.sum(tl.where(nth < chosen, scaled, 0.0), 0)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
        weight = tl.where(value == float("-inf"), 0.0, tl.exp((value - top) / heat))
        within = before + tl.cumsum(weight, 0)
        last = tl.max(tl.where(weight > 0.0, at, 0), 0)
        token = tl.min(tl.where((within > target) & (weight > 0.0), at, last), 0)
    token = tl.where(failed, 0, token)
    tl.store(result + row, token)
    tl.store(result + count + row, failed.to(tl.int32))
    slot = tl.load(slots + row)
    tl.store(last_token + slot, token, mask=slot >= 0)


@triton.jit(do_not_specialize=["count", "width"])
def stage_kernel(
    packed,  # int32 [.., width]: slot (negative: padding), position, page, id (negative: the last
    #          token), and what is not read here
    last_token,  # int32 [slot_count]
    page_table,  # int32 [slot_count, pages_max]
    ids,  # int64 [B]
    positions,  # int32 [B]
    kv_len,  # int32 [B]
    write_index,  # int64 [B]
    table_rows,  # int32 [B]
    count,  # B
    width,
    pages_max,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Makes the inputs of a decode step from what the host knows of it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    slot = tl.load(packed + at, mask=inside, other=-1)
    position = tl.load(packed + width + at, mask=inside, other=0)
    page = tl.load(packed + 2 * width + at, mask=inside, other=0)
    known = tl.load(packed + 3 * width + at, mask=inside, other=0)
    real = inside & (slot >= 0)
    made = tl.load(last_token + slot, mask=real & (known < 0), other=0)
    tl.store(ids + at, tl.where(known >= 0, known, made).to(tl.int64), mask=inside)
    tl.store(positions + at, position, mask=inside)
    tl.store(kv_len + at, tl.where(real, position + 1, 0), mask=inside)
    write = page.to(tl.int64) * PAGE + position % PAGE
    tl.store(write_index + at, tl.where(real, write, -1), mask=inside)
    tl.store(table_rows + at, tl.where(real, slot, 0), mask=inside)
    tl.store(page_table + slot.to(tl.int64) * pages_max + position // PAGE, page, mask=real)
