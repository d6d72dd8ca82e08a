"""This file is the flavour of `Ops` for GPUs: products by the vendor's library, all else in Triton.

A product with one row is bound by reading its weight and goes to our own kernel. `fuse` runs a
whole decoder on one row with norms, activation and sums folded into the products. It does not know
pages or graphs; every call can be captured.

Law: results are close to the reference, not equal to the bit; a row of padding (write_index < 0)
writes no keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops.base import KV_DTYPES, Filters, Heads, OpsUnavailable
from kernels.ops.draw import draw
from kernels.ops.masks import bar
from kernels.ops.triton import elementwise, gemv
from kernels.ops.tuning import Tuning
from kernels.quant.weight import DenseWeight, Weight

DTYPES = {
    "quantized": torch.bfloat16,  # blocks are dequantized when they are prepared
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
FUSED_ROWS_MAX = 1
FP8_CAPABILITY_MIN = (8, 9)
WEIGHT_POLICY = "evict_first"  # of one-row products: each weight is read once a step


@dataclass(frozen=True, slots=True, eq=False)
class TritonLinear:
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]


def power_of_two(value: int) -> int:
    """The least that is not smaller."""
    return 1 << max(value - 1, 0).bit_length()


class TritonOps:
    """See `Ops`."""

    asynchronous = True  # nothing waits for the device: `kernels.device` can run it
    tunes = True  # the library's products of many rows, see `tuning.py`

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"  # elsewhere Triton's interpreter runs it, for tests
        self.pdl = cuda and torch.cuda.get_device_capability(device) >= (9, 0)
        self.launch: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}
        self.tuning = Tuning(device) if cuda and self.tunes else None

    def supports(self, dtype: str, weight_format: str) -> bool:
        return dtype != "quantized"

    def activation_dtype(self, dtype: str) -> torch.dtype:
        return DTYPES[dtype]

    def kv_dtype(self, dtype: str, wanted: str = "auto") -> torch.dtype:
        if wanted != "auto" and self.device.type == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
            if capability < FP8_CAPABILITY_MIN:
                raise OpsUnavailable(
                    f"keys in {wanted} need compute capability {FP8_CAPABILITY_MIN}; "
                    f"this device has {capability}"
                )
        return KV_DTYPES.get(wanted, DTYPES[dtype])

    def set_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def progress(self) -> int | None:
        return None

    def fuse(self, decoder: Any) -> OneRowDecoder | None:
        return OneRowDecoder(self, decoder) if decoder.config.is_plain else None

    def prepare_linear(self, weight: Weight, bias: Tensor | None, dtype: str) -> TritonLinear:
        to = DTYPES[dtype]
        bias = None if bias is None else bias.to(self.device, to)
        prepared = TritonLinear(self.to_device(weight, to).contiguous(), bias)
        if self.tuning is not None:
            self.tuning.seen(prepared.weight)
        return prepared

    def to_device(self, weight: Weight, to: torch.dtype) -> Tensor:
        data = weight.data if isinstance(weight, DenseWeight) else weight.dequantize()
        return data.to(self.device).to(to)

    def linear(self, prepared: TritonLinear, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            out = torch.empty((1, prepared.weight.shape[0]), dtype=x.dtype, device=x.device)
            return self.row(prepared, x, out)
        if self.tuning is not None and prepared.bias is None:
            tuned = self.tuning.run(prepared.weight, x, x.dtype)
            if tuned is not None:
                return tuned
        return functional.linear(x, prepared.weight, prepared.bias)

    def linear_float32(self, prepared: TritonLinear, x: Tensor) -> Tensor:
        weight = prepared.weight
        if x.shape[0] == 1:
            out = torch.empty((1, weight.shape[0]), dtype=torch.float32, device=x.device)
            return self.row(prepared, x, out)
        if x.device.type == "cuda" and x.dtype != torch.float32 and prepared.bias is None:
            tuned = None
            if self.tuning is not None:
                tuned = self.tuning.run(weight, x, torch.float32)
            return torch.mm(x, weight.t(), out_dtype=torch.float32) if tuned is None else tuned
        return functional.linear(x, weight, prepared.bias).float()

    def row(
        self,
        prepared: TritonLinear,
        x: Tensor,  # [1, K]
        out: Tensor,  # [1, N], or [1, N / 2] if gated
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        add: bool = False,
    ) -> Tensor:
        """One row through `prepared`: normed before, gated or added to `out` after."""
        n, k = prepared.weight.shape
        n = n // 2 if gated else n
        rows, block, warps = gemv_shape(n, k, gated, prepared.weight.element_size())
        unused = prepared.weight
        gemv.gemv_kernel[(-(-n // rows),)](
            prepared.weight,
            x,
            unused if norm is None else norm,
            unused if prepared.bias is None else prepared.bias,
            out,
            eps,
            n,
            K=k,
            ROWS=rows,
            BLOCK=block,
            NORM=norm is not None,
            GATED=gated,
            ADD=add,
            BIAS=prepared.bias is not None,
            EVEN=n % rows == 0 and k % block == 0,
            POLICY=WEIGHT_POLICY,
            PDL=self.pdl,
            num_warps=warps,
            **self.launch,
        )
        return out

    def prepare_embedding(self, weight: Weight, dtype: str) -> Tensor:
        return self.to_device(weight, DTYPES[dtype])

    def embed(self, prepared: Tensor, ids: Tensor) -> Tensor:
        return prepared.index_select(0, ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert residual.is_contiguous() and residual.shape == x.shape
        return self.norm(x, residual, weight, eps)

    def norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        length = x.shape[-1]
        x = x.reshape(-1, length)
        assert x.stride(1) == 1
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        block = power_of_two(length)
        elementwise.rms_norm_kernel[(x.shape[0],)](
            x,
            x if residual is None else residual,
            weight,
            out,
            eps,
            x.stride(0),
            length,
            BLOCK=block,
            ADD=residual is not None,
            PDL=self.pdl,
            num_warps=min(max(block // 512, 1), 16),
            **self.launch,
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
        assert qkv.is_contiguous() and k_pool.is_contiguous() and v_pool.is_contiguous()
        rows = qkv.shape[0]
        q = torch.empty((rows, heads.query, heads.dim), dtype=qkv.dtype, device=qkv.device)
        count = heads.query + 2 * heads.kv
        each = self.rope_heads(rows)
        elementwise.rope_write_kernel[(rows, -(-count // each))](
            qkv,
            positions,
            cos_sin,
            k_pool,
            v_pool,
            write_index,
            cos_sin if q_norm is None else q_norm,
            cos_sin if k_norm is None else k_norm,
            q,
            eps,
            1.0 / kv_scales[0],
            1.0 / kv_scales[1],
            HQ=heads.query,
            HKV=heads.kv,
            D=heads.dim,
            HALF=power_of_two(heads.dim // 2),
            HEADS=each,
            NORM=q_norm is not None,
            PDL=self.pdl,
            num_warps=1 if each == 4 else 4,
            **self.launch,
        )
        return q

    def rope_heads(self, rows: int) -> int:
        """How many heads one program rotates."""
        return 4 if rows < 64 else 16

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.gate_mul(gate_up, "silu")

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self.gate_mul(gate_up, "gelu")

    def gate_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        assert gate_up.is_contiguous()
        rows, length = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, length), dtype=gate_up.dtype, device=gate_up.device)
        block = min(power_of_two(length), 2048)
        elementwise.gate_mul_kernel[(rows, -(-length // block))](
            gate_up,
            out,
            length,
            BLOCK=block,
            GELU=activation == "gelu",
            PDL=self.pdl,
            num_warps=4,
            **self.launch,
        )
        return out

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        peak, tokens = logits.max(dim=-1)
        return peak, tokens

    def bar(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        bar(logits, rows, words)

    def draw(self, logits: Tensor, rows: Tensor, filters: Filters, noise: Tensor) -> Tensor:
        return draw(logits.index_select(0, rows), filters, noise)


def gemv_shape(n: int, k: int, gated: bool, item_bytes: int) -> tuple[int, int, int]:
    """Output rows and keys of a program's step, and its warps. See bench/NOTES.md."""
    wide = 4096 if item_bytes == 2 else 1024
    block = next((size for size in (4096, 2048, 1024, 512) if size <= wide and k % size == 0), 512)
    if gated:
        return (2, min(block, 1024), 4) if k >= 2048 else (4, min(block, 512), 4)
    if block == 4096:
        return 4, block, 4
    if k > 4096:
        return 8, block, 4
    return (4, block, 4) if n <= 2048 else (8, block, 4)


