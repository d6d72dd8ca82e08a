"""Embeddings and scores on a GPU: beside rows that decode, with graphs and without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.runner import Runner, RunnerOptions
from tests.kernels.conftest import Answered
from tests.kernels.driver import GREEDY, Driver

pytestmark = pytest.mark.gpu
LABELS = (5, 0, 383)


@pytest.mark.parametrize("graphs", [True, False])
def test_prompts_are_read_beside_rows_that_decode(
    graphs: bool, cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models["qwen3"]
    options = RunnerOptions(
        dtype="float32",
        device="cuda",
        kv_tokens=4096,
        slot_count=8,
        graphs=graphs,
        lazy_graphs=True,
    )
    runner = Runner.load(known.path, options)
    runner.kv.forget()
    driver = Driver(runner)
    kinds = [
        replace(GREEDY, want_vector=True),
        GREEDY,
        replace(GREEDY, label_ids=LABELS),
        GREEDY,
    ]
    answers = driver.generate(known.prompts[:16], 6, sampling=kinds * 4, chunk=7, together=5)
    assert answers == [answer[:6] for answer in known.answers[:16]]
    assert sorted(driver.vectors) == list(range(0, 16, 2))
    for index, found in driver.vectors.items():
        read = known.read[index]
        wanted = [read["logprobs"][i] for i in LABELS] if index % 4 else read["vector"]
        assert np.abs(found - wanted).max() < 1e-3
