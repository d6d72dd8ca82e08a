"""Rows that the host has to look at, on a GPU: constrained ones, and prompts that are told of."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.batch import Constraint, Sampling, SlotOpen, StepInput
from kernels.constrain import TokenTable
from kernels.runner import Runner, RunnerOptions
from tests.kernels.conftest import Answered
from tests.kernels.driver import ints

pytestmark = pytest.mark.gpu
EOS = 0


def load(known: Answered, device: str) -> Runner:
    options = RunnerOptions(
        dtype="float32", device=device, kv_tokens=4096, slot_count=8, lazy_graphs=True
    )
    runner = Runner.load(known.path, options)
    runner.kv.forget()
    return runner


def opening(
    slot: int, prompt: list[int], sampling: Sampling, constraint: Constraint | None = None
) -> SlotOpen:
    pages = ints(range(4 * slot, 4 * slot + 4))
    return SlotOpen(slot, ints(prompt), len(prompt), 0, pages, sampling, constraint)


def test_constrained_rows_beside_free_ones(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    pytest.importorskip("llguidance")
    known = tiny_models["llama"]
    runner = load(known, "cuda")
    vocab_size = runner.facts.vocab_size
    pieces = [b"<end>", *(bytes([byte]) for byte in range(256))]
    pieces += [f"<t{i}>".encode() for i in range(vocab_size)]
    runner.use_vocabulary(TokenTable(pieces[:vocab_size], frozenset({EOS}), (EOS,), vocab_size))
    prompt = known.prompts[0]
    greedy = Sampling(temperature=0.0)
    opened = [
        opening(0, prompt, greedy),
        opening(1, prompt, greedy, Constraint("regex", "[a-f]{6}")),
    ]
    counts = ints([len(prompt)] * 2)
    output = runner.execute(StepInput(ints([0, 1]), counts, opened=opened))
    said = [[int(token)] for token in output.tokens]
    for _ in range(6):
        output = runner.execute(StepInput(ints([0, 1]), ints([1, 1])))
        for tokens, token in zip(said, output.tokens.tolist(), strict=True):
            tokens.append(token)
    assert said[0] == known.answers[0][:7]
    assert said[1][-1] == EOS
    assert re.fullmatch(b"[a-f]{6}", b"".join(pieces[token] for token in said[1][:-1]))
    # The constrained row leaves: the free one goes on by the device's own path.
    output = runner.execute(StepInput(ints([0]), ints([1]), closed=ints([1])))
    assert output.tokens.tolist() == known.answers[0][7:8]


def test_prompts_are_told_of_as_on_a_cpu(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models["llama"]
    prompt = (max(known.prompts, key=len) * 9)[:9]
    found = []
    for device in ("cpu", "cuda"):
        own = Sampling(temperature=0.0, prompt_logprobs=1)
        step = StepInput(ints([0]), ints([9]), opened=[opening(0, prompt, own)])
        (part,) = load(known, device).execute(step).prompts
        found.append([row.logprob for row in part.logprobs])
    assert found[1] == pytest.approx(found[0], abs=1e-3)
