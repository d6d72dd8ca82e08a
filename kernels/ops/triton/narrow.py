# mypy: ignore-errors
"""This file finds on the device what the filters of a draw leave of a row: top-k, top-p, min-p.

Nothing is sorted. Programs for pieces of the vocabulary count and weigh what lies above a few fixed
pivots (`tally_kernel`), and gather the values between the two pivots that the cut lies between, in
order of ids (`gather_kernel`); one program a row then searches among these by pivots of its own
(`narrow_kernel`). What is left of a row is all above `edge`, and the first `room` of those equal to
it. A weight is e^((value - the largest) / temperature).

Laws: the order of every sum is the vocabulary's; among equals the lowest ids stay; whatever the
values are, the search ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.ops.triton.rows import order_of, piece_of, row_of, value_of

EVEN_PASSES = tl.constexpr(10)  # pivots by value; afterwards by the floats' own order, which ends
PASSES_MAX = tl.constexpr(40)


@triton.jit
def top_of(peak, pieces, PIECES: tl.constexpr):
    """A row's largest value, from its pieces'; 0 if that is not finite, and whether it is."""
    nth = tl.arange(0, PIECES)
    top = tl.max(tl.load(peak + nth, mask=nth < pieces, other=float("-inf")), 0)
    finite = (top > float("-inf")) & (top < float("inf"))
    return tl.where(finite, top, 0.0), finite


@triton.jit
def tally_kernel(
    logits,
    edited,
    source,  # int32 [D]
    rows,  # int32 [F]: those of the D that are filtered
    temperature,  # float32 [D], > 0
    peak,  # float32 [D, pieces]
    far,  # float32 [PIVOTS]: how many temperatures below the top, descending, the first SPAN
    pivots,  # float32 [F, PIVOTS], written as all that follow
    counts,  # int32 [F, pieces, PIVOTS]: how many values of the piece lie above each pivot
    masses,  # float32 [F, pieces, PIVOTS]: what these weigh
    vocab,
    pieces,
    PIVOTS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    nth = tl.program_id(0)
    piece = tl.program_id(1)
    own = tl.load(rows + nth)
    row = row_of(logits, edited, source + own, vocab)
    heat = tl.load(temperature + own)
    top, _ = top_of(peak + own.to(tl.int64) * pieces, pieces, PIECES)
    below = value_of(order_of(top) - 1)
    _, value = piece_of(row, piece, vocab, BLOCK)
    weight = tl.exp((value - top) * (1.0 / heat))
    place = (nth.to(tl.int64) * pieces + piece) * PIVOTS
    for index in tl.static_range(PIVOTS):
        pivot = tl.minimum(top - heat * tl.load(far + index), below)
        above = value > pivot
        tl.store(counts + place + index, tl.sum(above.to(tl.int32), 0))
        tl.store(masses + place + index, tl.sum(tl.where(above, weight, 0.0), 0))
        tl.store(pivots + nth * PIVOTS + index, pivot, mask=piece == 0)


@triton.jit
def sums_of(counts, masses, pieces, PIVOTS: tl.constexpr, PIECES: tl.constexpr):
    """int32 and float64 [PIVOTS]: how many values of a row lie above each pivot, and their mass."""
    piece = tl.arange(0, PIECES)[:, None]
    place = piece * PIVOTS + tl.arange(0, PIVOTS)[None, :]
    count = tl.load(counts + place, mask=piece < pieces, other=0)
    mass = tl.load(masses + place, mask=piece < pieces, other=0.0)
    return tl.sum(count, 0), tl.sum(mass.to(tl.float64), 0), count


@triton.jit
def entry(values, index, PIVOTS: tl.constexpr):
    """values[index], 0 past the end."""
    return tl.sum(tl.where(tl.arange(0, PIVOTS) == index, values, 0), 0)


@triton.jit
def gather_kernel(
    logits,
    edited,
    source,
    rows,
    top_k,  # int32 [D]; more than vocab: off
    top_p,  # float32 [D]; 1: off
    pivots,
    counts,
    masses,
    span,  # int32 [F, 4], written: the pivots between which the cut lies, how many values do
    found,  # float32 [F, vocab], written: these values
    vocab,
    pieces,
    PIVOTS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    nth = tl.program_id(0)
    piece = tl.program_id(1)
    own = tl.load(rows + nth)
    count_max = tl.load(top_k + own)
    share = tl.load(top_p + own).to(tl.float64)
    first = nth.to(tl.int64) * pieces * PIVOTS
    count, mass, each = sums_of(counts + first, masses + first, pieces, PIVOTS, PIECES)
    # How many pivots lie below the cut of top-k alone; what it leaves weighs between two masses.
    many = count >= count_max
    by_count = tl.sum(many.to(tl.int32), 0)
    total = entry(mass, 0, PIVOTS)
    mass_high = tl.where(by_count > 0, entry(mass, by_count - 1, PIVOTS), total)
    mass_low = tl.where(by_count > 0, entry(mass, by_count, PIVOTS), total)
    low = by_count - 1
    high = by_count
    if share < 1.0:
        # Below the cut of both, whatever top-k leaves; and those that may be.
        surely = tl.sum((many | (mass >= mass_high * share)).to(tl.int32), 0)
        maybe = tl.sum((many | (mass >= mass_low * share)).to(tl.int32), 0)
        low = tl.where(by_count > 0, tl.minimum(low, surely - 1), surely - 1)
        high = tl.maximum(high, tl.maximum(maybe, surely))
    low = tl.maximum(low, 0)
    # Past the last pivot there is the largest value. Without a cut nothing is looked for.
    some = (by_count > 0) | (share < 1.0)
    pivot_at = tl.arange(0, PIVOTS)
    under = tl.sum(tl.where(pivot_at[None, :] == low, each, 0), 1)
    over = tl.sum(tl.where(pivot_at[None, :] == high, each, 0), 1)
    inside = tl.where(some, under - over, 0)
    before = tl.sum(tl.where(tl.arange(0, PIECES) < piece, inside, 0), 0)
    tl.store(span + nth * 4, low, mask=piece == 0)
    tl.store(span + nth * 4 + 1, high, mask=piece == 0)
    tl.store(span + nth * 4 + 2, tl.sum(inside, 0), mask=piece == 0)
    if tl.sum(tl.where(tl.arange(0, PIECES) == piece, inside, 0), 0) > 0:
        least = tl.load(pivots + nth * PIVOTS + low)
        most = tl.load(pivots + nth * PIVOTS + high, mask=high < PIVOTS, other=float("inf"))
        row = row_of(logits, edited, source + own, vocab)
        _, value = piece_of(row, piece, vocab, BLOCK)
        taken = ((value > least) & (value <= most)).to(tl.int32)
        place = before + tl.cumsum(taken, 0) - taken
        tl.store(found + nth.to(tl.int64) * vocab + place, value, mask=taken != 0)


@triton.jit
def search(values, count, top, cold, low, high, t0, t1, t2, BLOCK: tl.constexpr):
    """Of the `count` values: how many lie above each of three pivots, and what they weigh; the
    least and the largest value in (low, high]."""
    c0 = tl.zeros([BLOCK], tl.int32)
    c1 = tl.zeros([BLOCK], tl.int32)
    c2 = tl.zeros([BLOCK], tl.int32)
    m0 = tl.zeros([BLOCK], tl.float32)
    m1 = tl.zeros([BLOCK], tl.float32)
    m2 = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        weight = tl.exp((value - top) * cold)
        c0 += (value > t0).to(tl.int32)
        c1 += (value > t1).to(tl.int32)
        c2 += (value > t2).to(tl.int32)
        m0 += tl.where(value > t0, weight, 0.0)
        m1 += tl.where(value > t1, weight, 0.0)
        m2 += tl.where(value > t2, weight, 0.0)
        least = tl.minimum(least, tl.where(value > low, value, float("inf")))
        most = tl.maximum(most, tl.where(value <= high, value, float("-inf")))
    return (
        tl.sum(c0, 0),
        tl.sum(c1, 0),
        tl.sum(c2, 0),
        tl.sum(m0.to(tl.float64), 0),
        tl.sum(m1.to(tl.float64), 0),
        tl.sum(m2.to(tl.float64), 0),
        tl.min(least, 0),
        tl.max(most, 0),
    )


@triton.jit
def narrow_kernel(
    rows,  # int32 [F]
    temperature,
    peak,
    top_k,
    top_p,
    min_p,  # float32 [D]; 0: off
    pivots,
    counts,
    masses,
    span,
    found,
    edge,  # float32 [D], written
    room,  # int32 [D], written
    vocab,
    pieces,
    PIVOTS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds what a row keeps. A value stays if fewer than top-k are above it, if they weigh less
    than top-p of what top-k leaves, and if it weighs min-p of the largest. Of equal values as many
    stay, from the first one on, as the same holds for."""
    nth = tl.program_id(0)
    own = tl.load(rows + nth)
    values = found + nth.to(tl.int64) * vocab
    heat = tl.load(temperature + own)
    cold = 1.0 / heat
    top, finite = top_of(peak + own.to(tl.int64) * pieces, pieces, PIECES)
    first = nth.to(tl.int64) * pieces * PIVOTS
    counted, weighed, each = sums_of(counts + first, masses + first, pieces, PIVOTS, PIECES)
    pivot = tl.load(pivots + nth * PIVOTS + tl.arange(0, PIVOTS))
    lowest = tl.load(span + nth * 4)
    highest = tl.load(span + nth * 4 + 1)
    total = tl.load(span + nth * 4 + 2)
    # What lies above all of the values that were gathered.
    count_over = entry(counted, highest, PIVOTS)
    mass_over = entry(weighed, highest, PIVOTS)
    floor = entry(pivot, 0, PIVOTS)
    everything = entry(weighed, 0, PIVOTS)
    count_max = tl.load(top_k + own)
    share = tl.load(top_p + own).to(tl.float64)
    cut = floor  # so far all that weigh anything stay
    kept = tl.full([], 0, tl.int32)
    mass = everything
    # First under top-k; then anew, under both limits. Without top-p the first search is enough.
    for stage in range(2):
        mass_max = tl.where((stage == 1) & (share < 1.0), mass * share, everything * 4.0)
        fails = (counted >= count_max) | (weighed >= mass_max)
        failing = tl.sum(fails.to(tl.int32), 0)
        if finite & (failing > 0) & (total > 0) & ((stage == 0) | (share < 1.0)):
            # A value stays that is equal to `high` or above; none that is `low` or below.
            upper = tl.maximum(tl.minimum(failing, highest), lowest + 1)
            high = tl.where(upper < PIVOTS, entry(pivot, upper, PIVOTS), top)
            high_count = entry(counted, upper, PIVOTS)
            high_mass = entry(weighed, upper, PIVOTS)
            low = entry(pivot, upper - 1, PIVOTS)
            low_count = entry(counted, upper - 1, PIVOTS)
            low_mass = entry(weighed, upper - 1, PIVOTS)
            tied = top
            passes = tl.full([], 0, tl.int32)
            searching = low_count - high_count > 1
            while searching:
                from_low = order_of(low).to(tl.int64)
                between = order_of(high).to(tl.int64) - from_low
                even = passes < EVEN_PASSES
                t0 = value_of((from_low + between // 4).to(tl.int32))
                t1 = value_of((from_low + between // 2).to(tl.int32))
                t2 = value_of((from_low + between * 3 // 4).to(tl.int32))
                t0 = tl.where(even, low * 0.75 + high * 0.25, t0)
                t1 = tl.where(even, low * 0.5 + high * 0.5, t1)
                t2 = tl.where(even, low * 0.25 + high * 0.75, t2)
                n0, n1, n2, w0, w1, w2, least, most = search(
                    values, total, top, cold, low, high, t0, t1, t2, BLOCK
                )
                n0, w0 = n0 + count_over, w0 + mass_over
                n1, w1 = n1 + count_over, w1 + mass_over
                n2, w2 = n2 + count_over, w2 + mass_over
                s0 = (n0 < count_max) & (w0 < mass_max)
                s1 = (n1 < count_max) & (w1 < mass_max)
                s2 = (n2 < count_max) & (w2 < mass_max)
                one = least >= most  # all that is left are equal
                tied = tl.where(one, most, tied)
                # The lowest pivot that stays is the new upper end, the next below it the lower.
                low_next = tl.where(s0, low, tl.where(s1, t0, tl.where(s2, t1, t2)))
                count_next = tl.where(s0, low_count, tl.where(s1, n0, tl.where(s2, n1, n2)))
                mass_next = tl.where(s0, low_mass, tl.where(s1, w0, tl.where(s2, w1, w2)))
                low = tl.where(one, low, low_next)
                low_count = tl.where(one, low_count, count_next)
                low_mass = tl.where(one, low_mass, mass_next)
                high_next = tl.where(s0, t0, tl.where(s1, t1, tl.where(s2, t2, high)))
                count_next = tl.where(s0, n0, tl.where(s1, n1, tl.where(s2, n2, high_count)))
                mass_next = tl.where(s0, w0, tl.where(s1, w1, tl.where(s2, w2, high_mass)))
                high = tl.where(one, high, high_next)
                high_count = tl.where(one, high_count, count_next)
                high_mass = tl.where(one, high_mass, mass_next)
                passes += 1
                searching = (low_count - high_count > 1) & (least < most) & (passes < PASSES_MAX)
            weight = tl.exp((tied - top) * cold).to(tl.float64)
            wanted = tl.minimum((mass_max - high_mass) / tl.maximum(weight, 1e-300), 1e9)
            some = tl.minimum(low_count - high_count, count_max - high_count)
            some = tl.maximum(tl.minimum(some, tl.ceil(wanted).to(tl.int32)), 1)
            single = low_count - high_count <= 1
            cut = tl.where(single, low, tied)
            kept = tl.where(single, 0, some)
            mass = tl.where(single, low_mass, high_mass + some * weight)
    least_share = tl.load(min_p + own)
    if finite & (least_share > 0.0):
        # The lowest value that weighs enough, by halves of the floats' order.
        under = order_of(floor).to(tl.int64)
        over = order_of(top).to(tl.int64)
        while over - under > 1:
            middle = (under + over) // 2
            weight = tl.exp((value_of(middle.to(tl.int32)) - top) * cold)
            enough = weight >= least_share
            over = tl.where(enough, middle, over)
            under = tl.where(enough, under, middle)
        bound = value_of(under.to(tl.int32))
        kept = tl.where(bound >= cut, 0, kept)
        cut = tl.maximum(bound, cut)
    tl.store(edge + own, tl.where(finite, cut, float("-inf")))
    tl.store(room + own, kept)
