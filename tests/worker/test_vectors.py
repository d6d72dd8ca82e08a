"""The shadow worker's vectors are like the real one's: the same step, answered by both."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.worker import translate
from bench.sim.shadow import ShadowWorker
from kernels.runner import Runner, RunnerOptions
from messages.types import Sampling, pack, unpack, unpack_floats
from messages.worker import Row, Step, StepDone
from tests.house.tiny import make_model

Answer = Callable[[Step], StepDone]


def real(folder: Path) -> tuple[Answer, int]:
    options = RunnerOptions(dtype="float32", kv_tokens=256, threads=1, slot_count=4)
    runner = Runner.load(make_model(folder / "model"), options)

    def answer(step: Step) -> StepDone:
        return translate.step_done(step, runner.execute(translate.step_input(step)), 1)

    return answer, runner.facts.hidden_len


def shadow(folder: Path) -> tuple[Answer, int]:
    found = ShadowWorker(page_count=16, page_size=16, vocab_size=512)
    return found.execute, found.facts.hidden_len


def row(slot: int, sampling: Sampling) -> Row:
    return Row(slot, f"r{slot}", pack([7, 8, 9]), 3, 0, pack([slot]), sampling)


@pytest.mark.parametrize("make", [shadow, real])
def test_those_who_ask_get_a_vector_with_their_first_token(
    make: Callable[[Path], tuple[Answer, int]], tmp_path: Path
) -> None:
    answer, hidden_len = make(tmp_path)
    asked = [
        Sampling(temperature=0.0, want_vector=True),
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, label_ids=(5, 1, 5)),
        Sampling(temperature=1.0, seed=3, want_vector=True),
    ]
    opened = tuple(row(slot, sampling) for slot, sampling in enumerate(asked))
    first = Step(1, 1, pack(range(4)), pack([3, 2, 3, 2]), opened)
    done = answer(first)
    assert unpack(done.slots).tolist() == [0, 2]
    vectors = {vector.slot: unpack_floats(vector.values) for vector in done.vectors}
    assert sorted(vectors) == [0, 2]
    assert len(vectors[0]) == hidden_len
    assert math.fsum(value * value for value in vectors[0]) == pytest.approx(1.0, abs=1e-5)
    assert len(vectors[2]) == 3 and vectors[2][0] == vectors[2][2]
    assert all(value < 0.0 for value in vectors[2])
    # The others end their prompts; who has got a vector gets no second one.
    done = answer(Step(1, 2, pack(range(4)), pack([1, 1, 1, 1])))
    (late,) = done.vectors
    assert late.slot == 3 and unpack_floats(late.values) == vectors[0]
