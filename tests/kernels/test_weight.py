"""Weights as files hold them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kernels.quant.weight import BLOCK_FORMATS, BlockWeight, DenseWeight, stack


def blocks(name: str, n: int, k: int, seed: int = 0) -> BlockWeight:
    """Random bytes with sane scales; the formats that the package can write are written by it."""
    kind, block_len, block_bytes = BLOCK_FORMATS[name]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, k // block_len, block_bytes), np.uint8)
    half = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    if name == "q6_k":
        raw[:, :, -2:] = half
    else:
        raw[:, :, :2] = half
        if name in ("q4_1", "q5_1", "q4_k", "q5_k"):
            raw[:, :, 2:4] = half
    return BlockWeight(name, torch.from_numpy(raw.reshape(n, -1)), (n, k))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_rows_and_stacks_commute_with_dequantization(name: str) -> None:
    first, second = blocks(name, 6, 512, 1), blocks(name, 3, 512, 2)
    whole = torch.cat((first.dequantize(), second.dequantize()))
    stacked = stack([first, second])
    assert isinstance(stacked, BlockWeight) and stacked.shape == (9, 512)
    assert torch.equal(stacked.dequantize(), whole)
    index = torch.tensor([8, 0, 3, 3])
    assert torch.equal(stacked.rows(index).dequantize(), whole[index])
    assert whole.isfinite().all() and whole.std() > 0


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1"])
def test_dequantized_is_near_what_was_quantized(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, BLOCK_FORMATS[name][0])
    weight = BlockWeight(name, torch.from_numpy(raw), (4, 64))
    error = (weight.dequantize() - torch.from_numpy(values)).abs().max()
    assert error < (0.02 if name == "q8_0" else 0.4)


def test_mixed_formats_stack_as_dense() -> None:
    parts = [blocks("q8_0", 2, 64), DenseWeight(torch.randn(3, 64, dtype=torch.bfloat16))]
    stacked = stack(parts)
    assert isinstance(stacked, DenseWeight) and stacked.format == "float32"
    assert torch.equal(stacked.data, torch.cat([part.dequantize() for part in parts]))


def test_dense_of_one_dtype_keeps_it() -> None:
    parts = [DenseWeight(torch.randn(2, 8, dtype=torch.bfloat16)) for _ in range(2)]
    assert stack(parts).format == "bfloat16"
    assert stack(parts[:1]) is parts[0]


def test_bytes_that_do_not_fit_the_shape_are_our_bug() -> None:
    with pytest.raises(AssertionError):
        BlockWeight("q4_0", torch.zeros(2, 17, dtype=torch.uint8), (2, 32))
