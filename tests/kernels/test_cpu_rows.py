"""The small compiled operators against the reference: norms, rotary embedding, SiLU."""

from __future__ import annotations

import pytest
import torch

from kernels.ops.base import OPS as REGISTRY
from kernels.ops.base import Heads
from tests.kernels.cpu_cases import CPU, compiled_ops, generator, relative_error, threads

OPS = compiled_ops()
REFERENCE = REGISTRY.get("reference")(CPU)


@pytest.mark.parametrize("thread_count", [1, 2])
@pytest.mark.parametrize("n", [1, 15, 16, 64, 100, 576, 4096])
def test_norms_are_close_to_float64(n: int, thread_count: int) -> None:
    weight = torch.randn(n, generator=generator(0))
    for rows in (1, 3, 70):
        x = torch.randn((rows, n), generator=generator(1)) * 3
        residual = torch.randn((rows, n), generator=generator(2))
        added = residual.clone()
        with threads(OPS, thread_count):
            got = OPS.rms_norm(x, weight, 1e-5)
            got_added = OPS.add_rms_norm(x, added, weight, 1e-5)
        for result, source in ((got, x), (got_added, x + residual)):
            wide = source.double()
            want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
            assert relative_error(result, want) < 1e-6
        assert torch.equal(added, x + residual)


@pytest.mark.parametrize("n", [1, 16, 40, 1536])
def test_silu_is_close_to_float64(n: int) -> None:
    for rows in (1, 2, 33):
        x = torch.randn((rows, 2 * n), generator=generator(n)) * 4
        gate, up = x.double().chunk(2, dim=-1)
        want = torch.nn.functional.silu(gate) * up
        assert relative_error(OPS.silu_mul(x), want) < 1e-6


def test_silu_of_extremes_neither_overflows_nor_hides_a_nan() -> None:
    x = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 1e30, torch.nan, torch.inf]])
    ones = torch.ones_like(x)
    got = OPS.silu_mul(torch.cat((x, ones), dim=-1))[0]
    assert got[:2].abs().max() < 1e-8 and got[3] == 0.0
    torch.testing.assert_close(
        got[[2, 4, 5]], torch.tensor([-5.3e-37, 88.0, 1e30]), rtol=0.1, atol=0
    )
    assert got[6].isnan() and got[7] == torch.inf


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("thread_count", [1, 2])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(4, 1, 80), Heads(2, 2, 96)])
def test_rope_rotates_and_writes_only_where_it_is_told(
    heads: Heads, normed: bool, thread_count: int, pool_dtype: torch.dtype
) -> None:
    rows, pool_rows = 37, 100
    random = generator(3)
    qkv = torch.randn((rows, heads.qkv_len), generator=random)
    positions = torch.randint(0, 50, (rows,), generator=random).int()
    cos_sin = torch.randn((50, heads.dim), generator=random)
    write_index = torch.randperm(pool_rows, generator=random)[:rows]
    norms = [torch.randn(heads.dim, generator=random) if normed else None for _ in range(2)]
    results = []
    for ops, dtype in ((OPS, pool_dtype), (REFERENCE, torch.float32)):
        pools = [torch.full((pool_rows, heads.kv, heads.dim), torch.nan).to(dtype) for _ in "kv"]
        with threads(OPS, thread_count):
            q = ops.rope_write(
                qkv.clone(), positions, cos_sin, *pools, write_index, heads, *norms, 1e-6
            )
        assert q.shape == (rows, heads.query, heads.dim)
        results.append((q, *pools))
    untouched = torch.ones(pool_rows, dtype=torch.bool)
    untouched[write_index] = False
    for number, (got, want) in enumerate(zip(*results, strict=True)):
        if number > 0:
            assert got[untouched].isnan().all()
            got, want = got[write_index], want[write_index].to(pool_dtype)
        tolerance = 4e-3 if got.dtype == torch.bfloat16 else 1e-6
        assert relative_error(got, want) < tolerance


def test_rows_have_the_same_bits_alone_and_together() -> None:
    x = torch.randn((50, 200), generator=generator(6))
    weight = torch.randn(200, generator=generator(7))
    for count in (1, 2):
        with threads(OPS, count):
            together = OPS.rms_norm(x, weight, 1e-5), OPS.silu_mul(x)
            for i, row in enumerate(x):
                assert torch.equal(OPS.rms_norm(row[None], weight, 1e-5)[0], together[0][i])
                assert torch.equal(OPS.silu_mul(row[None])[0], together[1][i])


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 63, 64, 65, 1000, 49152])
def test_the_best_token_is_the_first_of_the_largest(n: int) -> None:
    logits = torch.randint(-20, 20, (40, n), generator=generator(n)).float()
    logits[1] = -torch.inf
    logits[2, n // 2 :] = torch.inf
    logits[3] = -3e38
    peak, token = OPS.best(logits)
    want_peak, want_token = REFERENCE.best(logits)
    assert torch.equal(peak, want_peak) and torch.equal(token, want_token)


@pytest.mark.parametrize("at", [0, 5, 63, 99])
def test_a_nan_among_logits_shows_in_its_row_alone(at: int) -> None:
    logits = torch.randn((3, 100), generator=generator(9))
    logits[1, at] = torch.nan
    peak, token = OPS.best(logits)
    assert peak[1].isnan() and peak[[0, 2]].isfinite().all()
    assert 0 <= token[1] < 100
    assert torch.equal(token[[0, 2]], logits[[0, 2]].argmax(dim=-1))
