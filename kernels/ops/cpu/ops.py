"""This file is the compiled flavour of `Ops` for CPUs.

Activations are float32 throughout; "bfloat16" and "quantized" say how weights and the KV pool are
kept. Block weights are multiplied as the exact values of their file with activations in int8 per
row and block of 32. It does not know models; `stack.py` runs whole decoders.

Law: in every dtype the bits of a row's result depend on that row alone (see csrc/cpu.h).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.ops import exact
from kernels.ops.base import OPS, Filters, Heads, OpsUnavailable
from kernels.ops.cpu import check, native
from kernels.ops.cpu.arena import Arena
from kernels.ops.cpu.native import FORMATS, KINDS, TABLE_DTYPES, LinearStruct, pointer
from kernels.ops.cpu.stack import CpuDecoder
from kernels.quant.weight import BlockWeight, DenseWeight, Weight

PACK_ROWS = 4096  # rows widened to float32 at a time; whole panels


@dataclass(frozen=True, slots=True, eq=False)
class CpuLinear:
    """A packed weight; `struct` points into `kept`."""

    struct: LinearStruct
    address: int
    n: int
    k: int
    kept: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CpuEmbedding:
    table: Tensor
    format: int  # as hs_embed counts them
    shape: tuple[int, int]


@OPS.register("cpu")
class CpuOps:
    """See `Ops`. Raises OpsUnavailable with the reason."""

    def __init__(self, device: torch.device) -> None:
        self.library = native.load()
        check.check_once()
        self.device = device
        self.arena = Arena()
        self.rope_heads: dict[tuple[Heads, torch.dtype, float], native.HeadsStruct] = {}

    def supports(self, dtype: str, weight_format: str) -> bool:
        return dtype in ("quantized", "bfloat16", "float32")

    def activation_dtype(self, dtype: str) -> torch.dtype:
        return torch.float32

    def kv_dtype(self, dtype: str, wanted: str = "auto") -> torch.dtype:
        if wanted != "auto":
            raise OpsUnavailable(f"compiled CPU operators keep no keys in {wanted}")
        return torch.float32 if dtype == "float32" else torch.bfloat16

    def set_threads(self, count: int) -> None:
        # Torch's own threads would spin on the cores that the pool wants next.
        torch.set_num_threads(1)
        native.check(self.library.hs_set_threads(count))

    def progress(self) -> int | None:
        return int(self.library.hs_progress())

    def fuse(self, decoder: Any) -> CpuDecoder | None:
        return CpuDecoder(self.library, decoder) if decoder.config.is_plain else None

    def prepare_linear(self, weight: Weight, bias: Tensor | None, dtype: str) -> CpuLinear:
        n, k = weight.shape
        bias = None if bias is None else bias.to("cpu", torch.float32).contiguous()
        struct = LinearStruct(n=n, k=k, bias=pointer(bias))
        if (
            dtype == "quantized"
            and isinstance(weight, BlockWeight)
            and self.library.hs_describe_format(FORMATS[weight.format], ctypes.addressof(struct))
            == 0
        ):
            kept = self.pack_blocks(struct, weight)
        else:
            struct.kind = KINDS["float32" if dtype == "float32" else "bfloat16"]
            kept = (self.pack_dense(struct, weight),)
        struct.data = pointer(kept[0])
        if bias is not None:
            kept = (*kept, bias)
        return CpuLinear(struct, ctypes.addressof(struct), n, k, kept)

    def pack_blocks(self, struct: LinearStruct, weight: BlockWeight) -> tuple[Tensor, ...]:
        blocks = -(-struct.n // 16) * (struct.k // 32)  # of 16 columns
        data = self.arena.take(blocks * 64 * struct.bits)
        scale_bytes = 16 * (4 if struct.wide_scales else 2) * (2 if struct.has_min else 1)
        scales = self.arena.take(blocks * scale_bytes)
        struct.scales = pointer(scales)
        source = weight.data.contiguous()
        native.check(
            self.library.hs_pack_blocks(
                ctypes.addressof(struct),
                FORMATS[weight.format],
                source.data_ptr(),
                data.data_ptr(),
                scales.data_ptr(),
            )
        )
        return data, scales

    def pack_dense(self, struct: LinearStruct, weight: Weight) -> Tensor:
        n, k = weight.shape
        row_bytes = k * 4 if struct.kind == KINDS["float32"] else (k + 1) // 2 * 4
        data = self.arena.take(-(-n // 16) * 16 * row_bytes)
        for first in range(0, n, PACK_ROWS):
            part = rows_of(weight, first, min(first + PACK_ROWS, n))
            piece = LinearStruct(kind=struct.kind, n=part.shape[0], k=k)
            native.check(
                self.library.hs_pack_dense(
                    ctypes.addressof(piece), part.data_ptr(), data.data_ptr() + first * row_bytes
                )
            )
        return data

    def linear(self, prepared: CpuLinear, x: Tensor) -> Tensor:
        rows = x.shape[0]
        assert x.shape[1] == prepared.k, (x.shape, prepared.k)
        x = x.contiguous()
        out = torch.empty((rows, prepared.n))
        status = self.library.hs_linear_rows(
            prepared.address, x.data_ptr(), rows, out.data_ptr(), 0
        )
        if status:
            native.check(status)
        return out

    def linear_float32(self, prepared: CpuLinear, x: Tensor) -> Tensor:
        return self.linear(prepared, x)

    def prepare_embedding(self, weight: Weight, dtype: str) -> CpuEmbedding:
        if isinstance(weight, BlockWeight):
            return CpuEmbedding(weight.data.contiguous(), FORMATS[weight.format], weight.shape)
        data = weight.data
        if weight.format not in TABLE_DTYPES:
            data = data.to(torch.float32)
        number = TABLE_DTYPES[str(data.dtype).removeprefix("torch.")]
        return CpuEmbedding(data.contiguous(), number, weight.shape)

    def embed(self, prepared: CpuEmbedding, ids: Tensor) -> Tensor:
        count, k = prepared.shape
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty((ids.shape[0], k))
        native.check(
            self.library.hs_embed(
                prepared.format,
                prepared.table.data_ptr(),
                count,
                k,
                ids.data_ptr(),
                ids.shape[0],
                out.data_ptr(),
            )
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.norm(x.contiguous(), None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert residual.is_contiguous() and residual.shape == x.shape
        return self.norm(x.contiguous(), residual, weight, eps)

    def norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        n = x.shape[-1]
        native.check(
            self.library.hs_rms_norm(
                x.data_ptr(),
                pointer(residual),
                weight.data_ptr(),
                eps,
                x.numel() // n,
                n,
                out.data_ptr(),
            )
        )
        return out

    def rope_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        write_index: Tensor,
        heads: Heads,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor:
        key = (heads, k_pool.dtype, eps)
        struct = self.rope_heads.get(key)
        if struct is None:
            assert k_pool.dtype in (torch.float32, torch.bfloat16), k_pool.dtype
            bf16 = k_pool.dtype == torch.bfloat16
            struct = self.rope_heads[key] = native.heads_struct(heads, bf16, eps=eps)
        assert qkv.is_contiguous() and k_pool.is_contiguous() and v_pool.is_contiguous()
        assert positions.dtype == torch.int32 and write_index.dtype == torch.int64
        rows = qkv.shape[0]
        q = torch.empty((rows, heads.query, heads.dim))
        native.check(
            self.library.hs_rope_write(
                ctypes.addressof(struct),
                qkv.data_ptr(),
                positions.data_ptr(),
                cos_sin.data_ptr(),
                k_pool.data_ptr(),
                v_pool.data_ptr(),
                write_index.data_ptr(),
                pointer(q_norm),
                pointer(k_norm),
                rows,
                q.data_ptr(),
            )
        )
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, n))
        native.check(self.library.hs_silu_mul(gate_up.data_ptr(), rows, n, out.data_ptr()))
        return out

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return exact.gelu(gate) * up

    def bar(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        assert logits.is_contiguous() and words.is_contiguous() and words.dtype == torch.int32
        native.check(
            self.library.hs_bar(
                logits.data_ptr(),
                logits.shape[1],
                rows.data_ptr(),
                len(rows),
                words.data_ptr(),
                words.shape[1],
            )
        )

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        rows, n = logits.shape
        peak, token = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        native.check(
            self.library.hs_best(logits.data_ptr(), rows, n, peak.data_ptr(), token.data_ptr())
        )
        return peak, token

    def draw(self, logits: Tensor, rows: Tensor, filters: Filters, noise: Tensor) -> Tensor:
        logits = logits.contiguous()
        token = torch.empty(len(rows), dtype=torch.int64)
        native.check(
            self.library.hs_draw(
                logits.data_ptr(),
                logits.shape[1],
                rows.data_ptr(),
                len(rows),
                filters.temperature.data_ptr(),
                filters.top_k.data_ptr(),
                filters.top_p.data_ptr(),
                filters.min_p.data_ptr(),
                noise.data_ptr(),
                token.data_ptr(),
            )
        )
        return token


def rows_of(weight: Weight, first: int, last: int) -> Tensor:
    """Rows [first, last) in float32, contiguous."""
    if isinstance(weight, DenseWeight):
        return weight.data[first:last].to("cpu", torch.float32).contiguous()
    part = BlockWeight(weight.format, weight.data[first:last], (last - first, weight.shape[1]))
    return part.dequantize().contiguous()
