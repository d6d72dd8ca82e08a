"""Against transformers: greedy tokens equal, however prompts are batched, cut and placed.

The oracle's answers come from a process of its own (`oracle.py`), in float32.
"""

from __future__ import annotations

import pytest

from tests.kernels.conftest import Answered
from tests.kernels.driver import FLAVOURS, WIDE, Driver, load

MODELS = (
    "llama",
    "llama_scaled",
    "llama_linear",
    "mistral",
    "qwen2",
    "qwen2_yarn",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
)


def of_each_length(known: Answered) -> tuple[list[list[int]], list[list[int]]]:
    """A prompt of each length, and its answer: alone, more of one length are the same case."""
    pairs = zip(known.prompts, known.answers, strict=True)
    found = {len(prompt): (prompt, answer) for prompt, answer in pairs}
    assert len(found) > 5
    return [prompt for prompt, _ in found.values()], [answer for _, answer in found.values()]


@pytest.mark.parametrize(
    ("flavour", "page_size"), [("cpu", 1), ("cpu", 4), ("cpu", 16), ("reference", 4)]
)
@pytest.mark.parametrize("model", MODELS)
def test_batched_answers_are_the_oracles(
    flavour: str, model: str, page_size: int, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models[model]
    runner = load(known.path, flavour, page_size=page_size)
    for chunk in (3, WIDE):
        driver = Driver(runner, seed=chunk)
        assert driver.generate(known.prompts, 16, chunk=chunk) == known.answers


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_answers_alone_are_the_oracles(
    flavour: str, model: str, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models[model]
    driver = Driver(load(known.path, flavour))
    new_len = 16 if flavour == "cpu" else 3  # the reference is slow in small steps
    prompts, answers = of_each_length(known)
    expected = [answer[:new_len] for answer in answers]
    assert driver.generate(prompts, new_len, together=1) == expected


@pytest.mark.real
@pytest.mark.parametrize(
    ("flavour", "page_size", "chunk"),
    [("cpu", 16, WIDE), ("cpu", 1, 16), ("reference", 16, 40)],
)
def test_smollm2_answers_are_the_oracles(
    flavour: str, page_size: int, chunk: int, smollm2_answered: Answered
) -> None:
    runner = load(smollm2_answered.path, flavour, page_size=page_size)
    every = slice(None) if flavour == "cpu" else slice(0, None, 4)  # the reference is slow
    answers = Driver(runner).generate(smollm2_answered.prompts[every], 8, chunk=chunk)
    assert answers == smollm2_answered.answers[every]


@pytest.mark.real
def test_smollm2_answers_alone_are_the_oracles(smollm2_answered: Answered) -> None:
    driver = Driver(load(smollm2_answered.path, "cpu"))
    prompts, answers = of_each_length(smollm2_answered)
    assert driver.generate(prompts, 4, together=1) == [answer[:4] for answer in answers]
