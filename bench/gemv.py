"""This file sweeps the shapes of the one-row product: which launch reads each weight fastest.

A laboratory tool for `kernels.ops.triton.ops.gemv_shape`. Each launch is timed in a captured graph
that walks over more weights than the cache holds. `--only-compile I/N` fills Triton's cache first,
so that many processes can share that work.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from bench.command import parser_of
from bench.report import Report, median

ABOUT = """\
Products of one row by the weights of two shapes: which launch of our kernel reads each fastest,
beside the library's.

  python -m app bench gemv
  python -m app bench gemv --only-compile 0/8        fills Triton's cache, an eighth of it
"""

Item = TypeVar("Item")


class Case(NamedTuple):
    name: str
    n: int
    k: int
    norm: bool
    gated: bool
    add: bool
    wide: bool  # float32 result


CASES = [
    Case("8b qkv", 6144, 4096, True, False, False, False),
    Case("8b out", 4096, 4096, False, False, True, False),
    Case("8b gate_up", 14336, 4096, True, True, False, False),
    Case("8b down", 4096, 14336, False, False, True, False),
    Case("8b head", 128256, 4096, True, False, False, True),
    Case("0.6b qkv", 4096, 1024, True, False, False, False),
    Case("0.6b out", 1024, 2048, False, False, True, False),
    Case("0.6b gate_up", 3072, 1024, True, True, False, False),
    Case("0.6b down", 1024, 3072, False, False, True, False),
    Case("0.6b head", 151936, 1024, True, False, False, True),
]


Shape = tuple[int, int, int, str]  # output rows, keys of a step, warps, cache policy


def launches(case: Case) -> Iterator[Shape]:
    each = itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (4, 8), ("", "evict_first"))
    for rows, block, warps, policy in each:
        per_thread = rows * block * (2 if case.gated else 1) // (warps * 32)
        if case.k % block == 0 and 32 <= per_thread <= 128 and (case.k > 4096 or block >= 1024):
            yield rows, block, warps, policy


class Bench:
    def __init__(self, case: Case) -> None:
        self.case = case
        rows = case.n * (2 if case.gated else 1)
        copies = max(2, -(-256_000_000 // (rows * case.k * 2)))
        self.weights = [
            torch.randn((rows, case.k), device="cuda", dtype=torch.bfloat16)
            for _ in range(min(copies, 24))
        ]
        self.x = torch.randn(case.k, device="cuda", dtype=torch.bfloat16)
        self.gain = torch.ones(case.k, device="cuda", dtype=torch.bfloat16)
        dtype = torch.float32 if case.wide else torch.bfloat16
        self.out = torch.zeros(case.n, device="cuda", dtype=dtype)

    def launch(self, weight: torch.Tensor, shape: Shape, pdl: bool) -> None:
        from kernels.ops.triton.gemv import gemv_kernel  # only here: it needs Triton

        case, (rows, block, warps, policy) = self.case, shape
        gemv_kernel[(-(-case.n // rows),)](
            weight,
            self.x,
            self.gain,
            weight,
            self.out,
            1e-5,
            case.n,
            K=case.k,
            ROWS=rows,
            BLOCK=block,
            NORM=case.norm,
            GATED=case.gated,
            ADD=case.add,
            BIAS=False,
            EVEN=case.n % rows == 0,
            POLICY=policy,
            PDL=pdl,
            num_warps=warps,
            launch_pdl=pdl,
        )

    def library(self, weight: torch.Tensor) -> None:
        torch.mm(self.x[None], weight.t())


def graph_us(call: Callable[[Item], object], items: Sequence[Item]) -> float:
    """Microseconds of one call, in a graph over all items: more of them than the cache holds."""
    graph = torch.cuda.CUDAGraph()
    for item in items:
        call(item)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for item in items:
            call(item)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * median(times[2:]) / len(items)


def main(words: Sequence[str]) -> int:
    parser = parser_of("gemv", ABOUT)
    parser.add_argument("--only-compile", default="", help="I/N: this share of the launches")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(list(words))
    if not torch.cuda.is_available():
        print("bench gemv: there is no CUDA device", file=sys.stderr)
        return 2
    if found.only_compile:
        index, count = map(int, found.only_compile.split("/"))
        work = [(case, shape) for case in CASES for shape in launches(case)]
        benches: dict[str, Bench] = {}
        for case, shape in work[index::count]:
            if case.name not in benches:
                benches.clear()
                benches[case.name] = Bench(case)
            bench = benches[case.name]
            bench.launch(bench.weights[0], shape, True)
        torch.cuda.synchronize()
        return 0
    report = Report("gemv", as_json=found.json, device=torch.cuda.get_device_name())
    for case in CASES:
        bench = Bench(case)
        times = sorted(
            (
                graph_us(lambda weight, s=shape, b=bench: b.launch(weight, s, True), bench.weights),
                shape,
            )
            for shape in launches(case)
        )
        best_us, best = times[0]
        report.add(
            product=case.name,
            us=best_us,
            tb_per_s=bench.weights[0].nbytes / best_us / 1e6,
            launch=str(best),
            library_us=graph_us(bench.library, bench.weights),
            then=", ".join(f"{us:.1f} {shape}" for us, shape in times[1:4]),
        )
        del bench
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
