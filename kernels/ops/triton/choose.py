# mypy: ignore-errors
"""This file chooses tokens on the device for rows that ask for more than `pick.py` can: penalties,
added and barred tokens, top-k, top-p, min-p.

Rows that change their logits get a copy, which is edited; `source` says of each row where its
values lie: s >= 0 is row s of the logits, s < 0 row -1 - s of the copies. `narrow_kernel` finds by
pivots what a row keeps: all above `edge`, and the first `room` of those equal to it. A draw then
goes by pieces of the vocabulary as in `pick.py`. It does not know slots or what was asked for, only
what that comes to.

Laws: nothing is sorted, and the order of every sum is the vocabulary's, so that a row's token
depends on its values, limits and noise alone; among equals the lowest ids stay; whatever the values
are, the search ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

SPAN = tl.constexpr(
    104.0
)  # e^-104 is 0 in float32: what lies further below the largest weighs nothing
EVEN_PASSES = tl.constexpr(10)  # pivots by value; afterwards by the floats' own order, which ends
PASSES_MAX = tl.constexpr(40)


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
def row_of(logits, edited, source, vocab):
    """Where a row's values lie."""
    row = tl.load(source).to(tl.int64)
    if row >= 0:
        place = logits + row * vocab
    else:
        place = edited + (-1 - row) * vocab
    return place


@triton.jit
def order_of(value):
    """int32 that are ordered as the floats are."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def tally(row, vocab, top, cold, low, high, t0, t1, t2, BLOCK: tl.constexpr):
    """How many values lie above each of three pivots, and what they weigh; the least and the
    largest value in (low, high]."""
    c0 = tl.zeros([BLOCK], tl.int32)
    c1 = tl.zeros([BLOCK], tl.int32)
    c2 = tl.zeros([BLOCK], tl.int32)
    m0 = tl.zeros([BLOCK], tl.float32)
    m1 = tl.zeros([BLOCK], tl.float32)
    m2 = tl.zeros([BLOCK], tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < vocab, other=float("-inf"))
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
    logits,
    edited,
    source,  # int32 [D], see above
    rows,  # int32 [F]: those of the D that are filtered
    temperature,  # float32 [D], > 0
    top_k,  # int32 [D]; more than vocab: off
    top_p,  # float32 [D]; 1: off
    min_p,  # float32 [D]; 0: off
    edge,  # float32 [D], written
    room,  # int32 [D], written
    vocab,
    BLOCK: tl.constexpr,
):
    """Finds what a row keeps. A value stays if fewer than top-k are above it, if they weigh less
    than top-p of what top-k leaves, and if it weighs min-p of the largest. Of equal values as many
    stay, from the first one on, as the same holds for."""
    nth = tl.load(rows + tl.program_id(0))
    row = row_of(logits, edited, source + nth, vocab)
    heat = tl.load(temperature + nth)
    cold = 1.0 / heat
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tops = tl.maximum(tops, tl.load(row + at, mask=at < vocab, other=float("-inf")))
    top = tl.max(tops, 0)
    finite = (top > float("-inf")) & (top < float("inf"))
    top = tl.where(finite, top, 0.0)
    below = value_of(order_of(top) - 1)
    floor = tl.minimum(top - heat * SPAN, below)
    first = tl.maximum(tl.minimum(top - heat * 12.0, below), floor)
    second = tl.maximum(tl.minimum(top - heat * 3.0, below), floor)
    c0, c1, c2, m0, m1, m2, least, most = tally(
        row, vocab, top, cold, floor, top, floor, first, second, BLOCK
    )
    count_max = tl.load(top_k + nth)
    share = tl.load(top_p + nth)
    everything = m0 * 4.0  # no limit
    cut = floor  # so far all that weigh anything stay
    kept = tl.full([], 0, tl.int32)
    mass = m0
    # First under top-k; then anew, under both limits. Without top-p the first search is enough.
    for stage in range(2):
        mass_max = tl.where((stage == 1) & (share < 1.0), mass * share, everything)
        cuts = (c0 >= count_max) | (m0 >= mass_max)
        if finite & cuts & ((stage == 0) | (share < 1.0)):
            # A value stays that is equal to `high` or above; none that is `low` or below.
            by_first = (c1 < count_max) & (m1 < mass_max)
            by_second = (c2 < count_max) & (m2 < mass_max)
            high = tl.where(by_first, first, tl.where(by_second, second, top))
            high_count = tl.where(by_first, c1, tl.where(by_second, c2, 0))
            high_mass = tl.where(by_first, m1, tl.where(by_second, m2, 0.0))
            low = tl.where(by_first, floor, tl.where(by_second, first, second))
            low_count = tl.where(by_first, c0, tl.where(by_second, c1, c2))
            low_mass = tl.where(by_first, m0, tl.where(by_second, m1, m2))
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
                n0, n1, n2, w0, w1, w2, least, most = tally(
                    row, vocab, top, cold, low, high, t0, t1, t2, BLOCK
                )
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
    least_share = tl.load(min_p + nth)
    if least_share > 0.0:
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
    tl.store(edge + nth, tl.where(finite, cut, float("-inf")))
    tl.store(room + nth, kept)


@triton.jit
def weigh_kernel(
    logits,
    edited,
    source,  # int32 [D]
    temperature,  # float32 [D]; 0: greedy
    edge,  # float32 [D]
    peak,  # float32 [D, pieces], written as all that follow
    best,  # int32 [D, pieces]: where the piece's peak stands
    mass,  # float32 [D, pieces]: of what is above the edge, as a share of the peak's weight
    equal,  # int32 [D, pieces]: how many values are on the edge
    vocab,
    pieces,
    BLOCK: tl.constexpr,
):
    nth = tl.program_id(0)
    piece = tl.program_id(1)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    row = row_of(logits, edited, source + nth, vocab)
    heat = tl.load(temperature + nth)
    least = tl.load(edge + nth)
    value = tl.load(row + at, mask=at < vocab, other=float("-inf"))
    value = tl.where(value == value, value, float("-inf"))
    top = tl.max(value, 0)
    where = tl.min(tl.where((value == top) & (at < vocab), at, 2147483647), 0)
    near = tl.where(top > float("-inf"), top, 0.0)
    weight = tl.exp((value - near) * (1.0 / tl.maximum(heat, 1e-6)))
    weight = tl.where(value > least, weight, 0.0)
    ties = (value == least) & (value > float("-inf"))
    place = nth.to(tl.int64) * pieces + piece
    tl.store(peak + place, top)
    tl.store(best + place, where)
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
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < vocab, other=float("-inf"))
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
