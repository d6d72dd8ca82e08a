"""Operators for GPUs agree with the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.ops.base import Heads, Ops
from kernels.ops.reference import ReferenceOps
from kernels.quant.weight import DenseWeight

pytestmark = pytest.mark.gpu
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def ops_of(device: torch.device):
    from kernels.ops.triton.ops import TritonOps

    return TritonOps(device)


def far(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative distance; NaN never passes."""
    out, wanted = out.double().cpu(), wanted.double().cpu()
    return float((out - wanted).norm() / wanted.norm().clamp(min=1e-30))


def noise(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("length", [64, 96, 576, 4096])
def test_norms_agree(device: torch.device, dtype: torch.dtype, length: int) -> None:
    ops, reference = ops_of(device), ReferenceOps(torch.device("cpu"))
    x, residual = (noise(5, length, device=device, dtype=dtype, seed=n) for n in (0, 1))
    weight = torch.rand(length, device=device) + 0.5
    wide = x.float().cpu()
    assert (
        far(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(wide, weight.cpu(), 1e-5))
        < (LIMITS[dtype])
    )
    total = wide + residual.float().cpu()
    out = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert far(residual, total) < LIMITS[dtype]
    assert far(out, reference.rms_norm(total, weight.cpu(), 1e-5)) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_silu_mul_agrees(device: torch.device, dtype: torch.dtype) -> None:
    x = noise(3, 2 * 2500, device=device, dtype=dtype)
    gate, up = x.float().cpu().chunk(2, dim=-1)
    assert far(ops_of(device).silu_mul(x), torch.nn.functional.silu(gate) * up) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [Heads(4, 2, 64), Heads(3, 1, 96), Heads(9, 3, 128)], ids=str)
def test_rope_write_agrees_and_padding_writes_nothing(
    device: torch.device, dtype: torch.dtype, normed: bool, heads: Heads
) -> None:
    rows = 70
    qkv = noise(rows, heads.qkv_len, device=device, dtype=dtype)
    positions = torch.arange(rows, dtype=torch.int32, device=device) * 3
    cos_sin = noise(300, heads.dim, device=device, dtype=torch.float32)
    norms = [torch.rand(heads.dim, device=device) + 0.5 for _ in range(2)] if normed else [None] * 2
    write = torch.randperm(100, device=device)[:rows]
    pools = [
        torch.full((100, heads.kv, heads.dim), torch.nan, device=device, dtype=dtype)
        for _ in range(4)
    ]
    reference = ReferenceOps(device)
    arguments = (qkv.clone(), positions, cos_sin, pools[0], pools[1], write, heads, *norms, 1e-6)
    wanted = reference.rope_write(*arguments)
    write = write.clone()
    write[-2:] = -1
    out = ops_of(device).rope_write(
        qkv, positions, cos_sin, pools[2], pools[3], write, heads, *norms, 1e-6
    )
    assert far(out, wanted) < LIMITS[dtype]
    kept = write[:-2]
    assert far(pools[2][kept], pools[0][kept]) < LIMITS[dtype]
    assert far(pools[3][kept], pools[1][kept]) == 0.0
    untouched = torch.ones(100, dtype=torch.bool, device=device)
    untouched[kept] = False
    assert pools[2][untouched].isnan().all() and pools[3][untouched].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (130, 576), (256, 1536), (64, 4096)], ids=str)
def test_one_row_products_agree(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    n, k = shape
    ops = ops_of(device)
    name = str(dtype).removeprefix("torch.")
    weight = noise(2 * n, k, device=device, dtype=dtype)
    bias = noise(2 * n, device=device, dtype=dtype)
    x = noise(1, k, device=device, dtype=dtype, seed=3)
    gain = torch.rand(k, device=device) + 0.5
    w64, x64, b64 = weight.double(), x.double(), bias.double()
    plain = ops.prepare_linear(DenseWeight(weight), None, name)
    biased = ops.prepare_linear(DenseWeight(weight), bias, name)
    limit = LIMITS[dtype]
    assert far(ops.linear(biased, x), x64 @ w64.t() + b64) < limit
    assert far(ops.linear_float32(plain, x), x64 @ w64.t()) < limit
    normed = x64 * torch.rsqrt(x64.square().mean() + 1e-5) * gain.double()
    gate, up = (normed @ w64.t()).chunk(2, dim=-1)
    out = torch.full((1, n), torch.nan, device=device, dtype=dtype)
    ops.row(plain, x, out, gain, 1e-5, gated=True)
    assert far(out, torch.nn.functional.silu(gate) * up) < limit
    residual = noise(1, 2 * n, device=device, dtype=dtype, seed=5)
    wanted = residual.double() + x64 @ w64.t()
    assert far(ops.row(plain, x, residual, add=True), wanted) < limit


def test_the_flavour_keeps_the_whole_contract(device: torch.device) -> None:
    ops = ops_of(device)
    missing = [name for name in vars(Ops) if not name.startswith("_") and not hasattr(ops, name)]
    assert not missing, missing
