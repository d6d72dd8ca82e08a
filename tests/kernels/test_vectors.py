"""Embeddings and scores of prompts against transformers; nothing else changes a bit of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.batch import Sampling, SlotOpen, StepInput
from kernels.load.base import BadConfig
from kernels.models.base import matryoshka
from kernels.runner import Runner
from tests.kernels.conftest import Answered
from tests.kernels.driver import FLAVOURS, GREEDY, WIDE, Driver, ints, load

VECTOR = replace(GREEDY, want_vector=True)
LABELS = (5, 0, 383, 17, 5)  # one twice
SCORE = replace(GREEDY, label_ids=LABELS)


def read(runner: Runner, known: Answered, sampling: Sampling, **how: int) -> np.ndarray:
    """What the prompts that the oracle has read come to, a row each."""
    driver = Driver(runner)
    count = len(known.read)
    driver.generate(known.prompts[:count], 1, sampling=sampling, **how)  # type: ignore[arg-type]
    return np.stack([driver.vectors[index] for index in range(count)])


@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_vectors_are_the_oracles_hidden_states(
    flavour: str, model: str, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models[model]
    expected = np.array([entry["vector"] for entry in known.read])
    runner = load(known.path, flavour)
    for chunk in (3, WIDE):
        found = read(runner, known, VECTOR, chunk=chunk)
        assert found.dtype == np.float32 and found.shape == (16, runner.facts.hidden_len)
        assert np.abs(found - expected).max() < 1e-5


@pytest.mark.parametrize("model", ["qwen3", "gemma2"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_scores_are_the_oracles_log_probabilities(
    flavour: str, model: str, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models[model]
    expected = np.array([[entry["logprobs"][i] for i in LABELS] for entry in known.read])
    found = read(load(known.path, flavour), known, SCORE)
    assert np.abs(found - expected).max() < 2e-5
    # Neither what is chosen nor how changes them.
    hot = replace(SCORE, temperature=2.0, logit_bias=((5, 50.0),), allowed_ids=(5, 6), seed=3)
    assert (read(load(known.path, flavour), known, hot) == found).all()


@pytest.mark.real
def test_smollm2_is_read_as_the_oracle_reads_it(smollm2_answered: Answered) -> None:
    known = smollm2_answered
    driver = Driver(load(known.path, "cpu"))
    count = len(known.read)
    kinds = [VECTOR, SCORE] * (count // 2)
    driver.generate(known.prompts[:count], 1, sampling=kinds)
    for index, (kind, entry) in enumerate(zip(kinds, known.read, strict=True)):
        if kind is VECTOR:
            expected, off = entry["vector"], 1e-5
        else:
            expected, off = [entry["logprobs"][i] for i in LABELS], 1e-3
        assert np.abs(driver.vectors[index] - expected).max() < off


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_neither_chunks_nor_neighbours_nor_the_cache_change_a_bit(
    flavour: str, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models["llama"]
    runner = load(known.path, flavour, page_size=4)
    whole = read(runner, known, VECTOR)
    assert (read(runner, known, VECTOR, chunk=5, together=3) == whole).all()
    driver = Driver(runner)
    longest = max(range(16), key=lambda index: len(known.prompts[index]))
    prompt = known.prompts[longest]
    pages = driver.shared_prefix(prompt, (len(prompt) - 1) // 4 * 4)
    driver.generate([prompt], 1, sampling=VECTOR, cached={0: pages})
    assert (driver.vectors[0] == whole[longest]).all()


def test_those_who_ask_for_the_prompt_and_those_who_decode_go_together(
    tiny_models: dict[str, Answered],
) -> None:
    known = tiny_models["qwen2"]
    runner = load(known.path, "cpu")
    kinds = [VECTOR, replace(GREEDY, prompt_logprobs=1), SCORE, GREEDY]
    driver = Driver(runner)
    answers = driver.generate(known.prompts[:16], 4, sampling=kinds * 4, chunk=7, together=5)
    assert answers == [answer[:4] for answer in known.answers[:16]]
    assert sorted(driver.vectors) == [i for i in range(16) if i % 2 == 0]
    for index in range(0, 16, 4):
        assert np.abs(driver.vectors[index] - known.read[index]["vector"]).max() < 1e-5


def test_a_resumed_sequence_has_no_vector(tiny_models: dict[str, Answered]) -> None:
    """It came with the first token, which the client has."""
    known = tiny_models["llama"]
    driver = Driver(load(known.path, "cpu"))
    prompt = known.prompts[3]
    driver.generate([prompt + known.answers[3][:1]], 2, sampling=VECTOR, prompt_lens=[len(prompt)])
    assert not driver.vectors


@pytest.mark.parametrize("sampling", [VECTOR, SCORE])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_vector_of_no_numbers_fails_its_row_alone(
    flavour: str, sampling: Sampling, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models["llama"]
    runner = load(known.path, flavour)
    opened = [SlotOpen(slot, ints([1, 2, 3]), 3, 0, ints([slot]), sampling) for slot in range(2)]
    forward = runner.forward

    def spoiled(batch: object, hidden: torch.Tensor | None = None) -> torch.Tensor:
        logits = forward(batch, hidden)  # type: ignore[arg-type]
        if hidden is not None:
            hidden[1, 7] = torch.inf
        if sampling is SCORE:
            logits[1, 17] = torch.nan
        return logits

    runner.forward = spoiled  # type: ignore[method-assign, assignment]
    output = runner.execute(StepInput(ints([0, 1]), ints([3, 3]), opened=opened))
    assert output.slots.tolist() == [0] and output.failed.tolist() == [1] and output.detail
    assert [vector.slot for vector in output.vectors] == [0]


def test_vectors_may_be_cut_where_the_config_says_so() -> None:
    assert matryoshka({}, 64) is None
    assert matryoshka({"is_matryoshka": False}, 64) is None
    assert matryoshka({"is_matryoshka": True}, 64) == ()
    assert matryoshka({"matryoshka_dimensions": [64, 16, 32, 128]}, 64) == (16, 32, 64)
    assert matryoshka({"matryoshka_dimensions": []}, 64) is None
    for wrong in ("32", [0], [1.5], [True]):
        with pytest.raises(BadConfig, match="matryoshka_dimensions"):
            matryoshka({"matryoshka_dimensions": wrong}, 64)
