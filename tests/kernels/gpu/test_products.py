"""Every way that the library offers for a product computes it; the one that is taken, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.gpu.test_ops import far, noise

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("rows", [2, 17, 256])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
def test_all_ways_agree(
    cuda: torch.device, rows: int, dtype: torch.dtype, out_dtype: torch.dtype, add: bool
) -> None:
    from kernels.ops.cublaslt import CublasLt, Product

    n, k = 384, 576
    weight, x = noise(n, k, device=cuda, dtype=dtype), noise(rows, k, device=cuda, dtype=dtype)
    before = noise(rows, n, device=cuda, dtype=out_dtype, seed=1)
    wanted = x.double() @ weight.double().t() + (before.double() if add else 0)
    product = Product(CublasLt(cuda), rows, n, k, dtype, out_dtype, add)
    ways = product.ways(8)
    assert ways
    for way in ways:
        out = before.clone() if add else torch.full_like(before, torch.nan)
        product.run(weight, x, out, way)
        assert far(out, wanted) < 1e-2


def test_what_is_chosen_is_a_product_and_is_kept(cuda: torch.device, tmp_path: Path) -> None:
    from kernels.ops.tuning import Tuning

    path = tmp_path / "choices.json"
    weights = [noise(768, 512, device=cuda, dtype=torch.bfloat16, seed=n) for n in range(4)]
    x = noise(24, 512, device=cuda, dtype=torch.bfloat16)
    first, second = Tuning(cuda, path), Tuning(cuda, path)
    for weight in weights:
        first.seen(weight)
    with first.opened():
        found = [first.run(weight, x, torch.bfloat16) for weight in weights]
    assert path.is_file()
    again = Tuning(cuda, path)
    assert again.choices == first.choices and not second.choices
    for weight, out in zip(weights, found, strict=True):
        wanted = x.double() @ weight.double().t()
        now = again.run(weight, x, torch.bfloat16)
        assert (out is None) == (now is None)
        if out is not None and now is not None:
            assert torch.equal(out, now) and far(out, wanted) < 1e-2
