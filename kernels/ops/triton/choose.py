# mypy: ignore-errors
"""This file chooses tokens on the device for rows that ask for more than `pick.py` can: penalties,
added and barred tokens, top-k, top-p, min-p.

Rows that change their logits get a copy, which is edited; `source` says of each row where its
values lie: s >= 0 is row s of the logits, s < 0 row -1 - s of the copies. `narrow.py` says what
filters leave of a row; a draw goes by pieces of the vocabulary as in `pick.py`. It does not know
slots or what was asked for, only what that comes to.

Law: the order of every sum is the vocabulary's, so that a row's token depends on its values, limits
and noise alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.triton.rows import piece_of, row_of


@triton.jit
def clear_kernel(
    table,  # int32 [slots, vocab]
    slots,  # int32 [R]
    vocab,
    BLOCK: tl.constexpr,
):
    """Forgets what the slots' tenants before have said."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(table + slot * vocab + at, tl.zeros([BLOCK], tl.int32), mask=at < vocab)


@triton.jit(do_not_specialize=["count"])
def mark_kernel(
    table,  # int32 [slots, vocab]: 1 for a token of the prompt, 2 for each time it was generated
    slots,  # int32 [N]
    marks,  # int32 [N]: twice the token, and 1 if it was generated
    count,  # N
    vocab,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    slot = tl.load(slots + at, mask=inside, other=0).to(tl.int64)
    mark = tl.load(marks + at, mask=inside, other=0)
    place = table + slot * vocab + (mark >> 1)
    generated = (mark & 1) != 0
    tl.atomic_add(place, tl.full([BLOCK], 2, tl.int32), mask=inside & generated)
    tl.atomic_or(place, tl.full([BLOCK], 1, tl.int32), mask=inside & (generated == 0))


@triton.jit
def edit_kernel(
    logits,  # float32 [S, vocab]
    edited,  # float32 [E or more, vocab]
    table,  # see `mark_kernel`
    origin,  # int32 [E]: rows of the logits
    slots,  # int32 [E]: whose tokens are penalized; negative: none
    repetition,  # float32 [E]
    frequency,
    presence,
    twin,  # int32 [E]: the row of `edited` that gets what is allowed; negative: none
    empty,  # int32 [E]: 1 where that row begins with nothing
    vocab,
    BLOCK: tl.constexpr,
):
    """Copies rows, with the penalties of what they have said."""
    nth = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    row = tl.load(origin + nth).to(tl.int64)
    value = tl.load(logits + row * vocab + at, mask=inside, other=float("-inf"))
    slot = tl.load(slots + nth).to(tl.int64)
    if slot >= 0:
        said = tl.load(table + slot * vocab + at, mask=inside, other=0)
        factor = tl.load(repetition + nth)
        scaled = tl.where(value > 0.0, value / factor, value * factor)
        value = tl.where(said != 0, scaled, value)
        count = said >> 1
        value -= count.to(tl.float32) * tl.load(frequency + nth)
        value -= tl.where(count > 0, tl.load(presence + nth), 0.0)
    tl.store(edited + nth * vocab + at, value, mask=inside)
    other = tl.load(twin + nth).to(tl.int64)
    if other >= 0:
        begins_empty = tl.load(empty + nth) != 0
        value = tl.where(begins_empty, float("-inf"), value)
        tl.store(edited + other * vocab + at, value, mask=inside)


@triton.jit
def alter_kernel(
    edited,  # float32 [.., vocab]
    twin,  # int32 [E]
    starts,  # int32 [E + 1]: where the entries of each row begin
    entries,  # int32: twice the token, and 1 if it is allowed; a row names no token twice
    added,  # float32: what the token's value is raised by
    vocab,
    BLOCK: tl.constexpr,
):
    """Adds to single tokens of a copied row; into its twin goes what is allowed."""
    nth = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + nth)
    last = tl.load(starts + nth + 1)
    row = edited + nth * vocab
    other = tl.load(twin + nth).to(tl.int64)
    for begin in range(first, last, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < last
        entry = tl.load(entries + at, mask=inside, other=0)
        token = entry >> 1
        value = tl.load(row + token, mask=inside, other=0.0)
        value += tl.load(added + at, mask=inside, other=0.0)
        tl.store(row + token, value, mask=inside)
        allowed = tl.where((entry & 1) != 0, value, float("-inf"))
        tl.store(edited + other * vocab + token, allowed, mask=inside & (other >= 0))


@triton.jit
def prefer_kernel(
    edited,
    source,  # int32 [D]
    rows,  # int32 [R]: those of the D that have a twin
    twins,  # int32 [R]
    vocab,
    BLOCK: tl.constexpr,
):
    """A row is taken from its twin where that has anything left."""
    nth = tl.program_id(0)
    twin = tl.load(twins + nth)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(
            edited + twin.to(tl.int64) * vocab + at, mask=at < vocab, other=float("-inf")
        )
        top = tl.maximum(top, value)
    place = source + tl.load(rows + nth)
    tl.store(place, -1 - twin, mask=tl.max(top, 0) > float("-inf"))


@triton.jit
def peak_kernel(
    logits,
    edited,
    source,  # int32 [D]
    peak,  # float32 [D, pieces], written
    best,  # int32 [D, pieces], written: where the piece's peak stands
    vocab,
    pieces,
    BLOCK: tl.constexpr,
):
    nth = tl.program_id(0)
    piece = tl.program_id(1)
    row = row_of(logits, edited, source + nth, vocab)
    at, value = piece_of(row, piece, vocab, BLOCK)
    value = tl.where(value == value, value, float("-inf"))
    top = tl.max(value, 0)
    place = nth.to(tl.int64) * pieces + piece
    tl.store(peak + place, top)
    tl.store(best + place, tl.min(tl.where((value == top) & (at < vocab), at, 2147483647), 0))


@triton.jit
def weigh_kernel(
    logits,
    edited,
    source,  # int32 [D]
    temperature,  # float32 [D]; 0: greedy
    edge,  # float32 [D]
    peak,  # float32 [D, pieces]
    mass,  # float32 [D, pieces], written: of what is above the edge, in weights of the peak
    equal,  # int32 [D, pieces], written: how many values are on the edge
    vocab,
    pieces,
    BLOCK: tl.constexpr,
):
    nth = tl.program_id(0)
    piece = tl.program_id(1)
    row = row_of(logits, edited, source + nth, vocab)
    heat = tl.load(temperature + nth)
    least = tl.load(edge + nth)
    _, value = piece_of(row, piece, vocab, BLOCK)
    place = nth.to(tl.int64) * pieces + piece
    top = tl.load(peak + place)
    near = tl.where(top > float("-inf"), top, 0.0)
    weight = tl.exp((value - near) * (1.0 / tl.maximum(heat, 1e-6)))
    weight = tl.where(value > least, weight, 0.0)
    ties = (value == least) & (value > float("-inf"))
    tl.store(mass + place, tl.sum(weight, 0))
    tl.store(equal + place, tl.sum(ties.to(tl.int32), 0))


@triton.jit(do_not_specialize=["width"])
def choose_kernel(
    logits,
    edited,
    source,  # int32 [D]
    temperature,  # float32 [D]; 0: greedy
    noise,  # float32 [D], in [0, 1)
    edge,  # float32 [D]
    room,  # int32 [D]
    peak,
    best,
    mass,
    equal,
    columns,  # int32 [D]: of `result`
    slots,  # int32 [D]
    counted,  # int32 [D]: 1 where the table counts what the row says
    table,  # see `mark_kernel`
    last_token,  # int32 [slot_count]
    result,  # int32 [2, width]: tokens; 1 where the row has failed, and keeps what it has
    vocab,
    pieces,
    width,
    PIECES: tl.constexpr,  # a power of two >= pieces
    BLOCK: tl.constexpr,
):
    row_nth = tl.program_id(0)
    row = row_of(logits, edited, source + row_nth, vocab)
    nth = tl.arange(0, PIECES)
    inside = nth < pieces
    place = row_nth.to(tl.int64) * pieces + nth
    tops = tl.load(peak + place, mask=inside, other=float("-inf"))
    where = tl.load(best + place, mask=inside, other=2147483647)
    top = tl.max(tops, 0)
    token = tl.min(tl.where(tops == top, where, 2147483647), 0)
    heat = tl.load(temperature + row_nth)
    if (heat > 0.0) & (top > float("-inf")) & (top < float("inf")):
        cold = 1.0 / tl.maximum(heat, 1e-6)
        least = tl.load(edge + row_nth)
        kept = tl.load(room + row_nth)
        tied = tl.load(equal + place, mask=inside, other=0)
        tied_before = tl.cumsum(tied, 0) - tied
        tied_kept = tl.minimum(tl.maximum(kept - tied_before, 0), tied)
        on_edge = tl.exp((least - top) * cold)
        masses = tl.load(mass + place, mask=inside, other=0.0)
        scaled = masses * tl.exp((tops - top) * cold) + tied_kept.to(tl.float32) * on_edge
        through = tl.cumsum(scaled, 0)
        target = tl.load(noise + row_nth) * tl.sum(scaled, 0)
        # The first piece whose end lies past the target; rounding may leave none: the last one
        # that weighs anything.
        last = tl.max(tl.where(scaled > 0.0, nth, 0), 0)
        chosen = tl.min(tl.where((through > target) & (scaled > 0.0), nth, last), 0)
        before = tl.sum(tl.where(nth < chosen, scaled, 0.0), 0)
        ahead = tl.sum(tl.where(nth < chosen, tied, 0), 0)
        at, value = piece_of(row, chosen, vocab, BLOCK)
        ties = ((value == least) & (value > float("-inf"))).to(tl.int32)
        rank = ahead + tl.cumsum(ties, 0) - ties
        stays = (value > least) | ((ties > 0) & (rank < kept))
        weight = tl.where(stays, tl.exp((value - top) * cold), 0.0)
        within = before + tl.cumsum(weight, 0)
        last = tl.max(tl.where(weight > 0.0, at, 0), 0)
        token = tl.min(tl.where((within > target) & (weight > 0.0), at, last), 0)
    column = tl.load(columns + row_nth)
    failed = tl.load(result + width + column) != 0
    slot = tl.load(slots + row_nth).to(tl.int64)
    tl.store(result + column, token, mask=failed == 0)
    tl.store(last_token + slot, token, mask=failed == 0)
    count = (tl.load(counted + row_nth) != 0) & (failed == 0)
    tl.atomic_add(table + slot * vocab + token, 2, mask=count)
