"""A step for which there is no memory: computed in parts, and what never fits fails alone."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.batch import Sampling, StepInput, StepOutput, TokenLogprobs
from kernels.parts import CUTS_MAX, halves, run_in_parts
from kernels.runner import Runner
from kernels.slots import FlatBatch
from tests.kernels.conftest import Answered
from tests.kernels.driver import FLAVOURS, GREEDY, Driver, ints, load

COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(COUNTS)
def test_halves_are_the_whole_and_about_as_large(counts: list[int]) -> None:
    if sum(counts) < 2:
        return
    slots = np.arange(len(counts), dtype=np.int32)[::-1]
    parts = list(halves(slots, np.array(counts, np.int32)))
    sums = [int(part.sum()) for _, part in parts]
    assert len(parts) == 2 and abs(sums[0] - sums[1]) <= 1 and sum(sums) == sum(counts)
    found: dict[int, int] = defaultdict(int)
    for part_slots, part_counts in parts:
        assert (part_counts > 0).all()
        for slot, count in zip(part_slots.tolist(), part_counts.tolist(), strict=True):
            found[slot] += count
    assert found == dict(zip(slots.tolist(), counts, strict=True))


class Device:
    """Computes rows whose tokens fit, and samples where a row's last one is among them."""

    def __init__(self, counts: list[int], room: int, too_large: set[int]) -> None:
        self.left = dict(enumerate(counts))
        self.room, self.too_large = room, too_large

    def run(self, step: StepInput) -> StepOutput:
        assert len(step.slots) and (step.counts > 0).all() and not step.opened
        slots = step.slots.tolist()
        if step.counts.sum() > self.room or self.too_large & set(slots):
            raise MemoryError
        for slot, count in zip(slots, step.counts.tolist(), strict=True):
            self.left[slot] -= count
        done = ints([slot for slot in slots if self.left[slot] == 0])
        entry = TokenLogprobs(1, -1.0, ())
        return StepOutput(done, done + 100, [entry] * len(done) if len(done) % 2 else None)


@given(COUNTS, st.integers(1, 200), st.sets(st.integers(0, 11), max_size=2))
def test_each_row_gets_one_token_or_is_starved(
    counts: list[int], room: int, too_large: set[int]
) -> None:
    device = Device(counts, room, too_large)
    slots = np.arange(len(counts), dtype=np.int32)
    output = run_in_parts(StepInput(slots, ints(counts)), device.run, "no memory")
    starved = output.starved.tolist()
    assert sorted([*output.slots.tolist(), *starved]) == slots.tolist()
    assert output.failed.tolist() == starved and (output.detail == "no memory") == bool(starved)
    assert output.tokens.tolist() == (output.slots + 100).tolist()
    assert output.logprobs is None or len(output.logprobs) == len(output.slots)
    assert too_large & set(slots.tolist()) <= set(starved)
    if room >= -(-sum(counts) // 2**CUTS_MAX) and not too_large & set(slots.tolist()):
        assert not starved


class Short:
    """A model's forward with memory for so many tokens."""

    def __init__(self, runner: Runner, token_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.token_count = token_count
        self.refused_count = 0
        forward = runner.forward

        def short(batch: FlatBatch, *rest: Any) -> torch.Tensor:
            if len(batch.ids) > self.token_count:
                self.refused_count += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(batch, *rest)

        monkeypatch.setattr(runner, "forward", short)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_step_that_does_not_fit_gives_the_same_tokens(
    flavour: str, tiny_models: dict[str, Answered], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tiny_models["llama"]
    runner = load(known.path, flavour)
    short = Short(runner, 120, monkeypatch)
    new_len = len(known.answers[0])
    assert Driver(runner).generate(known.prompts, new_len) == known.answers
    assert short.refused_count > 0


def test_logprobs_of_a_prompt_come_in_parts_as_well(
    tiny_models: dict[str, Answered], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tiny_models["llama"]
    prompt = max(known.prompts, key=len)
    asking = Sampling(temperature=0.0, prompt_logprobs=1)
    told = []
    for token_count in (1000, len(prompt) // 3):
        runner = load(known.path)
        Short(runner, token_count, monkeypatch)
        driver = Driver(runner)
        heard: list[StepOutput] = []
        execute = runner.execute

        def listening(step: StepInput, execute=execute, heard=heard) -> StepOutput:
            heard.append(execute(step))
            return heard[-1]

        monkeypatch.setattr(runner, "execute", listening)
        driver.generate([prompt], 1, sampling=asking)
        rows = [row for output in heard for part in output.prompts for row in part.logprobs]
        told.append([(row.token_id, round(row.logprob, 4)) for row in rows])
    assert told[0] == told[1] and len(told[0]) == len(prompt)


def test_rows_that_never_fit_fail_and_the_others_go_on(
    tiny_models: dict[str, Answered], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tiny_models["qwen3"]
    runner = load(known.path, page_size=4)
    forward = runner.forward

    def picky(batch: FlatBatch, *rest: Any) -> torch.Tensor:
        if 1 in batch.slots:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(batch, *rest)

    monkeypatch.setattr(runner, "forward", picky)
    prompts = [known.prompts[index] for index in range(3)]
    pages = [list(range(32 * slot, 32 * slot + 32)) for slot in range(3)]
    from tests.kernels.test_runner import opening, step

    opened = [opening(slot, prompts[slot], pages[slot], GREEDY) for slot in range(3)]
    counts = [len(prompt) for prompt in prompts]
    output = runner.execute(step([0, 1, 2], counts, opened=opened))
    assert output.slots.tolist() == [0, 2] and output.starved.tolist() == [1]
    assert output.failed.tolist() == [1] and "fit" in output.detail
    assert output.tokens.tolist() == [known.answers[0][0], known.answers[2][0]]
    # The scheduler's next step left before it heard: the row is dropped and named again.
    output = runner.execute(step([0, 1, 2], [1, 1, 1]))
    assert output.tokens.tolist() == [known.answers[0][1], known.answers[2][1]]
    assert output.failed.tolist() == [1]
    output = runner.execute(step([0, 2], [1, 1], closed=ints([1])))
    assert output.tokens.tolist() == [known.answers[0][2], known.answers[2][2]]
    runner.slots.check()
