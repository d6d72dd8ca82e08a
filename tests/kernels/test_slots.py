"""The batch state against a dull model: lists in a dict."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernels.batch import Sampling, SlotOpen, StepInput
from kernels.slots import Slots
from tests.kernels.driver import GREEDY, ints

SLOTS, CONTEXT, PAGE, PAGES = 4, 40, 3, 200


@dataclass
class Model:
    tokens: list[int]
    computed: int
    pages: list[int] = field(default_factory=list)
    failed: bool = False


class SlotsMachine(RuleBasedStateMachine):
    """Each step is one of all that a scheduler may send."""

    @initialize()
    def begin(self) -> None:
        self.slots = Slots(SLOTS, CONTEXT, PAGE, PAGES)
        self.model: dict[int, Model] = {}
        self.next_page = 0

    def pages(self, count: int) -> list[int]:
        self.next_page += count
        return [page % PAGES for page in range(self.next_page - count, self.next_page)]

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        closed = [slot for slot in list(self.model) if data.draw(st.integers(0, 4)) == 0]
        for slot in closed:
            del self.model[slot]
        empty = [slot for slot in range(SLOTS) if slot not in self.model]
        opened = [self.open(slot, data) for slot in empty if data.draw(st.booleans())]
        rows, grown = [], []
        for slot, own in self.model.items():
            left = len(own.tokens) - own.computed
            if left == 0 or len(own.tokens) >= CONTEXT or data.draw(st.integers(0, 3)) == 0:
                continue
            count = data.draw(st.integers(1, left))
            missing = -(-(own.computed + count) // PAGE) - len(own.pages)
            fresh = self.pages(max(missing, 0))
            own.pages += fresh
            grown += [(slot, page) for page in fresh]
            rows.append((slot, count))
        grown = data.draw(st.permutations(grown))  # slots may interleave; a slot's order stays
        own_order = {slot: iter(self.model[slot].pages) for slot, _ in grown}
        for slot in own_order:
            already = len(self.model[slot].pages) - sum(1 for each, _ in grown if each == slot)
            for _ in range(already):
                next(own_order[slot])
        grown = [(slot, next(own_order[slot])) for slot, _ in grown]
        step = StepInput(
            ints([slot for slot, _ in rows]),
            ints([count for _, count in rows]),
            opened=opened,
            closed=ints(closed),
            grown_slots=ints([slot for slot, _ in grown]),
            grown_pages=ints([page for _, page in grown]),
        )
        self.slots.apply(step)
        self.compare_and_settle(step, rows, data)

    def open(self, slot: int, data: st.DataObject) -> SlotOpen:
        known = data.draw(st.integers(1, 20))
        prompt_len = data.draw(st.integers(1, known))
        cached = data.draw(st.integers(0, (known - 1) // PAGE)) * PAGE
        tokens = [(slot * 31 + n * 7) % 101 for n in range(known)]
        pages = self.pages(-(-known // PAGE))
        self.model[slot] = Model(list(tokens), cached, list(pages))
        return SlotOpen(slot, ints(tokens), prompt_len, cached, ints(pages), Sampling(seed=slot))

    def compare_and_settle(
        self, step: StepInput, rows: list[tuple[int, int]], data: st.DataObject
    ) -> None:
        batch = self.slots.flatten(step)
        rows = [(slot, count) for slot, count in rows if not self.model[slot].failed]
        if all(count == 1 for _, count in rows):  # the longest first
            rows.sort(key=lambda row: -self.model[row[0]].computed)
        ids, positions, write, sampled, sampled_slots = [], [], [], [], []
        for slot, count in rows:
            own = self.model[slot]
            for position in range(own.computed, own.computed + count):
                ids.append(own.tokens[position])
                positions.append(position)
                write.append(own.pages[position // PAGE] * PAGE + position % PAGE)
            if own.computed + count == len(own.tokens):
                sampled.append(len(ids) - 1)
                sampled_slots.append(slot)
        assert batch.ids.tolist() == ids
        assert batch.positions.tolist() == positions
        assert batch.write_index.tolist() == write
        assert batch.sampled.tolist() == sampled
        assert batch.sampled_slots.tolist() == sampled_slots
        assert batch.query_start.tolist() == [0, *np.cumsum([count for _, count in rows])]
        bad = {slot for slot in sampled_slots if data.draw(st.integers(0, 9)) == 0}
        good = [slot for slot in sampled_slots if slot not in bad]
        self.slots.settle(batch, ints(good), ints([slot + 1 for slot in good]), ints(sorted(bad)))
        for slot, count in rows:
            self.model[slot].computed += count
        for slot in good:
            self.model[slot].tokens.append(slot + 1)
        for slot in bad:
            self.model[slot].failed = True

    @precondition(lambda self: self.model)
    @rule()
    def clear(self) -> None:
        self.slots.clear()
        self.model.clear()

    @invariant()
    def laws_hold(self) -> None:
        self.slots.check()
        assert np.flatnonzero(self.slots.open).tolist() == sorted(self.model)


SlotsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
test_slots_do_what_lists_would = SlotsMachine.TestCase


def opened(slots: Slots, count: int, pages: int = 4) -> None:
    slot_open = SlotOpen(0, ints(range(count)), count, 0, ints(range(pages)), GREEDY)
    slots.apply(StepInput(ints([]), ints([]), opened=[slot_open]))


def test_a_reopened_slot_remembers_nothing() -> None:
    slots = Slots(2, CONTEXT, PAGE, PAGES)
    picky = Sampling(seed=4, top_k=3, logit_bias=((1, 2.0),), stop_ids=(5,), logprobs=1)
    first = SlotOpen(1, ints([9] * 20), 20, 0, ints(range(7)), picky)
    slots.apply(StepInput(ints([]), ints([]), opened=[first]))
    second = SlotOpen(1, ints([8, 8]), 2, 0, ints([50]), GREEDY)
    slots.apply(StepInput(ints([]), ints([]), opened=[second], closed=ints([1])))
    slots.check()
    assert slots.columns.plain[1] and slots.columns.bias_ids[1] == ()
    assert (slots.known_len[1], slots.computed_len[1], slots.leased_count[1]) == (2, 0, 1)


@pytest.mark.parametrize(
    "step",
    [
        StepInput(ints([1]), ints([1])),  # an empty slot
        StepInput(ints([0]), ints([9])),  # more than is known
        StepInput(ints([0, 0]), ints([1, 1])),  # a slot twice
        StepInput(ints([0]), ints([0])),  # nothing
    ],
)
def test_a_step_that_breaks_a_law_is_refused(step: StepInput) -> None:
    slots = Slots(2, CONTEXT, PAGE, PAGES)
    opened(slots, 8)
    with pytest.raises(AssertionError):
        slots.flatten(step)


def test_a_row_past_its_pages_is_refused() -> None:
    slots = Slots(2, CONTEXT, PAGE, PAGES)
    opened(slots, 8, pages=2)
    slots.flatten(StepInput(ints([0]), ints([6])))
    with pytest.raises(AssertionError):
        slots.flatten(StepInput(ints([0]), ints([7])))
