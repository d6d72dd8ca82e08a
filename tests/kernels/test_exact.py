"""In float32 on a CPU logits have the same bits, however a sequence was batched, cut or placed.

The base line is each prompt alone, in one chunk. Every other way must give the same bytes, with
pools that are NaN wherever nobody has written.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.batch import Sampling
from kernels.ops import exact
from tests.kernels.conftest import Answered
from tests.kernels.driver import FLAVOURS, GREEDY, WIDE, Driver, load

MODELS = ("llama", "mistral", "qwen2", "qwen3")
PROMPT_COUNT, NEW_LEN = 12, 6


def prompts(known: Answered) -> list[list[int]]:
    """Some of the oracle's, and one of several key blocks."""
    long = np.random.default_rng(3).integers(0, 384, 300).tolist()
    return [*known.prompts[:PROMPT_COUNT], long]


@pytest.fixture(scope="module", params=[(f, m) for f in FLAVOURS for m in MODELS], ids="-".join)
def base_line(
    request: pytest.FixtureRequest, tiny_models: dict[str, Answered]
) -> tuple[str, Answered, dict[int, list[bytes]], list[list[int]]]:
    flavour, model = request.param
    known = tiny_models[model]
    driver = Driver(load(known.path, flavour), record=True)
    answers = driver.generate(prompts(known), NEW_LEN, together=1)
    return flavour, known, driver.logits, answers


BaseLine = tuple[str, Answered, dict[int, list[bytes]], list[list[int]]]


@pytest.mark.parametrize("chunk", [1, 7, WIDE])
def test_chunks_and_company_change_no_bit(base_line: BaseLine, chunk: int) -> None:
    flavour, known, logits, answers = base_line
    driver = Driver(load(known.path, flavour, page_size=4), seed=chunk, record=True)
    asked = prompts(known)
    if chunk == 1:
        asked = asked[:PROMPT_COUNT]
    assert driver.generate(asked, NEW_LEN, chunk=chunk) == answers[: len(asked)]
    assert driver.logits == {index: logits[index] for index in range(len(asked))}


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_page_size_and_place_change_no_bit(base_line: BaseLine, page_size: int) -> None:
    flavour, known, logits, answers = base_line
    driver = Driver(load(known.path, flavour, page_size=page_size), seed=page_size, record=True)
    assert driver.generate(prompts(known), NEW_LEN, chunk=33, together=5) == answers
    assert driver.logits == logits


def test_cached_pages_change_no_bit(base_line: BaseLine) -> None:
    flavour, known, logits, answers = base_line
    driver = Driver(load(known.path, flavour, page_size=4), record=True)
    asked = prompts(known)
    cached = {}
    for index, prompt in enumerate(asked):
        cached_len = (len(prompt) - 1) // 4 * 4  # the last prompt token is always computed
        if cached_len:
            cached[index] = driver.shared_prefix(prompt, cached_len)
    assert len(cached) > 6
    assert driver.generate(asked, NEW_LEN, cached=cached) == answers
    assert driver.logits == logits


def test_a_retracted_sequence_resumes_with_the_same_bits(base_line: BaseLine) -> None:
    flavour, known, logits, answers = base_line
    driver = Driver(load(known.path, flavour), record=True)
    asked = prompts(known)
    resumed = [[*prompt, *answer[:3]] for prompt, answer in zip(asked, answers, strict=True)]
    lens = [len(prompt) for prompt in asked]
    assert driver.generate(resumed, NEW_LEN, chunk=50, prompt_lens=lens) == answers
    assert driver.logits == {index: logits[index][3:] for index in logits}


def test_seeded_draws_are_the_same_alone_and_in_company(base_line: BaseLine) -> None:
    flavour, known, _, _ = base_line
    asked = prompts(known)
    each = [
        Sampling(temperature=0.5 + 0.1 * (n % 7), top_p=0.9, top_k=n % 4 * 20, seed=n, choice=n % 3)
        for n in range(len(asked))
    ]
    each[3] = GREEDY
    runner = load(known.path, flavour)
    alone = Driver(runner).generate(asked, NEW_LEN, together=1, sampling=each)
    assert Driver(runner, seed=1).generate(asked, NEW_LEN, chunk=9, sampling=each) == alone
    assert len({tuple(answer) for answer in alone}) == len(alone)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_two_threads_change_no_bit_between_company_and_none(
    flavour: str, tiny_models: dict[str, Answered]
) -> None:
    known = tiny_models["llama"]
    threads = torch.get_num_threads()
    try:
        driver = Driver(load(known.path, flavour, threads=2), record=True)
        answers = driver.generate(known.prompts[:6], 3, together=1)
        alone = driver.logits
        assert driver.generate(known.prompts[:6], 3, chunk=5) == answers
        assert driver.logits == alone
    finally:
        torch.set_num_threads(threads)


def test_exponential_is_right_and_has_no_tail() -> None:
    x = torch.cat((torch.linspace(-86.9, 80, 100_001), torch.tensor([0.0, -87.5, -torch.inf])))
    y = exact.exp(x)
    assert y[-3:].tolist() == [1.0, 0.0, 0.0]
    error = (y[:-3].double() / x[:-3].double().exp() - 1).abs().max()
    assert error < 3e-7
    for length in (1, 7, 31, 33):
        assert torch.equal(exact.exp(x[5 : 5 + length]), y[5 : 5 + length])
    assert exact.exp(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("length", [1, 2, 3, 31, 576])
def test_folded_sum_is_a_sum(length: int) -> None:
    x = torch.randn(5, length)
    assert torch.allclose(exact.fold_sum(x), x.sum(-1, keepdim=True), atol=1e-4)
    assert torch.equal(exact.fold_sum(x)[2], exact.fold_sum(x[2:3])[0])


@pytest.mark.parametrize("rows", [1, exact.TILE])
@pytest.mark.parametrize(("n", "k"), [(96, 64), (49, 30), (1, 7)])
def test_tiled_product_is_a_product_and_knows_no_company(n: int, k: int, rows: int) -> None:
    weight, x = torch.randn(n, k), torch.randn(37, k)
    assert exact.tile_rows(weight) in (1, exact.TILE)
    whole = exact.linear(x, weight, rows)
    assert torch.allclose(whole, x @ weight.t(), atol=1e-4)
    if exact.tile_rows(weight) >= rows:
        for begin, end in ((0, 1), (5, 6), (3, 29), (36, 37)):
            assert torch.equal(exact.linear(x[begin:end], weight, rows), whole[begin:end])