class OneRowDecoder:
    """See `FusedForward`: one row; a layer is four products, a rotation, attention."""

    def __init__(self, ops: TritonOps, decoder: Any) -> None:
        self.ops, self.decoder = ops, decoder
        self.gains = {id(gain): narrowed(gain) for gain in gains_of(decoder)}

    def __call__(
        self,
        residual: Tensor,
        positions: Tensor,
        write_index: Tensor,
        pools: list[tuple[Tensor, Tensor]],
        attention: Any,
        sampled: Tensor,
        hidden: Tensor | None = None,
    ) -> Tensor | None:
        if hidden is not None:
            return None  # the last norm is part of the product
        if residual.shape[0] > FUSED_ROWS_MAX or len(sampled) != residual.shape[0]:
            return None
        ops, decoder = self.ops, self.decoder
        config, heads = decoder.config, decoder.config.heads
        eps = config.norm_eps
        like: dict[str, Any] = {"dtype": residual.dtype, "device": residual.device}
        qkv = torch.empty((1, heads.qkv_len), **like)
        gated = torch.empty((1, config.ffn_len), **like)
        for index, (layer, (k_pool, v_pool)) in enumerate(zip(decoder.layers, pools, strict=True)):
            ops.row(layer.qkv, residual, qkv, self.gains[id(layer.input_norm)], eps)
            q = ops.rope_write(
                qkv,
                positions,
                decoder.cos_sin,
                k_pool,
                v_pool,
                write_index,
                heads,
                layer.q_norm,
                layer.k_norm,
                eps,
                layer.kv_scales,
            )
            mixed = attention.attend(index, q, k_pool, v_pool).flatten(1)
            ops.row(layer.out, mixed, residual, add=True)
            if layer.gate_up.bias is None:
                gain = self.gains[id(layer.ffn_norm)]
                ops.row(layer.gate_up, residual, gated, gain, eps, gated=True)
            else:
                normed = ops.rms_norm(residual, layer.ffn_norm, eps)
                gated = ops.silu_mul(ops.linear(layer.gate_up, normed))
            ops.row(layer.down, gated, residual, add=True)
        logits = torch.empty((1, config.vocab_size), dtype=torch.float32, device=residual.device)
        return ops.row(decoder.head, residual, logits, self.gains[id(decoder.norm)], eps)


def gains_of(decoder: Any) -> list[Tensor]:
    norms = [norm for layer in decoder.layers for norm in (layer.input_norm, layer.ffn_norm)]
    return [*norms, decoder.norm]


def narrowed(gain: Tensor) -> Tensor:
    """In bfloat16 if that loses nothing: every program of a product reads all of it."""
    narrow = gain.bfloat16()
    return narrow if torch.equal(narrow.float(), gain) else gain
