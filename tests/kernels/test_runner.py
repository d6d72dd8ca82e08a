"""The runner as a person would use it, and what it does when things go wrong."""

from __future__ import annotations

import doctest
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import kernels.runner
from kernels.batch import Sampling, SlotOpen, StepInput, TokenLogprobs
from kernels.kv import fitting_page_count
from kernels.load.base import BadConfig
from kernels.models.base import MODELS
from kernels.registry import Registry, UnknownName
from kernels.runner import Runner, RunnerOptions
from tests.kernels.conftest import Answered
from tests.kernels.driver import FLAVOURS, GREEDY, Driver, ints, load


def step(slots: list[int], counts: list[int], **rest: object) -> StepInput:
    return StepInput(ints(slots), ints(counts), **rest)  # type: ignore[arg-type]


def opening(slot: int, tokens: list[int], pages: list[int], own: Sampling = GREEDY) -> SlotOpen:
    return SlotOpen(slot, ints(tokens), len(tokens), 0, ints(pages), own)


@pytest.mark.real
def test_the_docstrings_example_runs(smollm2: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copy(smollm2, tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.chdir(tmp_path)
    assert kernels.runner.__doc__ is not None
    example = doctest.DocTestParser().get_doctest(kernels.runner.__doc__, {}, "runner", None, 0)
    runner = doctest.DocTestRunner()
    runner.run(example, clear_globs=False)
    assert runner.summarize().failed == 0
    assert len(example.globs["tokens"]) == 6
    assert example.globs["tokens"][0] == 7042  # " Paris"


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_row_that_is_not_a_number_fails_alone(
    flavour: str, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models["llama"]
    runner = load(known.path, flavour)
    opened = [
        opening(slot, known.prompts[slot], [4 * slot + n for n in range(4)]) for slot in (0, 1)
    ]
    counts = [len(known.prompts[slot]) for slot in (0, 1)]
    runner.execute(step([0, 1], counts, opened=opened))
    for k, _ in runner.kv.layers:  # as if the KV of slot 1 had gone bad
        k[64] = torch.nan
    output = runner.execute(step([0, 1], [1, 1]))
    assert output.slots.tolist() == [0] and output.failed.tolist() == [1] and output.detail
    assert output.tokens.tolist() == [known.answers[0][1]]
    # The scheduler's next step left before it heard: the row is dropped and named again.
    output = runner.execute(step([0, 1], [1, 1]))
    assert output.tokens.tolist() == [known.answers[0][2]] and output.failed.tolist() == [1]
    output = runner.execute(step([0], [1], closed=ints([1])))
    assert output.tokens.tolist() == [known.answers[0][3]] and not len(output.failed)
    runner.slots.check()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_others_are_told_once_a_step_that_it_computes(
    flavour: str, tiny_models: dict[str, Answered]
) -> None:
    runner = load(tiny_models["llama"].path, flavour)
    told: list[int] = []
    runner.when_computing(lambda: told.append(int(runner.slots.known_len[0])))
    runner.execute(step([0], [2], opened=[opening(0, [1, 2], [0])]))
    assert told == [2], "before it has its token"
    runner.execute(step([0], [1]))
    assert told == [2, 3]
    runner.execute(step([], [], closed=ints([0])))
    assert told == [2, 3], "nothing is computed"


def test_a_step_that_only_closes_runs_nothing(tiny_models: dict[str, Answered]) -> None:
    runner = load(tiny_models["llama"].path)
    runner.execute(step([0], [2], opened=[opening(0, [1, 2], [0])]))
    output = runner.execute(step([], [], closed=ints([0])))
    assert not len(output.slots) and output.logprobs is None
    assert not runner.slots.open.any()


def test_a_chunk_in_the_middle_samples_nothing(tiny_models: dict[str, Answered]) -> None:
    known = tiny_models["qwen3"]
    runner = load(known.path)
    prompt = max(known.prompts, key=len)
    output = runner.execute(step([3], [5], opened=[opening(3, prompt, [7, 5, 6])]))
    assert not len(output.slots)
    output = runner.execute(step([3], [len(prompt) - 5]))
    assert output.tokens.tolist() == [known.answers[known.prompts.index(prompt)][0]]


def test_logprobs_come_for_the_rows_that_asked(tiny_models: dict[str, Answered]) -> None:
    runner = load(tiny_models["llama"].path)
    opened = [opening(0, [1], [0]), opening(1, [2], [1], Sampling(temperature=0.0, logprobs=2))]
    output = runner.execute(step([0, 1], [1, 1], opened=opened))
    assert output.logprobs is not None and output.logprobs[0] is None
    entry = output.logprobs[1]
    assert entry is not None and entry.token_id == output.tokens[1] == entry.best[0][0]
    assert len(entry.best) == 2 and entry.best[0][1] == entry.logprob < 0


def test_reset_keeps_kv_or_poisons_it(tiny_models: dict[str, Answered]) -> None:
    known = tiny_models["llama"]
    runner = load(known.path, page_size=4)
    prompt = max(known.prompts, key=len)
    pages = Driver(runner).shared_prefix(prompt, 16)
    runner.reset(keep_kv=True)
    again = Driver(runner)
    again.free_pages = [page for page in again.free_pages if page not in pages]
    answer = again.generate([prompt], 3, cached={0: pages})
    assert answer == [known.answers[known.prompts.index(prompt)][:3]]
    runner.reset()
    assert all(k.isnan().all() and v.isnan().all() for k, v in runner.kv.layers)
    assert Driver(runner).generate([prompt], 3) == answer


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_warm_up_leaves_no_trace(flavour: str, tiny_models: dict[str, Answered]) -> None:
    known = tiny_models["mistral"]
    runner = load(known.path, flavour)
    runner.warm_up()
    assert not runner.slots.open.any()
    assert Driver(runner).generate(known.prompts[:8], 4) == [a[:4] for a in known.answers[:8]]


def test_out_of_memory_in_a_step_is_of_its_rows_alone(
    tiny_models: dict[str, Answered], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(tiny_models["llama"].path)

    def burst(*batch: object) -> torch.Tensor:
        return torch.empty(2**60, dtype=torch.uint8)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", burst)
        output = runner.execute(step([0], [1], opened=[opening(0, [1], [0])]))
    assert output.starved.tolist() == [0] and "does not fit" in output.detail
    output = runner.execute(step([1], [1], closed=ints([0]), opened=[opening(1, [1], [0])]))
    assert len(output.tokens) == 1


def test_a_step_takes_no_python_per_token(tiny_models: dict[str, Answered]) -> None:
    """Counted in lines run: a prompt ten times as long takes no more of them. (The reference loops
    over tiles and blocks of keys.)"""
    runner = load(tiny_models["llama"].path, "cpu")

    def lines(length: int) -> int:
        count = 0

        def trace(frame, event, argument):  # type: ignore[no-untyped-def]
            nonlocal count
            count += event == "line"
            return trace

        runner.reset()
        opened = [opening(0, [1] * length, list(range(-(-length // 16))))]
        sys.settrace(trace)
        try:
            runner.execute(step([0], [length], opened=opened))
        finally:
            sys.settrace(None)
        return count

    few, many = lines(40), lines(400)
    assert many < 1.2 * few, (few, many)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"dtype": "quantized"}, "block-quantized"),
        ({"context_len": 100_000}, "100000"),
        ({"attention": "none such"}, "none such"),
        ({"ops": "none such"}, "none such"),
        ({"load_format": "none such"}, "none such"),
    ],
)
def test_options_that_cannot_be_met_are_named(
    options: dict, words: str, tiny_models: dict[str, Answered]
) -> None:
    with pytest.raises(BadConfig, match=words):
        Runner.load(tiny_models["llama"].path, RunnerOptions(kv_tokens=64, **options))


def test_auto_says_what_it_settled_and_why(tiny_models: dict[str, Answered]) -> None:
    facts = Runner.load(tiny_models["llama"].path, RunnerOptions(kv_tokens=100)).facts
    assert facts.dtype in ("bfloat16", "float32") and facts.page_count == 7
    assert any("operators" in note for note in facts.notes)
    assert any("attention" in note for note in facts.notes)


def test_pool_is_sized_by_memory_but_never_past_its_use() -> None:
    assert fitting_page_count(100, 16, 500, 2, 5000) == 50
    assert fitting_page_count(100, 16, 500, 2, 10**9) == 63
    assert fitting_page_count(100, 16, 500, 2, 50) == 0


def test_pool_on_a_host_is_modest_but_holds_one_context_where_that_fits() -> None:
    assert fitting_page_count(100, 16, 500, 20, 10**9, modest_bytes=5000) == 50
    assert fitting_page_count(100, 16, 500, 20, 10**9, modest_bytes=1000) == 32
    assert fitting_page_count(100, 16, 500, 20, 2000, modest_bytes=1000) == 20


def test_progress_tells_layers(tiny_models: dict[str, Answered]) -> None:
    told: list[tuple[str, int, int]] = []
    options = RunnerOptions(kv_tokens=64)
    Runner.load(tiny_models["llama"].path, options, lambda *now: told.append(now))
    assert told[-1] == ("layers", 4, 4) and [done for _, done, _ in told] == [1, 2, 3, 4]


def test_a_registry_lists_what_it_has() -> None:
    registry: Registry[int] = Registry("numbers")
    registry.register("one", "uno")(1)
    assert registry.get("uno") == 1 and registry.names() == ["one", "uno"]
    assert [(entry.name, entry.origin) for entry in registry.entries()] == [
        ("one", "built in"),
        ("uno", "built in"),
    ]
    with pytest.raises(UnknownName, match="'two'; known are: one, uno"):
        registry.get("two")
    with pytest.raises(ValueError, match="twice"):
        registry.register("one")(2)
    assert "Qwen3ForCausalLM" in MODELS.names() and "qwen3" in MODELS.names()


def test_kernels_import_no_actor_and_no_loop() -> None:
    code = (
        "import sys, kernels.runner; bad = {'actors', 'messages', 'zmq', 'starlette'} & "
        "set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    root = Path(kernels.runner.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr


def test_noise_goes_on_where_a_resumed_sequence_left(tiny_models: dict[str, Answered]) -> None:
    known = tiny_models["qwen2"]
    runner = load(known.path)
    own = Sampling(temperature=1.0, seed=11)
    prompt = known.prompts[5]
    whole = Driver(runner).generate([prompt], 8, sampling=own)[0]
    resumed = Driver(runner).generate(
        [[*prompt, *whole[:4]]], 8, sampling=own, prompt_lens=[len(prompt)]
    )
    assert resumed == [whole]
    assert np.unique(whole).size > 2


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_log_probabilities_of_a_prompt_are_those_of_its_beginnings(
    flavour: str, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models["llama"]
    runner = load(known.path, flavour)
    prompt = (max(known.prompts, key=len) * 9)[:9]
    vocab_size = runner.facts.vocab_size

    def logprob(length: int) -> float:
        """Of prompt[length] behind prompt[:length], as a sampled token's alternatives have it."""
        own = Sampling(temperature=0.0, logprobs=vocab_size)
        output = runner.execute(
            step([7], [length], opened=[opening(7, prompt[:length], [40], own)])
        )
        runner.execute(step([], [], closed=ints([7])))
        assert output.logprobs is not None and output.logprobs[0] is not None
        return dict(output.logprobs[0].best)[prompt[length]]

    expected = [logprob(length) for length in range(1, len(prompt))]
    asked = Sampling(temperature=0.0, prompt_logprobs=2)
    for chunks in ([9], [4, 5], [1, 1, 7], [8, 1]):
        rows: list[TokenLogprobs] = []
        opened = [opening(0, prompt, [0, 1], asked), opening(1, prompt, [2, 3])]
        for count in chunks:
            output = runner.execute(step([1, 0], [count, count], opened=opened))
            opened = []
            for part in output.prompts:
                assert part.slot == 0 and part.index == len(rows)
                rows += part.logprobs
        assert [row.token_id for row in rows] == prompt
        assert [row.logprob for row in rows[1:]] == pytest.approx(expected, abs=1e-4)
        assert all(len(row.best) == 2 for row in rows[1:])
        assert output.tokens.tolist() == [output.tokens[0]] * 2
        runner.execute(step([], [], closed=ints([0, 1])))


@pytest.mark.real
def test_the_fused_forward_tells_of_every_prompt_token(smollm2: Path) -> None:
    runner = Runner.load(smollm2, RunnerOptions(slot_count=2, kv_tokens=256, context_len=128))
    prompt = [504, 3575, 282, 4649, 314, 7042, 30]
    own = Sampling(temperature=0.0, prompt_logprobs=1)

    def told() -> list[tuple[int, int]]:
        output = runner.execute(step([0], [7], opened=[opening(0, prompt, [0], own)]))
        runner.reset()
        return [(row.token_id, row.best[0][0]) for row in output.prompts[0].logprobs[1:]]

    fused = told()
    runner.model.fused = None
    assert told() == fused
    assert fused[4] == (7042, 7042)  # " Paris"
