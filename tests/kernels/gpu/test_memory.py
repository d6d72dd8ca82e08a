"""A device's memory: what steps take, what comes of having none, and of a device that is lost."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from kernels.batch import Sampling
from kernels.memory import forget_freed
from kernels.runner import Runner, RunnerOptions
from tests.kernels.conftest import Answered
from tests.kernels.driver import Driver
from tests.kernels.gpu.test_steps import load

pytestmark = pytest.mark.gpu


def reserved_bytes() -> tuple[int, int]:
    """What torch has of the device, and how often it has asked."""
    stats = torch.cuda.memory_stats()
    return stats["reserved_bytes.all.current"], stats["num_device_alloc"]


@pytest.mark.parametrize("lazy_graphs", [False, True])
def test_steps_take_no_memory_once_the_runner_is_loaded(
    cuda: torch.device, tiny_models: dict[str, Answered], lazy_graphs: bool
) -> None:
    model = tiny_models["qwen3"]
    options = RunnerOptions(
        dtype="bfloat16",
        device="cuda",
        slot_count=48,
        step_tokens_max=1024,
        memory_fraction=0.02,
        lazy_graphs=lazy_graphs,
    )
    runner = Runner.load(model.path, options)
    runner.warm_up()
    rng = np.random.default_rng(0)
    vocab = runner.facts.vocab_size
    kinds = [
        Sampling(temperature=0.0, ignore_eos=True),
        Sampling(temperature=0.8, seed=3, ignore_eos=True),
        Sampling(temperature=0.8, top_p=0.9, top_k=9, logprobs=3, seed=4, ignore_eos=True),
    ]

    def play(count: int, length: int, new_len: int, sampling: Sampling) -> None:
        prompts = [
            rng.integers(1, vocab, rng.integers(1, length + 1)).tolist() for _ in range(count)
        ]
        Driver(runner, seed=int(rng.integers(99))).generate(
            prompts, new_len, chunk=16, together=48, sampling=sampling
        )

    if lazy_graphs:  # those are taken from the memory that was left for them
        for count in (1, 3, 20, 48):
            play(count, 60, 8, kinds[0])
    before = reserved_bytes()
    for count, length in ((1, 9), (5, 60), (48, 20), (31, 60), (48, 60)):
        for sampling in kinds:
            play(count, length, 8, sampling)
    after = reserved_bytes()
    if lazy_graphs:
        assert after[0] - before[0] <= options.graph_bytes
    else:
        assert after == before


def test_graphs_stay_within_their_memory(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    model = tiny_models["llama"]
    runner = load(model.path, lazy_graphs=False, graph_bytes=1)
    runner.warm_up()
    assert runner.graphs_left > 0 and runner.steps is not None and runner.steps.graphs is not None
    graphs = runner.steps.graphs
    assert len(graphs.chunks) + len(graphs.decodes) <= 1
    new_len = len(model.answers[0])
    assert Driver(runner).generate(model.prompts, new_len, chunk=24) == model.answers


def test_graphs_that_there_was_no_time_for_come_when_needed(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    model = tiny_models["llama"]
    runner = load(model.path, lazy_graphs=False, graph_seconds=0.0)
    runner.warm_up()
    assert runner.graphs_left > 0 and runner.steps is not None and runner.steps.graphs is not None
    before = set(runner.steps.graphs.decodes)  # those that warm_up itself has needed
    Driver(runner).generate(model.prompts[:4], 4)
    assert set(runner.steps.graphs.decodes) > before


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_without_memory_give_the_same_tokens_in_parts(
    cuda: torch.device, tiny_models: dict[str, Answered], graphs: bool
) -> None:
    model = tiny_models["llama"]
    forget_freed()
    runner = load(model.path, graphs=graphs)
    new_len = len(model.answers[0])
    refused = 0
    assert runner.steps is not None
    launch = runner.steps.launch

    def counted(step):  # type: ignore[no-untyped-def]
        nonlocal refused
        try:
            return launch(step)
        except MemoryError:
            refused += 1
            raise

    runner.steps.launch = counted  # type: ignore[method-assign]
    forget_freed()
    total = torch.cuda.get_device_properties().total_memory
    room = torch.cuda.memory_reserved() + (6 << 20)
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        assert Driver(runner).generate(model.prompts, new_len) == model.answers
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert refused > 0, "there was memory for everything"


def test_too_large_a_pool_says_how_much_is_missing(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    with pytest.raises(MemoryError, match="are missing"):
        load(tiny_models["llama"].path, kv_tokens=1 << 32)


LOSE = """
import sys, numpy as np, torch
from kernels.batch import Sampling, SlotOpen, StepInput
from kernels.health import DeviceLost
from kernels.runner import Runner, RunnerOptions
runner = Runner.load(sys.argv[1], RunnerOptions(device="cuda", kv_tokens=1024, slot_count=4,
                                                step_tokens_max=64, lazy_graphs=True))
slot, one = np.array([0], np.int32), np.array([1], np.int32)
begin = SlotOpen(0, np.array([5, 6], np.int32), 2, 0, np.array([0], np.int32), Sampling())
runner.execute(StepInput(slot, np.array([2], np.int32), opened=[begin]))
runner.check_device(ValueError())  # it answers
torch._assert_async(torch.zeros(1, device="cuda"))
try:
    runner.execute(StepInput(slot, one))
except Exception as error:
    try:
        runner.check_device(error)
    except DeviceLost as lost:
        print("LOST", lost, flush=True)
import os
os._exit(0)  # what a lost device holds is not to be freed
"""


def test_a_failed_assertion_on_the_device_loses_it(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    path = str(tiny_models["llama"].path)
    done = subprocess.run(
        [sys.executable, "-c", LOSE, path], capture_output=True, text=True, timeout=240
    )
    assert done.stdout.startswith("LOST cuda"), (done.stdout, done.stderr[-2000:])
    assert "is lost to this process" in done.stdout
