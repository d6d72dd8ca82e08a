"""Masks of bits: every set of operators bars the same tokens, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.ops.masks import bar
from tests.kernels.cpu_cases import compiled_ops

OPS = {"torch": bar, "compiled": compiled_ops().bar}


@pytest.mark.parametrize("flavour", OPS)
@given(
    vocab_size=st.sampled_from([1, 15, 16, 17, 31, 32, 33, 500]),
    row_count=st.integers(1, 5),
    spare=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_what_a_bit_does_not_allow_is_barred(
    flavour: str, vocab_size: int, row_count: int, spare: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(row_count, vocab_size)).astype(np.float32))
    rows = rng.permutation(row_count)[: rng.integers(0, row_count + 1)]
    words = rng.integers(-(2**31), 2**31, (len(rows), -(-vocab_size // 32) + spare))
    words = words.astype(np.int32)
    expected = logits.clone()
    for row, word in zip(rows.tolist(), words, strict=True):
        for token in range(vocab_size):
            if not int(word[token // 32]) >> token % 32 & 1:
                expected[row, token] = -torch.inf
    OPS[flavour](logits, torch.from_numpy(rows), torch.from_numpy(words))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("flavour", OPS)
def test_what_is_no_number_stays_none(flavour: str) -> None:
    logits = torch.full((2, 40), torch.nan)
    words = torch.zeros((1, 2), dtype=torch.int32)
    OPS[flavour](logits, torch.tensor([1]), words)
    assert logits.isnan().all()
