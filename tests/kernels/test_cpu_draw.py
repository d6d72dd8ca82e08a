"""The compiled draw against a dull one in float64 that sorts everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.ops.base import Filters
from tests.kernels.cpu_cases import compiled_ops, generator, threads

OPS = compiled_ops()
EDGE = 2e-5  # of the whole mass: what rounding in float32 may tip


def drawn(
    logits: Tensor,
    noise: float,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    """One token from each row, all with the same settings."""
    count = logits.shape[0]
    filters = Filters(
        temperature=torch.full((count,), temperature, dtype=torch.float32),
        top_k=torch.full((count,), top_k or logits.shape[1], dtype=torch.int64),
        top_p=torch.full((count,), top_p, dtype=torch.float64),
        min_p=torch.full((count,), min_p, dtype=torch.float64),
    )
    noises = torch.full((count,), noise, dtype=torch.float64)
    kept = logits.clone()
    tokens = OPS.draw(logits, torch.arange(count), filters, noises)
    assert torch.equal(logits.nan_to_num(7.0), kept.nan_to_num(7.0))
    return tokens.tolist()


def distribution(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    row = row.astype(np.float64)
    weights = np.exp((row - row.max()) / temperature)
    order = np.lexsort((np.arange(len(row)), -row))
    kept = order[: top_k or len(row)]
    if top_p < 1:
        below = weights[kept].cumsum() - weights[kept]
        kept = kept[: max(1, int((below < top_p * weights[kept].sum()).sum()))]
    kept = kept[weights[kept] >= min_p]
    filtered = np.zeros_like(weights)
    filtered[kept] = weights[kept]
    return filtered / filtered.sum()


@settings(max_examples=200)
@given(
    n=st.sampled_from([1, 2, 15, 63, 64, 65, 700, 5000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    levels=st.sampled_from([None, 3]),  # few levels: many equal weights
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 50, 699, 4000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.95, 0.99999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    noise=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 2**31),
)
def test_a_draw_lies_where_the_dull_distribution_has_it(
    n: int,
    spread: float,
    levels: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    noise: float,
    seed: int,
) -> None:
    logits = torch.randn((3, n), generator=generator(seed)) * spread
    if levels is not None:
        logits = (logits * levels).round() / levels
    top_k = min(top_k, n)
    tokens = drawn(logits, noise, temperature, top_k, top_p, min_p)
    for row, token in zip(logits.numpy(), tokens, strict=True):
        # A filter's edge may be tipped by rounding: one of these must fit.
        fits = []
        for slack in (0.0, -1e-6, 1e-6):
            edge_p = min(max(top_p * (1 + slack), 1e-9), 1.0) if top_p < 1 else 1.0
            weights = distribution(row, temperature, top_k, edge_p, min(min_p * (1 + slack), 1.0))
            high = weights.cumsum()[token]
            fits.append(high - weights[token] - EDGE <= noise <= high + EDGE)
        assert any(fits), (token, fits)


def test_top_k_keeps_the_first_of_equals() -> None:
    logits = torch.zeros((1, 1000))
    logits[0, 500:] = 1.0
    for noise in (0.0, 0.5, 0.999999):
        assert 500 <= drawn(logits, noise, top_k=10)[0] < 510
    assert drawn(logits, 0.9999999999, top_k=10) == [509]


def test_a_token_that_is_barred_is_never_drawn() -> None:
    logits = torch.full((1, 200), -torch.inf)
    logits[0, [7, 150]] = 0.0
    assert drawn(logits, 0.0) == [7]
    assert drawn(logits, 0.4999) == [7] and drawn(logits, 0.5) == [150]
    assert drawn(logits, float(np.nextafter(1, 0))) == [150]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_no_numbers_do_not_crash_and_spoil_no_other(value: float) -> None:
    logits = torch.randn((3, 300), generator=generator(1))
    want = drawn(logits, 0.3, top_p=0.9)
    logits[1] = value
    got = drawn(logits, 0.3, top_p=0.9)
    assert [got[0], got[2]] == [want[0], want[2]] and 0 <= got[1] < 300


def test_a_row_is_drawn_the_same_in_any_company_and_on_any_threads() -> None:
    logits = torch.randn((40, 3000), generator=generator(2)) * 3
    with threads(OPS, 1):
        alone = [drawn(row[None], 0.77, top_p=0.9, top_k=100)[0] for row in logits]
    for count in (1, 2):
        with threads(OPS, count):
            assert drawn(logits, 0.77, top_p=0.9, top_k=100) == alone
            assert drawn(logits.flip(0), 0.77, top_p=0.9, top_k=100) == alone[::-1]


def test_frequencies_follow_the_weights() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    tokens = [drawn(logits, (step + 0.5) / 800)[0] for step in range(800)]
    assert np.bincount(tokens, minlength=4).tolist() == [400, 200, 100, 100]
