"""This file is products by the vendor's library, cublasLt, of which each offers several ways.

The library guesses from a table which of its kernels is fastest; near the edges of its tiles the
guess costs up to a third. Here the ways are asked for, so that `tuning.py` can time them. Called
through ctypes: torch has the library loaded, but does not let its caller choose.

It does not know models. Source: cuBLAS documentation, "Using the cublasLt API".
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from kernels.ops.base import OpsUnavailable

# Names of the library's enumerations, with its values.
COMPUTE_32F = 68
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
DESC_TRANSA = 3
TRANSPOSED = 1
PREFERENCE_WORKSPACE = 1
PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C, D
ALIGNMENT = 16
WORKSPACE_BYTES = 32 << 20
UNSUPPORTED = 15  # nothing is known for this product


class Way(ctypes.Structure):
    """One way to compute a product: cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def load() -> ctypes.CDLL:
    """The one that torch has loaded. Raises OpsUnavailable."""
    major = (torch.version.cuda or "0").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError as error:
        raise OpsUnavailable(f"cublasLt can't be loaded: {error}") from error


class CublasLt:
    """The library on one device. Raises OpsUnavailable if it is not there."""

    def __init__(self, device: torch.device) -> None:
        self.library = load()
        self.device = device
        self.handle = c_void_p()
        with torch.cuda.device(device):
            self.call("cublasLtCreate", byref(self.handle))
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    @staticmethod
    def version() -> int:
        find = load().cublasLtGetVersion
        find.restype = c_size_t
        return int(find())

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise OpsUnavailable(f"{name} returned {status}")


class Product:
    """out [rows, n] = x [rows, k] times weight [n, k] turned, plus out with `add`. All contiguous,
    of these dtypes, at multiples of 16 bytes."""

    def __init__(
        self,
        lt: CublasLt,
        rows: int,
        n: int,
        k: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        add: bool = False,
    ) -> None:
        self.lt = lt
        self.desc = c_void_p()
        lt.call("cublasLtMatmulDescCreate", byref(self.desc), COMPUTE_32F, TYPES[torch.float32])
        turned = c_int32(TRANSPOSED)
        lt.call(
            "cublasLtMatmulDescSetAttribute",
            self.desc,
            DESC_TRANSA,
            byref(turned),
            c_size_t(ctypes.sizeof(turned)),
        )
        # The library counts by columns: the weight is k by n there, x and out have their rows as
        # columns.
        self.weight_layout = self.layout(dtype, k, n)
        self.x_layout = self.layout(dtype, k, rows)
        self.out_layout = self.layout(out_dtype, n, rows)
        self.alpha, self.beta = c_float(1.0), c_float(1.0 if add else 0.0)

    def layout(self, dtype: torch.dtype, down: int, across: int) -> c_void_p:
        made = c_void_p()
        self.lt.call(
            "cublasLtMatrixLayoutCreate",
            byref(made),
            TYPES[dtype],
            c_uint64(down),
            c_uint64(across),
            c_int64(down),
        )
        return made

    def ways(self, count: int) -> list[Way]:
        """Up to `count`, what the library holds fastest first; none if it has none."""
        lt = self.lt
        preference = c_void_p()
        lt.call("cublasLtMatmulPreferenceCreate", byref(preference))
        try:
            size = c_size_t(WORKSPACE_BYTES)
            lt.call(
                "cublasLtMatmulPreferenceSetAttribute",
                preference,
                PREFERENCE_WORKSPACE,
                byref(size),
                c_size_t(ctypes.sizeof(size)),
            )
            alignment = c_uint32(ALIGNMENT)
            for each in PREFERENCE_ALIGNMENTS:
                lt.call(
                    "cublasLtMatmulPreferenceSetAttribute",
                    preference,
                    each,
                    byref(alignment),
                    c_size_t(ctypes.sizeof(alignment)),
                )
            found, found_count = (Way * count)(), c_int(0)
            status = lt.library.cublasLtMatmulAlgoGetHeuristic(
                lt.handle,
                self.desc,
                self.weight_layout,
                self.x_layout,
                self.out_layout,
                self.out_layout,
                preference,
                c_int(count),
                found,
                byref(found_count),
            )
            if status not in (0, UNSUPPORTED):
                raise OpsUnavailable(f"cublasLtMatmulAlgoGetHeuristic returned {status}")
        finally:
            lt.call("cublasLtMatmulPreferenceDestroy", preference)
        return [way for way in found[: found_count.value] if way.state == 0]

    def run(self, weight: Tensor, x: Tensor, out: Tensor, way: Way) -> Tensor:
        """On the current stream; may be captured."""
        lt = self.lt
        stream = torch.cuda.current_stream(lt.device).cuda_stream
        lt.call(
            "cublasLtMatmul",
            lt.handle,
            self.desc,
            byref(self.alpha),
            c_void_p(weight.data_ptr()),
            self.weight_layout,
            c_void_p(x.data_ptr()),
            self.x_layout,
            byref(self.beta),
            c_void_p(out.data_ptr()),
            self.out_layout,
            c_void_p(out.data_ptr()),
            self.out_layout,
            byref(way),  # the algorithm is its first field
            c_void_p(lt.workspace.data_ptr()),
            c_size_t(WORKSPACE_BYTES),
            c_void_p(stream),
        )
        return out
