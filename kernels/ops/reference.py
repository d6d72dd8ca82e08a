"""This file is the operators in plain torch: any device, any float dtype, nothing to compile.

It is what the compiled flavours are tested against and what runs where they can't. In float32 on a
CPU it keeps the law of `base.py` by `exact.py`; elsewhere it takes torch's fast operators and
promises closeness only. Block formats are dequantized when they are prepared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import exact
from kernels.ops.base import FP8_MAX, KV_DTYPES, OPS, Filters, Heads
from kernels.ops.draw import draw
from kernels.ops.masks import bar
from kernels.quant.weight import Weight

DTYPES = {
    "quantized": torch.float32,  # blocks are dequantized here: exact, slow, no memory saved
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceLinear:
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    tile_rows: int | None  # rows a call in exact mode; None: not exact


@OPS.register("reference")
class ReferenceOps:
    """See `Ops`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def supports(self, dtype: str, weight_format: str) -> bool:
        return dtype == "float32" or (dtype != "quantized" and self.device.type != "cpu")

    def activation_dtype(self, dtype: str) -> torch.dtype:
        return DTYPES[dtype]

    def kv_dtype(self, dtype: str, wanted: str = "auto") -> torch.dtype:
        return KV_DTYPES.get(wanted, DTYPES[dtype])

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def progress(self) -> int | None:
        return None

    def fuse(self, decoder: Any) -> None:
        return None

    def prepare_linear(self, weight: Weight, bias: Tensor | None, dtype: str) -> ReferenceLinear:
        to = DTYPES[dtype]
        matrix = weight.dequantize().to(self.device, to)
        bias = None if bias is None else bias.to(self.device, to)
        if not self.exact(to):
            return ReferenceLinear(matrix.contiguous(), bias, None)
        matrix = exact.aligned(matrix)
        return ReferenceLinear(matrix, bias, exact.tile_rows(matrix))

    def linear(self, prepared: ReferenceLinear, x: Tensor) -> Tensor:
        if prepared.tile_rows is None:
            return functional.linear(x, prepared.weight, prepared.bias)
        product = exact.linear(x, prepared.weight, prepared.tile_rows)
        return product if prepared.bias is None else product.add_(prepared.bias)

    def linear_float32(self, prepared: ReferenceLinear, x: Tensor) -> Tensor:
        return self.linear(prepared, x).float()

    def prepare_embedding(self, weight: Weight, dtype: str) -> Tensor:
        return weight.dequantize().to(self.device, DTYPES[dtype])

    def embed(self, prepared: Tensor, ids: Tensor) -> Tensor:
        return prepared.index_select(0, ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self.exact(x.dtype):
            return exact.rms_norm(x, weight, eps)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

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
        qkv = qkv.view(qkv.shape[0], heads.query + 2 * heads.kv, heads.dim)
        q, k, v = qkv.split([heads.query, heads.kv, heads.kv], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps)
        angles = cos_sin.index_select(0, positions.long())
        cos, sin = (half.unsqueeze(1) for half in angles.chunk(2, dim=-1))  # [T, 1, d/2]
        k = rotate(k, cos, sin)
        if k_pool.dtype == torch.float8_e4m3fn:  # torch moves no floats of one byte
            k, v = (to_fp8(each, scale) for each, scale in zip((k, v), kv_scales, strict=True))
            k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
        k_pool.index_copy_(0, write_index, k)
        v_pool.index_copy_(0, write_index, v)
        return rotate(q, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (exact.silu(gate) if self.exact(gate.dtype) else functional.silu(gate)) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.exact(gate.dtype):
            return exact.gelu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up

    def bar(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        bar(logits, rows, words)

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        peak, tokens = logits.max(dim=-1)
        return peak, tokens

    def draw(self, logits: Tensor, rows: Tensor, filters: Filters, noise: Tensor) -> Tensor:
        return draw(logits.index_select(0, rows), filters, noise)

    def exact(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32 and self.device.type == "cpu"


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """x / scale in e4m3, cut off at its largest number, as bytes."""
    narrow = (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return narrow.view(torch.uint8)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + d/2) of x [T, heads, d] by angles [T, 1, d/2], in float32."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
