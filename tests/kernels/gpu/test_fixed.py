"""What is said to have one order of sums has the same bits in any company; and agrees with the
reference. Whole models in bfloat16: tokens and log-probabilities alone, in a batch, in chunks,
after a prefix that is cached, after a retraction, with graphs and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.batch import Sampling
from kernels.ops.base import Heads
from kernels.quant.weight import DenseWeight
from kernels.runner import Runner, RunnerOptions
from tests.kernels.conftest import Answered
from tests.kernels.driver import Driver
from tests.kernels.gpu.cases import Case, backend_of

pytestmark = pytest.mark.gpu
COUNTS = (1, 2, 63, 64, 65, 128, 200, 700)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (130, 576), (256, 4096), (4096, 1024)], ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_a_row_of_a_product_is_the_same_in_any_company(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], wide: bool
) -> None:
    from kernels.ops.triton.fixed_ops import FixedOps

    if device.type == "cpu" and (max(shape) > 1000 or dtype != torch.float32):
        pytest.skip("too much for an interpreter")
    ops = FixedOps(device)
    name = {torch.bfloat16: "bfloat16", torch.float32: "float32"}[dtype]
    weight, bias = noise(*shape), noise(shape[0])
    prepared = ops.prepare_linear(DenseWeight(weight), bias, name)
    multiply = ops.linear_float32 if wide else ops.linear
    counts = COUNTS if device.type == "cuda" else COUNTS[:5]
    x = noise(max(counts), shape[1], seed=1).to(device, dtype)
    whole = multiply(prepared, x)
    wanted = x.double().cpu() @ weight.to(dtype).double().t() + bias.to(dtype).double()
    error = float((whole.double().cpu() - wanted).norm() / wanted.norm())
    assert error < (1e-5 if dtype == torch.float32 else 5e-3)
    for count in counts:
        for first in {0, max(counts) - count}:
            part = multiply(prepared, x[first : first + count].contiguous())
            assert torch.equal(part, whole[first : first + count]), (count, first)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("pool_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads", [Heads(8, 2, 128), Heads(3, 1, 64), Heads(4, 4, 256)], ids=str)
def test_a_query_is_the_same_alone_and_in_a_chunk(
    device: torch.device, heads: Heads, pool_dtype: torch.dtype | None, window: int | None
) -> None:
    """The last queries of a prompt as one chunk, as several, and each as a decode row."""
    lengths = (5, 300, 512, 513, 2100) if device.type == "cuda" else (5, 520)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tail = 5
    case = Case([(tail, n) for n in lengths], heads, 16, dtype, window, pool_dtype=pool_dtype)
    batch, q, k, v = case.make(device)
    shape = case.shape(device)
    prompt = backend_of("fixed", shape)
    prompt.plan(batch)
    together = prompt.attend(0, q, k, v).view(len(lengths), tail, heads.query, heads.dim)
    wanted = case.expected(batch, q, k, v).view(together.shape)
    assert float((together.double() - wanted).norm() / wanted.norm()) < 1e-2
    for nth in range(tail):
        rows = Case([(1, n - tail + 1 + nth) for n in lengths], heads, 16, dtype, window)
        one, _, _, _ = rows.make(device)
        one.page_table[:] = batch.page_table[:, : one.page_table.shape[1]]
        decode = backend_of("fixed", shape)
        decode.plan(one)
        own = q.view(together.shape)[:, nth].contiguous()
        assert torch.equal(decode.attend(0, own, k, v), together[:, nth]), nth
    half = Case([(2, n - 3) for n in lengths], heads, 16, dtype, window)
    part, _, _, _ = half.make(device)
    part.page_table[:] = batch.page_table[:, : part.page_table.shape[1]]
    prompt.plan(part)
    own = q.view(together.shape)[:, :2].reshape(-1, heads.query, heads.dim)
    assert torch.equal(prompt.attend(0, own, k, v).view(-1, 2, *q.shape[1:]), together[:, :2])


def load(path: Path, **options: object) -> Runner:
    settings: dict = {
        "dtype": "bfloat16",
        "device": "cuda",
        "kv_tokens": 8192,
        "step_tokens_max": 8192,
        "lazy_graphs": True,
        "deterministic": True,
    }
    settings.update(options)
    runner = Runner.load(path, RunnerOptions(**settings))
    runner.kv.forget()
    return runner


class Told(Driver):
    """Keeps the log-probabilities of what it generates."""

    def generate(self, prompts: list[list[int]], *rest: int, **options: object):
        self.told: dict[int, list[float]] = {}
        tokens = super().generate(prompts, *rest, **options)
        return tokens, [self.told[index] for index in range(len(prompts))]

    def execute(self, step, running, by_slot) -> None:
        output = self.runner.execute(step)
        assert not len(output.failed), output.detail
        logprobs = output.logprobs or [None] * len(output.slots)
        for slot, token, entry in zip(output.slots, output.tokens, logprobs, strict=True):
            index = by_slot[int(slot)]
            running[index].tokens.append(int(token))
            if entry is not None:
                self.told.setdefault(index, []).append(entry.logprob)


NEW = 24


def kinds_of(count: int) -> list[Sampling]:
    """Greedy and drawn, each with log-probabilities."""
    return [
        Sampling(temperature=0.8 * (n % 2), seed=n, logprobs=0, ignore_eos=True)
        for n in range(count)
    ]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_company_chunks_cache_and_graphs_change_no_bit(
    cuda: torch.device, tiny_models: dict[str, Answered], kv_dtype: str
) -> None:
    names = tiny_models if kv_dtype == "auto" else ["qwen3", "gemma2"]
    for name in names:
        model = tiny_models[name]
        prompts = [*model.prompts[:9], (model.prompts[3] * 80)[:450]]
        kinds = kinds_of(len(prompts))
        runner = load(model.path, kv_dtype=kv_dtype)
        assert "attention 'fixed'" in runner.facts.notes
        together = Told(runner).generate(prompts, NEW, sampling=kinds)
        alone = Told(runner, seed=1).generate(prompts, NEW, sampling=kinds, together=1)
        assert alone == together, (name, "alone")
        chunked = Told(runner, seed=2).generate(prompts, NEW, sampling=kinds, chunk=7)
        assert chunked == together, (name, "in chunks")
        plain = Told(load(model.path, kv_dtype=kv_dtype, graphs=False))
        assert plain.generate(prompts, NEW, sampling=kinds) == together, (name, "without graphs")


def test_cached_prefixes_and_retractions_change_no_bit(
    cuda: torch.device, tiny_models: dict[str, Answered]
) -> None:
    for name in ("llama", "qwen3", "gemma3"):
        model = tiny_models[name]
        prompts = [prompt for prompt in model.prompts if len(prompt) > 20][:6]
        kinds = kinds_of(len(prompts))
        runner = load(model.path)
        tokens, told = Told(runner).generate(prompts, NEW, sampling=kinds)
        driver = Told(runner, seed=1)
        cached = {index: driver.shared_prefix(prompts[index], 16) for index in range(3)}
        assert driver.generate(prompts, NEW, sampling=kinds, cached=cached) == (tokens, told), name
        # Retracted after 11 tokens: what was decoded is computed again as a prompt.
        resumed = [[*prompt, *answer[:11]] for prompt, answer in zip(prompts, tokens, strict=True)]
        lens = [len(prompt) for prompt in prompts]
        again, rest = Told(runner, seed=2).generate(resumed, NEW, sampling=kinds, prompt_lens=lens)
        assert again == tokens, (name, "retracted")
        assert rest == [each[11:] for each in told], (name, "retracted")
