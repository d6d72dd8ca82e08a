"""This file tries the compiled library once before anything trusts it.

Small products in each kind of weight and one attention, against torch in float64. A miscompiled
library (a compiler's bug, a hypervisor that hides an instruction's faults) becomes OpsUnavailable
with the operator's name, and the caller takes the reference. It does not know models.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from kernels.ops.base import Heads, OpsUnavailable
from kernels.ops.cpu import native
from kernels.ops.cpu.native import FORMATS, BatchStruct, LinearStruct


@functools.cache
def check_once() -> None:
    """Raises OpsUnavailable naming the operator that computes wrongly."""
    generator = torch.Generator().manual_seed(7)
    for kind in (0, 1):
        check_dense(kind, generator)
    check_q4_1(generator)
    for bf16 in (False, True):
        check_attention(bf16, generator)


def expect(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    error = float((got.double() - want).norm() / want.norm())
    if not error <= tolerance:  # also for NaN
        raise OpsUnavailable(f"the compiled {name} is off by {error:.1e} of its result")


def multiply(struct: LinearStruct, x: Tensor) -> Tensor:
    out = torch.full((x.shape[0], struct.n), float("nan"))
    native.check(
        native.load().hs_linear_rows(
            ctypes.addressof(struct), x.data_ptr(), x.shape[0], out.data_ptr(), 0
        )
    )
    return out


def check_dense(kind: int, generator: torch.Generator) -> None:
    n, k = 40, 66
    weight = torch.randn((n, k), generator=generator)
    x = torch.randn((11, k), generator=generator)
    data = torch.zeros(48 * k)
    struct = LinearStruct(kind=kind, n=n, k=k, data=data.data_ptr())
    address = ctypes.addressof(struct)
    native.check(native.load().hs_pack_dense(address, weight.data_ptr(), data.data_ptr()))
    name, tolerance = (("float32 product", 1e-5), ("bfloat16 product", 1e-2))[kind]
    expect(name, multiply(struct, x), x.double() @ weight.double().T, tolerance)


def check_q4_1(generator: torch.Generator) -> None:
    n, k = 40, 64
    raw = torch.randint(0, 256, (n, k // 32, 20), dtype=torch.uint8, generator=generator)
    scales = torch.rand((n, k // 32, 2), generator=generator).half()
    raw[:, :, :4] = scales.view(torch.uint8)
    nibbles = torch.cat((raw[:, :, 4:] & 15, raw[:, :, 4:] >> 4), dim=2).double()
    wide = scales.double()
    weight = (nibbles * wide[:, :, :1] + wide[:, :, 1:]).reshape(n, k)
    data, packed_scales = torch.zeros(48 * k // 8), torch.zeros(48 * k // 32)
    struct = LinearStruct(n=n, k=k, data=data.data_ptr(), scales=packed_scales.data_ptr())
    address, library = ctypes.addressof(struct), native.load()
    native.check(library.hs_describe_format(FORMATS["q4_1"], address))
    native.check(
        library.hs_pack_blocks(
            address,
            FORMATS["q4_1"],
            raw.data_ptr(),
            data.data_ptr(),
            packed_scales.data_ptr(),
        )
    )
    x = torch.randn((11, k), generator=generator)
    expect("4-bit product", multiply(struct, x), x.double() @ weight.T, 2e-2)


def check_attention(bf16: bool, generator: torch.Generator) -> None:
    tokens, heads, page_size = 70, Heads(4, 2, 64), 16
    pool_shape = (6 * page_size, heads.kv, heads.dim)
    dtype = torch.bfloat16 if bf16 else torch.float32
    k_pool = torch.randn(pool_shape, generator=generator).to(dtype)
    v_pool = torch.randn(pool_shape, generator=generator).to(dtype)
    q = torch.randn((tokens, heads.query, heads.dim), generator=generator)
    pages = torch.tensor([[5, 0, 3, 1, 4]], dtype=torch.int32)
    start, lens = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens]).int()
    batch = BatchStruct(
        rows=1,
        page_size=page_size,
        pages_max=pages.shape[1],
        page_table=pages.data_ptr(),
        query_start=start.data_ptr(),
        query_len=lens.data_ptr(),
        kv_len=lens.data_ptr(),
    )
    out = torch.full_like(q, float("nan"))
    struct = native.heads_struct(heads, bf16, scale=0.125)
    native.check(
        native.load().hs_attend(
            ctypes.addressof(struct),
            ctypes.addressof(batch),
            q.data_ptr(),
            k_pool.data_ptr(),
            v_pool.data_ptr(),
            out.data_ptr(),
        )
    )
    rows = (pages[0].long()[:, None] * page_size + torch.arange(page_size)).flatten()[:tokens]
    keys = k_pool[rows].double().repeat_interleave(2, dim=1)
    values = v_pool[rows].double().repeat_interleave(2, dim=1)
    scores = torch.einsum("thd,khd->htk", q.double(), keys) * 0.125
    unseen = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    want = torch.einsum("htk,khd->thd", weights, values)
    expect("attention", out, want, 1e-2 if bf16 else 1e-5)
