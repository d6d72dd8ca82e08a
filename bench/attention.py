"""This file measures one layer's decode attention on a GPU: our kernels, over keys in bfloat16 and
in fp8, those of fixed order, and FlashInfer's wrappers for decoding, with and without tensor cores.

Times are of replayed graphs over several layers' pools, so that keys come from memory and launches
cost what they cost in a step. FlashInfer's plan on the host is measured apart. It drives no model.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.command import parser_of
from bench.gemv import graph_us
from bench.report import Report, median
from kernels.attention import triton
from kernels.attention.base import AttentionBatch, AttentionShape
from kernels.attention.fixed import FixedAttention
from kernels.attention.triton import TritonAttention
from kernels.ops.base import Heads

ABOUT = """\
Decode attention of one layer: our kernels, over keys in bfloat16 and in fp8, those of fixed order,
and FlashInfer's, where it is installed.

  python -m app bench attention
  python -m app bench attention --heads 32 8 128 --rows 1 64 256 --lens 1024 8192
  python -m app bench attention --rows 256 --lens 200:1900 --splits 4,64,64,2 1,64,128,3

--splits tries other forms of our decode kernel than kernels/attention/triton.py has: splits of a
row, keys below which it is not split further, keys of a product, stages.
"""
PAGE = 16
LAYERS = 8  # pools in turn: more than the cache holds


class Form(NamedTuple):
    """Of the decode kernel: a row of `triton.SPLITS` without its bound."""

    splits: int
    split_min: int  # keys below which a row is not split further
    block: int  # keys of a product
    stages: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("attention", ABOUT)
    parser.add_argument(
        "--heads",
        nargs=3,
        type=int,
        default=[32, 8, 128],
        metavar=("Q", "KV", "D"),
        help="their number and size",
    )
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[1, 16, 64, 256], metavar="N", help="of a step"
    )
    parser.add_argument(
        "--lens",
        nargs="+",
        default=["1024", "8192"],
        metavar="N|LOW:HIGH",
        help="keys of a row, drawn; N: half to three halves of it",
    )
    parser.add_argument("--longest-first", action="store_true", help="not in the order drawn")
    parser.add_argument(
        "--splits",
        nargs="+",
        type=form,
        default=[],
        metavar="N,KEYS,BLOCK,STAGES",
        help="see above",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("bench attention: there is no CUDA device", file=sys.stderr)
        return 2
    heads = Heads(*found.heads)
    report = Report(
        "attention", as_json=found.json, device=torch.cuda.get_device_name(), heads=str(heads)
    )
    for count in found.rows:
        for length in found.lens:
            low, high = bounds(length)
            if count * (low + high) // 2 <= 1 << 20:
                generator = torch.Generator().manual_seed(count + (low + high) // 2)
                lens = torch.randint(low, high + 1, (count,), generator=generator)
                if found.longest_first:
                    lens = lens.sort(descending=True).values
                measure(report, heads, length, lens, generator, found.splits)
    report.close()
    return 0


def bounds(words: str) -> tuple[int, int]:
    """Of lengths drawn as `N` or `LOW:HIGH` says; the mean of `N` is N."""
    low, found, high = words.partition(":")
    return (int(low), int(high)) if found else (int(low) // 2, int(low) * 3 // 2)


def form(words: str) -> Form:
    return Form(*map(int, words.split(",")))


def measure(
    report: Report,
    heads: Heads,
    length: str,
    lens: Tensor,
    generator: torch.Generator,
    forms: Sequence[Form],
) -> None:
    count = len(lens)
    pages = (lens + PAGE - 1) // PAGE
    total = int(pages.sum())
    table = torch.zeros((count, int(pages.max())), dtype=torch.int32)
    order, at = torch.randperm(total, generator=generator).int(), 0
    for row, own in enumerate(pages.tolist()):
        table[row, :own], at = order[at : at + own], at + own
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn((count, heads.query, heads.dim), **like)
    pools = [
        tuple(torch.randn((total * PAGE, heads.kv, heads.dim), **like) for _ in range(2))
        for _ in range(LAYERS)
    ]
    bytes_read = 2 * int(lens.sum()) * heads.kv * heads.dim
    wanted: Tensor | None = None
    for name, call, plan_s, item_bytes in contenders(heads, q, pools, table, lens, forms):
        out = call(0)
        error = 0.0
        if wanted is None:
            wanted = out.double()
        else:
            error = float((out.double() - wanted).norm() / wanted.norm())
        layer_us = graph_us(call, range(LAYERS))
        report.add(
            rows=count,
            length=length,
            kernel=name,
            layer_us=round(layer_us, 1),
            tb_a_s=round(item_bytes * bytes_read / layer_us / 1e6, 2),
            plan_us=round(1e6 * plan_s, 1),
            differs=round(error, 4),
        )


def contenders(
    heads: Heads,
    q: Tensor,
    pools: list[Any],
    table: Tensor,
    lens: Tensor,
    forms: Sequence[Form],
) -> Iterator[tuple[str, Callable[[int], Tensor], float, int]]:
    """Name, call for a layer, seconds of planning a step, bytes of a number in the pools."""
    count, ints = len(lens), {"dtype": torch.int32, "device": "cuda"}
    batch = AttentionBatch(
        table.cuda(),
        torch.arange(count + 1, **ints),
        torch.ones(count, **ints),
        lens.int().cuda(),
        PAGE,
        1,
        int(lens.max()),
    )
    narrow = [tuple(pool.to(torch.float8_e4m3fn) for pool in pair) for pair in pools]
    device = torch.device("cuda")
    windows = (None,) * len(pools)
    for name, make, own, dtype, splits in (
        ("triton", TritonAttention, pools, torch.bfloat16, triton.SPLITS),
        ("triton, fp8 keys", TritonAttention, narrow, torch.float8_e4m3fn, triton.SPLITS),
        *(
            (f"triton {each}", TritonAttention, pools, torch.bfloat16, ((math.inf, *each),))
            for each in forms
        ),
        ("fixed", FixedAttention, pools, torch.bfloat16, triton.SPLITS),
    ):
        shape = AttentionShape(
            heads, heads.dim**-0.5, windows, dtype, device, query_dtype=torch.bfloat16
        )
        attention = make(shape)
        with unittest.mock.patch.object(triton, "SPLITS", splits):  # read by the plan alone
            attention.plan(batch)

        def call(layer: int, attention: Any = attention, own: Any = own) -> Tensor:
            return attention.attend(layer, q, *own[layer])

        yield name, call, 0.0, dtype.itemsize
    if importlib.util.find_spec("flashinfer") is None:
        return
    import flashinfer

    pages = (lens + PAGE - 1) // PAGE
    starts = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    used = torch.arange(table.shape[1]) < pages[:, None]
    indices = table[used].cuda()
    for cores in (False, True):
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=cores,
            paged_kv_indptr_buffer=starts.cuda(),
            paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=torch.ones(count, **ints),
        )
        planned = []
        for _ in range(4):
            begin_s = time.perf_counter()
            wrapper.plan(
                starts,
                indices,
                ((lens - 1) % PAGE + 1).int(),
                heads.query,
                heads.kv,
                heads.dim,
                PAGE,
                q_data_type=torch.bfloat16,
                kv_data_type=torch.bfloat16,
            )
            torch.cuda.synchronize()
            planned.append(time.perf_counter() - begin_s)

        def run(layer: int, wrapper: Any = wrapper) -> Tensor:
            pair = tuple(pool.view(-1, PAGE, heads.kv, heads.dim) for pool in pools[layer])
            return wrapper.run(q, pair)

        yield f"flashinfer{', tensor cores' if cores else ''}", run, median(planned), 2


if __name__ == "__main__":
    sys.exit(main())
