"""Whole models on a GPU: the oracle's tokens in float32, graphs or not, in any company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.batch import Ints, Sampling, SlotOpen, StepInput, StepOutput
from kernels.runner import Flight, Runner, RunnerOptions
from tests.kernels.conftest import Answered
from tests.kernels.driver import Driver, ints

pytestmark = pytest.mark.gpu


def load(path: Path, **options: object) -> Runner:
    settings: dict = {
        "dtype": "float32",
        "device": "cuda",
        "kv_tokens": 8192,
        "step_tokens_max": 8192,
        "lazy_graphs": True,
    }
    settings.update(options)
    runner = Runner.load(path, RunnerOptions(**settings))
    runner.kv.forget()
    return runner


@pytest.mark.parametrize("graphs", [True, False])
def test_float32_gives_the_oracles_tokens(
    cuda: torch.device, tiny_models: dict[str, Answered], graphs: bool
) -> None:
    for name, model in tiny_models.items():
        runner = load(model.path, graphs=graphs)
        assert (runner.steps is not None) and runner.facts.device == "cuda"
        new_len = len(model.answers[0])
        answers = Driver(runner).generate(model.prompts, new_len, chunk=24)
        assert answers == model.answers, (name, runner.facts.notes)


def test_plain_torch_on_a_gpu_gives_the_oracles_tokens(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    name, model = next(iter(tiny_models.items()))
    runner = load(model.path, ops="reference", attention="torch")
    answers = Driver(runner).generate(model.prompts[:16], len(model.answers[0]))
    assert answers == model.answers[:16], name


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_graphs_change_no_token_in_bfloat16(
    cuda: torch.device, tiny_models: dict[str, Answered], temperature: float
) -> None:
    model = next(iter(tiny_models.values()))
    sampling = Sampling(temperature=temperature, seed=5, ignore_eos=True)
    answers = [
        Driver(load(model.path, dtype="bfloat16", graphs=graphs, attention="triton")).generate(
            model.prompts[:8], 24, sampling=sampling
        )
        for graphs in (True, False)
    ]
    # The same sizes: with padding a library may choose another product.
    assert answers[0] == answers[1]


def test_steps_launched_ahead_give_the_same_tokens(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    model = next(iter(tiny_models.values()))
    runner = load(model.path)
    prompt = np.array(model.prompts[0], np.int32)
    pages = np.arange(-(-(len(prompt) + 40) // runner.facts.page_size), dtype=np.int32)
    opened = SlotOpen(3, prompt, len(prompt), 0, pages, Sampling(temperature=0.0))
    slot, one = np.array([3], np.int32), np.ones(1, np.int32)
    flights = [runner.launch(StepInput(slot, np.array([len(prompt)], np.int32), opened=[opened]))]
    flights += [runner.launch(StepInput(slot, one)) for _ in range(len(model.answers[0]) - 1)]
    tokens = [int(flight.result().tokens[0]) for flight in flights]
    assert tokens == model.answers[0]
    runner.slots.check()


def test_penalties_filters_and_logprobs_agree_with_the_cpu(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    model = next(iter(tiny_models.values()))
    kinds = [
        Sampling(temperature=0.9, top_k=5, seed=1),
        Sampling(temperature=0.9, top_p=0.6, seed=2),
        Sampling(temperature=0.0, repetition_penalty=1.4, logprobs=2),
        Sampling(temperature=0.7, frequency_penalty=0.5, presence_penalty=0.2, seed=3),
        Sampling(temperature=0.0, logit_bias=((7, 5.0),)),
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, seed=9),
    ]
    prompts = model.prompts[: len(kinds)]
    there = Driver(load(model.path)).generate(prompts, 12, sampling=kinds)
    options = RunnerOptions(dtype="float32", device="cpu", kv_tokens=8192, step_tokens_max=8192)
    here = Driver(Runner.load(model.path, options)).generate(prompts, 12, sampling=kinds)
    assert there == here


KINDS = [
    Sampling(temperature=0.9, top_k=5, seed=1, ignore_eos=True),
    Sampling(temperature=0.9, top_p=0.6, seed=2, ignore_eos=True),
    Sampling(temperature=1.1, top_k=40, top_p=0.9, min_p=0.02, seed=3, choice=1, ignore_eos=True),
    Sampling(temperature=0.0, repetition_penalty=1.4, logprobs=2, ignore_eos=True),
    Sampling(temperature=0.7, frequency_penalty=0.5, presence_penalty=0.2, seed=4, ignore_eos=True),
    Sampling(temperature=0.0, logit_bias=((7, 5.0), (9, -3.0)), ignore_eos=True),
    Sampling(temperature=0.0, min_tokens=6, stop_ids=(7, 8)),
    Sampling(temperature=1.0, allowed_ids=tuple(range(3, 60, 2)), seed=5, ignore_eos=True),
    Sampling(temperature=0.0, bad_sequences=((11,), (20,)), logprobs=0, ignore_eos=True),
    Sampling(temperature=1.0, top_p=0.95, logprobs=20, seed=6, ignore_eos=True),
    Sampling(temperature=0.0, ignore_eos=True),
    Sampling(temperature=1.0, seed=9, ignore_eos=True),
]
ROOM_LEN = 128  # tokens of one slot's pages


def begin(
    runner: Runner, prompts: list[list[int]], kinds: list[Sampling], first: int = 0
) -> StepInput:
    """Slots `first` and on get a prompt each, whole."""
    each = ROOM_LEN // runner.facts.page_size
    opened = [
        SlotOpen(
            slot, ints(prompt), len(prompt), 0, ints(range(slot * each, slot * each + each)), own
        )
        for slot, (prompt, own) in enumerate(zip(prompts, kinds, strict=True), first)
    ]
    slots = ints([row.slot for row in opened])
    return StepInput(slots, ints([len(prompt) for prompt in prompts]), opened=opened)


def ones(slots: Ints) -> StepInput:
    return StepInput(slots, np.ones(len(slots), np.int32))


def play(runner: Runner, prompts: list[list[int]], count: int, depth: int) -> list[StepOutput]:
    """Prompts, then steps of one token for all, `depth` of them in flight."""
    step = begin(runner, prompts, KINDS)
    flights: list[Flight] = []
    outputs = []
    for _ in range(count):
        flights.append(runner.launch(step))
        step = ones(step.slots)
        if len(flights) == depth:
            outputs.append(flights.pop(0).result())
    outputs += [flight.result() for flight in flights]
    runner.slots.check()
    runner.reset()
    return outputs


def said(outputs: list[StepOutput]) -> list[list[int]]:
    assert not any(len(output.failed) for output in outputs)
    return np.stack([output.tokens for output in outputs], 1).tolist()


@pytest.mark.parametrize("graphs", [True, False])
def test_rows_of_every_kind_launched_ahead_say_what_a_cpu_says(
    cuda: torch.device, tiny_models: dict[str, Answered], graphs: bool
) -> None:
    """Penalties count tokens that the host has not read; what comes late is the same."""
    model = next(iter(tiny_models.values()))
    prompts = [(prompt * 30)[:30] for prompt in model.prompts[: len(KINDS)]]
    options = RunnerOptions(dtype="float32", device="cpu", kv_tokens=8192, step_tokens_max=8192)
    here = play(Runner.load(model.path, options), prompts, 20, 1)
    runner = load(model.path, graphs=graphs)
    for depth in (1, 2, 3):
        there = play(runner, prompts, 20, depth)
        assert said(there) == said(here), depth
        for ours, theirs in zip(there, here, strict=True):
            assert ours.logprobs is not None and theirs.logprobs is not None
            for own, other in zip(ours.logprobs, theirs.logprobs, strict=True):
                if own is None or other is None:
                    assert own is other
                    continue
                assert own.token_id == other.token_id
                assert own.logprob == pytest.approx(other.logprob, abs=1e-3)
                mine, wanted = ([pair[1] for pair in each.best] for each in (own, other))
                assert mine == pytest.approx(wanted, abs=1e-3)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("graphs", [True, False])
def test_no_launch_waits_for_the_device(
    cuda: torch.device, tiny_models: dict[str, Answered], graphs: bool
) -> None:
    model = next(iter(tiny_models.values()))
    runner = load(model.path, graphs=graphs, attention="triton")
    prompts = [(prompt * 30)[:30] for prompt in model.prompts[: len(KINDS)]]
    wanted = said(play(runner, prompts, 6, 2))  # captures and compiles
    step = begin(runner, prompts, KINDS)
    flights: list[Flight] = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            flights.append(runner.launch(step))
            step = ones(step.slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert said([flight.result() for flight in flights]) == [row[:3] for row in wanted]


def test_a_slot_with_penalties_is_resumed_and_used_again(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    model = next(iter(tiny_models.values()))
    prompt = model.prompts[0]
    own = Sampling(
        temperature=0.8, seed=3, frequency_penalty=0.6, repetition_penalty=1.2, ignore_eos=True
    )
    runner = load(model.path)
    whole = Driver(runner).generate([prompt], 24, sampling=own)[0]
    for _ in range(2):  # the slot's tenant before has left its counts behind
        half = Driver(runner).generate([prompt], 12, sampling=own)[0]
        assert half == whole[:12]
        driver = Driver(runner)
        rest = driver.generate([prompt + half], 24, sampling=own, prompt_lens=[len(prompt)])
        assert rest == [whole]


def test_bad_sequences_of_several_tokens_see_what_was_said(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    model = next(iter(tiny_models.values()))
    runner = load(model.path)
    prompt = model.prompts[0]
    free = model.answers[0]
    pair = free[2], free[3]
    at = next(nth for nth in range(1, 4) if (free[nth - 1], free[nth]) == pair)
    own = Sampling(temperature=0.0, bad_sequences=(pair,), ignore_eos=True)
    step = begin(runner, [prompt], [own], first=3)
    flights = [runner.launch(step)]
    flights += [runner.launch(ones(step.slots)) for _ in range(5)]
    tokens = [int(flight.result().tokens[0]) for flight in flights]
    assert tokens[:at] == free[:at] and tokens[at] != free[at]


def test_a_row_of_no_numbers_fails_alone(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    model = next(iter(tiny_models.values()))
    runner = load(model.path)
    pages = [np.arange(4, dtype=np.int32) + 4 * row for row in range(3)]
    prompts = [np.array(model.prompts[row][:20], np.int32) for row in range(3)]
    opened = [
        SlotOpen(row, prompts[row], len(prompts[row]), 0, pages[row], Sampling(temperature=0.0))
        for row in range(3)
    ]
    slots = np.arange(3, dtype=np.int32)
    counts = np.array([len(prompt) for prompt in prompts], np.int32)
    runner.execute(StepInput(slots, counts, opened=opened))
    k, _ = runner.kv.layers[0]
    k[4 * runner.facts.page_size] = torch.nan  # a key of row 1
    ones = np.ones(3, np.int32)
    first, second = (runner.launch(StepInput(slots, ones)) for _ in range(2))
    output = first.result()
    assert output.slots.tolist() == [0, 2] and output.failed.tolist() == [1]
    output = second.result()
    assert output.slots.tolist() == [0, 2] and output.failed.tolist() == [1]
    output = runner.execute(StepInput(slots, ones))
    assert output.slots.tolist() == [0, 2] and output.failed.tolist() == [1]


@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
def test_bfloat16_logits_are_close_to_float32(
    cuda: torch.device, tiny_models: dict[str, Answered], attention: str
) -> None:
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    for name, model in tiny_models.items():
        logits = []
        for options in ({"dtype": "float32"}, {"dtype": "bfloat16", "attention": attention}):
            try:
                runner = load(model.path, graphs=False, **options)
            except Exception as reason:
                assert "no form" in str(reason), reason
                break
            seen: list[torch.Tensor] = []
            steps = runner.steps
            assert steps is not None
            pick = steps.picker.pick

            def recorded(rows: torch.Tensor, *rest: torch.Tensor, pick=pick, seen=seen):
                seen.append(rows.clone())
                return pick(rows, *rest)

            steps.picker.pick = recorded  # type: ignore[method-assign]
            Driver(runner).generate(model.prompts[:8], 1)
            logits.append(torch.cat(seen))
        else:
            error = float((logits[1] - logits[0]).norm() / logits[0].norm())
            assert error < 0.05, (name, error)
