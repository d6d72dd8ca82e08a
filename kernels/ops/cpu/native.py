"""This file is the Python side of the compiled library: its structs, its functions, its loading.

It does not know models or the Ops protocol. `load` compiles (or finds) the library, loads it and
tries it once against torch; a library that can't be loaded or computes wrongly is never used.
ctypes releases the GIL during each call.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p

from torch import Tensor

from kernels.cores import usable_cores
from kernels.ops.base import Heads, OpsUnavailable
from kernels.ops.cpu import build

# As in pack.c. Q6_K is read for embeddings; as a product it goes through bfloat16.
FORMATS = {
    name: number for number, name in enumerate("q4_0 q4_1 q5_0 q5_1 q8_0 q4_k q5_k q6_k".split())
}
TABLE_DTYPES = {"float32": 8, "bfloat16": 9, "float16": 10}  # for hs_embed, after the formats
KINDS = {"float32": 0, "bfloat16": 1, "block": 2}


class LinearStruct(ctypes.Structure):
    """hs_linear in cpu.h."""

    _fields_ = (
        ("kind", c_int32),
        ("bits", c_int32),
        ("has_min", c_int32),
        ("wide_scales", c_int32),
        ("zero", c_int32),
        ("reserved", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    )


class HeadsStruct(ctypes.Structure):
    """hs_heads in cpu.h."""

    _fields_ = (
        ("query_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("pool_bf16", c_int32),
        ("reserved", c_int32),
        ("scale", c_float),
        ("eps", c_float),
        ("window", c_int64),
    )


class BatchStruct(ctypes.Structure):
    """hs_batch in cpu.h."""

    _fields_ = (
        ("rows", c_int64),
        ("page_size", c_int64),
        ("pages_max", c_int64),
        ("page_table", c_void_p),
        ("query_start", c_void_p),
        ("query_len", c_void_p),
        ("kv_len", c_void_p),
    )


# fmt: off
SIGNATURES = {
    "hs_set_threads": (c_int,),
    "hs_progress": (),
    "hs_describe_format": (c_int, c_void_p),
    "hs_pack_blocks": (c_void_p, c_int, c_void_p, c_void_p, c_void_p),
    "hs_pack_dense": (c_void_p, c_void_p, c_void_p),
    "hs_linear_rows": (c_void_p, c_void_p, c_int64, c_void_p, c_int),
    "hs_embed": (c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p),
    "hs_rms_norm": (c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
    "hs_bar": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64),
    "hs_best": (c_void_p, c_int64, c_int64, c_void_p, c_void_p),
    "hs_draw": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p,
                c_void_p, c_void_p),
    "hs_silu_mul": (c_void_p, c_int64, c_int64, c_void_p),
    "hs_rope_write": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
                      c_void_p, c_void_p, c_int64, c_void_p),
    "hs_forward": (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p,
                   c_void_p, c_int64, c_void_p, c_void_p),
    "hs_attend": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
}
# fmt: on


def heads_struct(
    heads: Heads, pool_bf16: bool, scale: float = 1.0, eps: float = 0.0, window: int | None = None
) -> HeadsStruct:
    return HeadsStruct(
        query_heads=heads.query,
        kv_heads=heads.kv,
        head_dim=heads.dim,
        pool_bf16=int(pool_bf16),
        scale=scale,
        eps=eps,
        window=window or 0,
    )


def check(status: int) -> None:
    """Raises what a negative result of the library means."""
    if status == -1:
        raise MemoryError("no memory for the operator's scratch space")
    if status != 0:
        raise ValueError("an argument is out of range")


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def load() -> ctypes.CDLL:
    """The library, with as many threads as this process may use cores.

    Raises OpsUnavailable with the reason why there is none (and again at each call).
    """
    try:
        library = open_library(str(build.library()))
    except OSError as error:
        raise OpsUnavailable(f"the compiled library can't be loaded: {error}") from error
    check(library.hs_set_threads(usable_cores()))
    return library


def open_library(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    for name, argument_types in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = argument_types
        function.restype = c_int
    return library
