"""This file finds, for products of a number of rows that comes up again and again, which of the
library's ways is fastest on this device, and remembers it for the next process.

Measured are graphs of launches over more weights than the cache holds. What was found is kept in
the user's cache under the device, the library and torch: a process that starts again computes with
the same kernels, at once. It does not know models or graphs of steps.

Laws: a way other than torch's own is taken only if it is faster by more than timings differ;
without the library, or a writable cache, all goes on with what there is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.ops.base import OpsUnavailable
from kernels.ops.cpu.build import cache_directory
from kernels.ops.cublaslt import CublasLt, Product, Way

ROWS_MAX = 512  # products of more are as fast as they can be
WAYS = 8
FASTER = 0.97  # of torch's time
COLD_BYTES = 128 << 20  # of weights that a measurement goes over: more than a cache holds
REPLAYS = 5
DEFAULT = -1  # torch's own way
FORMAT = 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Key(NamedTuple):
    """What a choice is made for."""

    rows: int
    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype

    @property
    def text(self) -> str:
        dtypes = (str(each).removeprefix("torch.") for each in (self.dtype, self.out_dtype))
        return " ".join((str(self.rows), str(self.n), str(self.k), *dtypes))

    @staticmethod
    def read(text: str) -> Key:
        """Raises ValueError, KeyError if `text` is none of a key."""
        rows, n, k, dtype, out_dtype = text.split()
        return Key(int(rows), int(n), int(k), DTYPES[dtype], DTYPES[out_dtype])


class Tuning:
    """The choices of one device. `weights`: those that were prepared, to measure with."""

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        self.device = device
        self.lt: CublasLt | None = None
        self.choices: dict[Key, int] = {}  # number of a way, or DEFAULT
        self.products: dict[Key, tuple[Product, Way]] = {}
        self.weights: dict[tuple[int, int], list[weakref.ref[Tensor]]] = {}
        self.is_open = False
        self.path = path
        with contextlib.suppress(OpsUnavailable, OSError):
            self.lt = CublasLt(device)
            self.path = path or cache_directory() / f"products-{identity(device)}.json"
            self.choices = read_choices(self.path)

    def seen(self, weight: Tensor) -> None:
        """Has `weight` [n, k] among those that are measured with."""
        self.weights.setdefault((weight.shape[0], weight.shape[1]), []).append(weakref.ref(weight))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """While it lasts, a product that has not come before is measured. Nothing may be captured
        then but by this file."""
        self.is_open, count = True, len(self.choices)
        try:
            yield
        finally:
            self.is_open = False
            if len(self.choices) != count and self.path is not None:
                write_choices(self.path, self.choices)

    def run(self, weight: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor | None:
        """x [rows, k] times weight [n, k] turned, if another way than torch's was chosen for it."""
        key = Key(x.shape[0], weight.shape[0], weight.shape[1], x.dtype, out_dtype)
        found = self.products.get(key)
        if found is None:
            if self.lt is None or not (key in self.choices or self.is_measured(key)):
                return None
            found = self.choose(key, weight, x)
            if found is None:
                return None
        if not x.is_contiguous() or x.data_ptr() % 16:
            return None
        product, way = found
        out = torch.empty((key.rows, key.n), dtype=out_dtype, device=x.device)
        return product.run(weight, x, out, way)

    def is_measured(self, key: Key) -> bool:
        narrow = key.dtype in (torch.bfloat16, torch.float16)
        return self.is_open and narrow and 1 < key.rows <= ROWS_MAX

    def choose(self, key: Key, weight: Tensor, x: Tensor) -> tuple[Product, Way] | None:
        assert self.lt is not None
        known = self.choices.get(key)
        if known == DEFAULT:
            return None
        product = Product(self.lt, key.rows, key.n, key.k, key.dtype, key.out_dtype)
        ways = product.ways(WAYS)
        if known is None:
            known = self.choices[key] = self.measured(key, product, ways, weight)
        if not 0 <= known < len(ways):
            self.choices[key] = DEFAULT
            return None
        self.products[key] = product, ways[known]
        return self.products[key]

    def measured(self, key: Key, product: Product, ways: list[Way], weight: Tensor) -> int:
        """The number of the fastest way, or DEFAULT."""
        others = (each() for each in self.weights.get((key.n, key.k), []))
        weights = [weight, *(each for each in others if each is not None and each is not weight)]
        wanted = -(-COLD_BYTES // (key.n * key.k * weight.element_size()))
        weights = weights[: max(wanted, 1)]
        # Chance, not what a first step happens to hold: of zeros products are faster.
        x = torch.randn((key.rows, key.k), device=weight.device).to(key.dtype)
        out = torch.empty((key.rows, key.n), dtype=key.out_dtype, device=weight.device)

        def default(each: Tensor) -> None:
            if key.out_dtype == x.dtype:
                torch.mm(x, each.t(), out=out)
            else:
                torch.mm(x, each.t(), out_dtype=key.out_dtype)

        times: list[float] = []
        for way in ways:

            def chosen(each: Tensor, way: Way = way) -> None:
                product.run(each, x, out, way)

            try:
                times.append(self.seconds(chosen, weights))
            except OpsUnavailable:  # it can't be run after all
                times.append(float("inf"))
        best = min(times, default=float("inf"))
        return times.index(best) if best < FASTER * self.seconds(default, weights) else DEFAULT

    def seconds(self, call: Callable[[Tensor], None], weights: list[Tensor]) -> float:
        """Of one call, the median."""
        call(weights[0])
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in weights:
                call(weight)
        times = []
        for _ in range(REPLAYS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times[1:]) / len(weights)


def identity(device: torch.device) -> str:
    """Of all that a choice depends on but the product itself."""
    known: tuple[Any, ...] = (
        FORMAT,
        WAYS,
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_capability(device),
        torch.__version__,
        torch.version.cuda,
        CublasLt.version(),
    )
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


def read_choices(path: Path) -> dict[Key, int]:
    """What an earlier process found; nothing, if the file is not there or not whole."""
    try:
        content = json.loads(path.read_text("utf-8"))
        found = {Key.read(text): way for text, way in content.items()}
    except (OSError, ValueError, KeyError, AttributeError):
        return {}
    fit = all(isinstance(way, int) and DEFAULT <= way < WAYS for way in found.values())
    return found if fit else {}


def write_choices(path: Path, choices: dict[Key, int]) -> None:
    """Whole or not at all, beside what other processes have written meanwhile."""
    merged = {key.text: way for key, way in (read_choices(path) | choices).items()}
    beside = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        beside.write_text(json.dumps(merged, indent=0, sort_keys=True), "utf-8")
        beside.replace(path)
