"""Against transformers, with the real scheduler and cache between prompts and runner: whatever they
decide (chunks, shared prefixes, retraction for want of pages) changes no token.
"""

from __future__ import annotations

import pytest

from bench.gpu_workloads import Load
from bench.house import House
from tests.kernels.conftest import Answered
from tests.kernels.driver import load

MODELS = ("llama", "mistral", "qwen2", "qwen3")
NEW_LEN = 16


@pytest.fixture(autouse=True)
def all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request is there before the first step's result: on the host, where a step has ended
    when it is launched, they would be served one after another, and nobody would want for pages."""
    monkeypatch.setattr("bench.house.has_ended", lambda flight: False)


def answers_of(house: House, prompts: list[list[int]], new_len: int) -> list[list[int]]:
    run = house.run(Load(prompts, [new_len] * len(prompts)))
    house.schedule.check()
    house.ledger.check()
    counts = house.ledger.counts()
    assert counts.leased == counts.reserved == 0, "pages are left behind"
    return list(run.tokens.values())


@pytest.mark.parametrize(
    ("page_size", "budget", "prefix_cache"),
    [(1, 16, True), (4, 512, True), (16, 48, True), (4, 48, False)],
)
@pytest.mark.parametrize("model", MODELS)
def test_scheduled_answers_are_the_oracles(
    model: str, page_size: int, budget: int, prefix_cache: bool, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models[model]
    runner = load(known.path, "cpu", page_size=page_size)
    house = House(runner, 16, budget, prefix_cache=prefix_cache)
    assert answers_of(house, known.prompts, NEW_LEN) == known.answers
    if prefix_cache:  # once more: now what it has kept is used
        assert answers_of(house, known.prompts, NEW_LEN) == known.answers


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_the_oracles_when_pages_run_out(
    model: str, page_size: int, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models[model]
    longest = max(map(len, known.prompts)) + NEW_LEN
    kv_tokens = -(-longest // page_size + 1) * page_size + 3 * page_size
    runner = load(known.path, "cpu", page_size=page_size, kv_tokens=kv_tokens)
    house = House(runner, 16, 64)
    assert answers_of(house, known.prompts, NEW_LEN) == known.answers
    assert house.schedule.output.retraction_count > 0, "nothing was retracted"


@pytest.mark.real
def test_smollm2_scheduled_is_the_oracles(smollm2_answered: Answered) -> None:
    known = smollm2_answered
    longest = max(map(len, known.prompts)) + 8
    runner = load(known.path, "cpu", page_size=4, kv_tokens=(longest // 4 + 3) * 4)
    house = House(runner, 16, 64)
    assert answers_of(house, known.prompts, 8) == known.answers
    assert house.schedule.output.retraction_count > 0, "nothing was retracted"
