"""What special rows ask for, as arrays: against a set and a list of each slot's tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.batch import Sampling, SlotOpen, StepInput
from kernels.ops.sampling import LOGPROB_MIN
from kernels.slots import Slots
from kernels.special import (
    NO_ENTRIES,
    NO_LIMIT,
    SCORE_LEN,
    TOP,
    Edits,
    Limits,
    Scores,
    Told,
    needs_tokens,
)
from tests.kernels.driver import ints

VOCAB = 50
EOS = (3, 9)


def opened(slots: Slots, slot: int, own: Sampling, tokens: list[int], prompt_len: int) -> None:
    closed = ints([slot] if slots.open[slot] else [])
    row = SlotOpen(slot, ints(tokens), prompt_len, 0, ints(range(4)), own)
    slots.apply(StepInput(ints([]), ints([]), opened=[row], closed=closed))


def slots_of(*each: Sampling, tokens: tuple[int, ...] = (1, 2, 5, 6), prompt_len: int = 2) -> Slots:
    slots = Slots(len(each), 64, 16, 64)
    for slot, own in enumerate(each):
        opened(slots, slot, own, list(tokens), prompt_len)
    return slots


def named(edits: Edits, slot: int) -> dict[int, tuple[float, bool]]:
    """By token: what is added, and whether it may come."""
    entries = edits.of(slot)
    pairs = zip(entries.tokens.tolist(), entries.added.tolist(), strict=True)
    return {entry >> 1: (added, bool(entry & 1)) for entry, added in pairs}


def test_entries_say_what_is_added_and_what_may_come() -> None:
    slots = slots_of(
        Sampling(logit_bias=((4, 1.5), (7, -2.0), (4, 1.0))),
        Sampling(min_tokens=3, stop_ids=(8, 99), logit_bias=((8, 5.0),)),
        Sampling(min_tokens=2),
        Sampling(allowed_ids=(7, 8), bad_sequences=((8,),), logit_bias=((2, 1.0), (7, 4.0))),
        Sampling(bad_sequences=((5, 6, 11), (6, 12), (5, 13), (14,))),
        Sampling(bad_sequences=((5, 13),)),
        Sampling(top_p=0.5),
    )
    edits = Edits(slots, EOS, VOCAB)
    inf = float("inf")
    assert named(edits, 0) == {4: (2.5, True), 7: (-2.0, True)}
    assert named(edits, 1) == {3: (-inf, True), 8: (-inf, True), 9: (-inf, True)}
    assert named(edits, 2) == {}
    assert named(edits, 3) == {2: (1.0, False), 7: (4.0, True), 8: (0.0, False)}
    assert named(edits, 4) == {11: (0.0, False), 12: (0.0, False), 14: (0.0, False)}
    assert [edits.of(slot).narrows for slot in range(5)] == [False, False, False, True, True]
    assert [edits.of(slot).empty for slot in range(5)] == [False, False, False, True, False]
    assert edits.of(5) is edits.of(6) is NO_ENTRIES
    assert sorted(edits.of_rows(ints([6, 5, 4, 3, 0]))) == [2, 3, 4]
    assert edits.of(1) is edits.of(1)
    slots.extend(ints([1]), ints([20]))  # enough tokens
    assert named(edits, 1) == {8: (5.0, True)}
    opened(slots, 1, Sampling(logit_bias=((6, 1.0),)), [1, 2], 1)
    assert named(edits, 1) == {6: (1.0, True)}


def test_only_bad_sequences_of_several_tokens_need_those_before() -> None:
    slots = slots_of(
        Sampling(bad_sequences=((4,), (5,))),
        Sampling(bad_sequences=((4,), (5, 6))),
        Sampling(frequency_penalty=1.0, min_tokens=9, allowed_ids=(4, 5), logprobs=3),
    )
    assert [needs_tokens(slots.columns, ints([slot])) for slot in range(3)] == [False, True, False]


def test_limits_are_off_where_they_leave_everything() -> None:
    kinds = [
        Sampling(top_k=0),
        Sampling(top_k=VOCAB),
        Sampling(top_k=VOCAB - 1),
        Sampling(top_p=0.5),
        Sampling(min_p=0.5, temperature=0.0),
        Sampling(min_p=0.5),
    ]
    columns = slots_of(*kinds).columns
    drawn = np.array([own.temperature > 0 for own in kinds])
    limits = Limits.of(columns, ints(range(len(kinds))), drawn, VOCAB)
    assert limits.top_k.tolist() == [NO_LIMIT, NO_LIMIT, VOCAB - 1, *[NO_LIMIT] * 3]
    assert limits.filtered.tolist() == [2, 3, 5]


moves = st.lists(
    st.tuples(
        st.sampled_from(["sample", "sample", "sample", "jump", "open", "undo", "land"]),
        st.integers(0, 2),
        st.integers(0, VOCAB - 1),
    ),
    max_size=60,
)


@given(moves=moves)
def test_the_table_has_each_token_once(moves: list[tuple[str, int, int]]) -> None:
    """Against a table that counts; tokens that are sampled land later."""
    slots = slots_of(*[Sampling(frequency_penalty=1.0)] * 3)
    told = Told(slots)
    table = np.zeros((3, VOCAB), int)
    said = {slot: ([1, 2], [5, 6]) for slot in range(3)}
    for kind, slot, token in moves:
        known = int(slots.known_len[slot])
        if kind == "open":
            said[slot] = [token, token], [token]
            opened(slots, slot, Sampling(presence_penalty=1.0), [token] * 3, 2)
        elif kind == "land" or (kind != "sample" and (slots.tokens[slot, :known] < 0).any()):
            tokens = [*said[slot][0], *said[slot][1]]
            slots.tokens[slot, :known] = tokens
        elif kind == "jump":
            slots.extend(ints([slot]), ints([token]))
            said[slot][1].append(token)
        elif known < 60:
            marks = told.missing(ints([slot]))
            table[marks.cleared] = 0
            for own, mark in zip(marks.slots.tolist(), marks.tokens.tolist(), strict=True):
                count = table[own, mark >> 1]
                table[own, mark >> 1] = count + 2 if mark & 1 else count | 1
            wanted = np.bincount(said[slot][1], minlength=VOCAB) * 2
            wanted[list(set(said[slot][0]))] += 1
            assert (table[slot] == wanted).all()
            table[slot, token] += 2
            told.advance(ints([slot]))
            if kind == "sample":  # else the step comes to nothing
                slots.tokens[slot, known] = -1
                slots.known_len[slot] += 1
                said[slot][1].append(token)
                told.check()


def test_scores_become_what_was_asked_for() -> None:
    landed = np.zeros((2, SCORE_LEN), np.int32)
    values = landed[:, : 1 + TOP].view(np.float32)
    values[0, :4] = -0.5, -0.25, -0.5, -0.5
    landed[0, 1 + TOP :][:3] = 7, 6, 4
    values[1, :3] = -np.inf, -0.25, -np.inf
    landed[1, 1 + TOP :][:2] = 8, 9
    scores = Scores(ints([3, 1]), ints([3, 2]), landed)
    told = scores.told(np.array([0, 1, 3]), ints([5, 20, 4]))
    assert told[0] is None
    assert told[1] is not None and told[1].logprob == LOGPROB_MIN
    assert told[1].best == ((8, -0.25),)
    assert told[2] is not None
    assert (told[2].token_id, told[2].logprob) == (4, -0.5)
    assert told[2].best == ((7, -0.25), (4, -0.5), (6, -0.5))
