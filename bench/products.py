"""This file times the library's products of many rows by the weights of both shapes, in the way
that it takes by itself and in each that it offers.

A laboratory tool. Each is timed in a captured graph that walks over more weights than the cache
holds; `floor` is the larger of its bytes over the measured copy and its FLOP over the measured
8192-cube.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bench.command import parser_of
from bench.gemv import CASES, Case, graph_us
from bench.gpu import measure_ceilings
from bench.report import Report
from kernels.ops.cublaslt import CublasLt, Product

ABOUT = """\
Products of several rows by the weights of two shapes: as the library does them by itself, and in
the ways that it offers, beside the floor of bytes and FLOP.

  python -m app bench products
  python -m app bench products --rows 64 128 192 256 --only 8b
"""


@cache
def library() -> CublasLt:
    return CublasLt(torch.device("cuda"))


class Bench:
    def __init__(self, case: Case, rows: int) -> None:
        self.n = case.n * (2 if case.gated else 1)
        self.k, self.rows, self.wide = case.k, rows, case.wide
        copies = min(max(2, -(-256_000_000 // (self.n * case.k * 2))), 24)
        like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = [torch.randn((self.n, case.k), **like) for _ in range(copies)]
        self.x = torch.randn((rows, case.k), **like)

    def library(self, weight: Tensor) -> Tensor:
        if self.wide:
            return torch.mm(self.x, weight.t(), out_dtype=torch.float32)
        return torch.mm(self.x, weight.t())

    def ways(self, count: int) -> list[float]:
        """Microseconds of each of the library's ways, in its own order."""
        dtype = torch.float32 if self.wide else torch.bfloat16
        out = torch.empty((self.rows, self.n), dtype=dtype, device="cuda")
        product = Product(library(), self.rows, self.n, self.k, torch.bfloat16, dtype)
        wanted = self.library(self.weights[0]).float()
        times = []
        for way in product.ways(count):
            out.fill_(torch.nan)
            product.run(self.weights[0], self.x, out, way)
            assert float((out.float() - wanted).norm() / wanted.norm()) < 1e-2
            times.append(
                graph_us(
                    lambda weight, way=way: product.run(weight, self.x, out, way), self.weights
                )
            )
        return times

    def floor_us(self, ceilings: tuple[float, float]) -> float:
        size = 2 * (self.n * self.k + self.rows * self.k) + self.rows * self.n * 2
        return 1e6 * max(size / ceilings[0], 2 * self.rows * self.n * self.k / ceilings[1])


def main(words: Sequence[str]) -> int:
    parser = parser_of("products", ABOUT)
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        metavar="N",
        default=[16, 32, 64, 96, 128, 160, 192, 224, 256],
        help="of the product",
    )
    parser.add_argument("--only", default="", help="shapes whose names begin so")
    parser.add_argument("--ways", type=int, default=12, help="of the library, that are timed")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(list(words))
    if not torch.cuda.is_available():
        print("bench products: there is no CUDA device", file=sys.stderr)
        return 2
    ceilings = measure_ceilings()
    report = Report("products", as_json=found.json, device=torch.cuda.get_device_name())
    for case in CASES:
        if not case.name.startswith(found.only):
            continue
        for rows in found.rows:
            bench = Bench(case, rows)
            library_us, floor_us = graph_us(bench.library, bench.weights), bench.floor_us(ceilings)
            ways = bench.ways(found.ways)
            best_us = min(ways)
            report.add(
                product=case.name,
                rows=rows,
                floor_us=floor_us,
                library_us=library_us,
                of_floor=floor_us / library_us,
                best_us=best_us,
                best_of_floor=floor_us / best_us,
                which=f"{ways.index(best_us) + 1} of {len(ways)}",
                first_us=ways[0],
            )
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
