"""Products of the compiled CPU path against float64, in every form of weight."""

from __future__ import annotations

import pytest
import torch

from kernels.ops.cpu.native import FORMATS
from kernels.quant.weight import DenseWeight, Weight
from tests.kernels.cpu_cases import block_weight, compiled_ops, generator, relative_error, threads

OPS = compiled_ops()
ROWS = [*range(1, 18), 31, 63, 64, 65, 70, 130]
# Of the result's norm: int8 activations, bfloat16 weights and activations, float32.
TOLERANCE = {"quantized": 1.5e-2, "bfloat16": 6e-3, "float32": 2e-6}


def weight_of(kind: str, n: int, k: int) -> Weight:
    if kind == "dense":
        return DenseWeight(torch.randn((n, k), generator=generator(n + k)))
    return block_weight(kind, n, k)


@pytest.mark.parametrize("thread_count", [1, 2])
@pytest.mark.parametrize("dtype", ["quantized", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["dense", *FORMATS])
def test_products_are_close_to_float64(kind: str, dtype: str, thread_count: int) -> None:
    k = 512 if kind.endswith("_k") else 96
    weight = weight_of(kind, 90, k)
    bias = torch.randn(90, generator=generator(1))
    prepared = OPS.prepare_linear(weight, bias, dtype)
    exact = weight.dequantize().double()
    tolerance = TOLERANCE[
        "bfloat16" if kind in ("dense", "q6_k") and dtype == "quantized" else dtype
    ]
    with threads(OPS, thread_count):
        for rows in ROWS if kind in ("dense", "q4_1", "q8_0") else (1, 9, 70):
            x = torch.randn((rows, k), generator=generator(rows))
            got = OPS.linear(prepared, x)
            assert got.shape == (rows, 90) and got.dtype == torch.float32
            assert relative_error(got, x.double() @ exact.T + bias.double()) < tolerance


@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 300])
@pytest.mark.parametrize("k", [1, 2, 31, 33, 100])
def test_dense_products_take_any_shape(n: int, k: int) -> None:
    weight = weight_of("dense", n, k)
    for dtype in ("bfloat16", "float32"):
        prepared = OPS.prepare_linear(weight, None, dtype)
        for rows in (1, 2, 3, 8, 13):
            x = torch.randn((rows, k), generator=generator(k))
            want = x.double() @ weight.dequantize().double().T
            assert relative_error(OPS.linear(prepared, x), want) < 1.2e-2


@pytest.mark.parametrize("k", [32, 64, 576, 1536])
def test_block_products_take_any_count_of_blocks(k: int) -> None:
    for kind in ("q4_0", "q4_1", "q8_0"):
        weight = block_weight(kind, 50, k)
        x = torch.randn((5, k), generator=generator(k))
        got = OPS.linear(OPS.prepare_linear(weight, None, "quantized"), x)
        assert relative_error(got, x.double() @ weight.dequantize().double().T) < 1.5e-2


def test_large_weights_are_packed_in_parts() -> None:
    weight = weight_of("dense", 4096 * 2 + 40, 48)
    x = torch.randn((3, 48), generator=generator(5))
    got = OPS.linear(OPS.prepare_linear(weight, None, "float32"), x)
    assert relative_error(got, x.double() @ weight.dequantize().double().T) < 2e-6


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("dense", "float32"), ("dense", "bfloat16"), ("q4_1", "quantized"), ("q8_0", "quantized")],
)
def test_a_row_has_the_same_bits_alone_and_in_any_company(kind: str, dtype: str) -> None:
    prepared = OPS.prepare_linear(weight_of(kind, 600, 192), None, dtype)
    x = torch.randn((150, 192), generator=generator(3))
    with threads(OPS, 1):
        alone = torch.cat([OPS.linear(prepared, row[None]) for row in x])
    for thread_count in (1, 2):
        with threads(OPS, thread_count):
            for rows in (2, 3, 4, 5, 6, 7, 8, 9, 64, 65, 71, 150):
                for first in (0, 150 - rows):
                    part = slice(first, first + rows)
                    assert torch.equal(OPS.linear(prepared, x[part]), alone[part]), (rows, first)


def test_no_rows_give_no_rows() -> None:
    prepared = OPS.prepare_linear(weight_of("q4_1", 40, 64), None, "quantized")
    assert OPS.linear(prepared, torch.empty((0, 64))).shape == (0, 40)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, 1e-42])
@pytest.mark.parametrize("kind", ["q4_1", "q8_0", "dense"])
def test_a_hostile_row_spoils_no_other(kind: str, value: float) -> None:
    prepared = OPS.prepare_linear(weight_of(kind, 40, 64), None, "quantized")
    x = torch.randn((10, 64), generator=generator(4))
    want = OPS.linear(prepared, x)
    x[3, 5] = value
    got = OPS.linear(prepared, x)
    others = torch.arange(10) != 3
    assert torch.equal(got[others], want[others])
    if value != value or abs(value) == float("inf"):
        assert not got[3].isfinite().any()
    else:
        assert not got[3].isnan().any()


def test_rows_of_zeros_are_multiplied_to_zeros() -> None:
    for kind in ("q4_0", "q4_1", "q8_0"):
        prepared = OPS.prepare_linear(weight_of(kind, 40, 64), None, "quantized")
        assert torch.equal(OPS.linear(prepared, torch.zeros((3, 64))), torch.zeros((3, 40)))


@pytest.mark.parametrize("kind", [*FORMATS, "float32", "bfloat16", "float16", "float64"])
def test_embedding_rows_are_the_weights_own(kind: str) -> None:
    if kind in FORMATS:
        weight: Weight = block_weight(kind, 70, 256)
    else:
        values = torch.randn((70, 256), generator=generator(2))
        weight = DenseWeight(values.to(getattr(torch, kind)))
    ids = torch.tensor([69, 0, 3, 3, 41])
    got = OPS.embed(OPS.prepare_embedding(weight, "quantized"), ids)
    torch.testing.assert_close(got, weight.dequantize()[ids], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [-1, 70, 2**40])
def test_an_id_outside_the_table_is_refused(bad: int) -> None:
    embedding = OPS.prepare_embedding(block_weight("q8_0", 70, 64), "quantized")
    with pytest.raises(ValueError, match="out of range"):
        OPS.embed(embedding, torch.tensor([1, bad]))
