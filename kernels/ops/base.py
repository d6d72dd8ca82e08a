"""This file is the contract of the operators that a forward pass is made of, attention apart.

One instance serves one runner and is chosen once, at load. It does not know models. T is the number
of tokens in the step, H the hidden size, F the feed-forward size, hq/hkv the query and key/value
heads, d the head dimension. Results are contiguous and may share a scratch buffer only if the
docstring says so (none does today): the caller may keep a result until the step ends.

Law: in float32 on a CPU each element of a result has the same bits whatever other rows are in the
call, whatever their number and order: its order of reduction depends on K (or H) alone. Recovery,
prefix caching and chunked prefill rest on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.quant.weight import Weight
from kernels.registry import Registry

FP8_MAX = 448.0  # the largest number of e4m3
KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn}  # that a pool may be kept in on request
PreparedLinear = Any  # opaque: made and read by one flavour of Ops
PreparedEmbedding = Any


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of one attention layer's projections; a row of qkv is [query | key | value]."""

    query: int
    kv: int
    dim: int

    @property
    def qkv_len(self) -> int:
        return (self.query + 2 * self.kv) * self.dim


class FusedForward(Protocol):
    """A whole decoder as one operator, with the bits of operator by operator."""

    def __call__(
        self,
        residual: Tensor,  # [T, H] embedded tokens; overwritten
        positions: Tensor,  # int32 [T]
        write_index: Tensor,  # int64 [T]
        pools: list[tuple[Tensor, Tensor]],  # (k, v) of each layer
        attention: Any,  # an Attention, planned for this step
        sampled: Tensor,  # int64 [S], ascending
        hidden: Tensor | None = None,  # float32 [S, H]: gets what the head is given
    ) -> Tensor | None:
        """Logits float32 [S, vocab], keys and values written; None, nothing done, if it can't work
        with this attention, or give `hidden`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """What narrows a draw, of each row drawn; contiguous, on the operators' device."""

    temperature: Tensor  # float32 [D], > 0
    top_k: Tensor  # int64 [D], in [1, vocab]; vocab: off
    top_p: Tensor  # float64 [D]; 1: off
    min_p: Tensor  # float64 [D]; 0: off


class Ops(Protocol):
    """Operators of one device flavour. `dtype` is that of activations and of the KV pool."""

    device: torch.device

    def supports(self, dtype: str, weight_format: str) -> bool:
        """Whether `prepare_linear` is fast (or works at all) for weights of `weight_format`
        ("float32", "bfloat16", "float16" or a key of BLOCK_FORMATS) computed as `dtype`
        ("quantized", "bfloat16", "float16", "float32"). Used to settle dtype "auto"."""
        ...

    def activation_dtype(self, dtype: str) -> torch.dtype:
        """What activations are kept in for `dtype` (see `supports`)."""
        ...

    def kv_dtype(self, dtype: str, wanted: str = "auto") -> torch.dtype:
        """What the KV pool is kept in for `dtype`; compiled CPU operators halve it to bfloat16.
        `wanted` is "auto" or one of `KV_DTYPES`. Raises OpsUnavailable with the reason."""
        ...

    def set_threads(self, count: int) -> None:
        """How many threads of the host operators may use; of this process as a whole."""
        ...

    def progress(self) -> int | None:
        """A number that changes all the time while operators of this process compute, however
        long one takes; None where nothing counts so finely. From any thread."""
        ...

    def fuse(self, decoder: Any) -> FusedForward | None:
        """All of `decoder` (a loaded `layers.decoder.Decoder`) in one call, where that exists."""
        ...

    def prepare_linear(self, weight: Weight, bias: Tensor | None, dtype: str) -> PreparedLinear:
        """Packs `weight` [N, K] (and `bias` [N]) once; may copy. With "quantized" a BlockWeight is
        multiplied as its blocks, and a DenseWeight in the activation dtype."""
        ...

    def linear(self, prepared: PreparedLinear, x: Tensor) -> Tensor:
        """x [T, K] in the activation dtype -> [T, N] in the activation dtype."""
        ...

    def linear_float32(self, prepared: PreparedLinear, x: Tensor) -> Tensor:
        """As `linear`, with a float32 result: for logits."""
        ...

    def prepare_embedding(self, weight: Weight, dtype: str) -> PreparedEmbedding: ...

    def embed(self, prepared: PreparedEmbedding, ids: Tensor) -> Tensor:
        """ids int64 [T] -> [T, H] in the activation dtype."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x², -1) + eps) * weight in float32; x [T, H], weight float32 [H]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds x to `residual` in place and returns `rms_norm(residual)`; all [T, H]."""
        ...

    def rope_write(
        self,
        qkv: Tensor,  # [T, (hq + 2 * hkv) * d]
        positions: Tensor,  # int32 [T]
        cos_sin: Tensor,  # float32 [positions_max, d]: cosines of the d/2 angles, then their sines
        k_pool: Tensor,  # [page_count * page_size, hkv, d]
        v_pool: Tensor,
        write_index: Tensor,  # int64 [T], rows of the pools
        heads: Heads,
        q_norm: Tensor | None,  # float32 [d]: RMS norm of each head before rotation (Qwen3)
        k_norm: Tensor | None,
        eps: float,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor:
        """Rotates q and k (pairs are (i, i + d/2)), writes k and v into the pools at `write_index`
        and returns q [T, hq, d]. `qkv` may be overwritten. What goes into pools of fp8 is divided
        by `kv_scales` (k's, v's) and cut off at +-FP8_MAX."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F] -> silu(gate) * up [T, F], gate being the first F columns."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """As `silu_mul`, with the tanh form of gelu."""
        ...

    def bar(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """Adds -inf, in place, to what may not come: of the different rows `rows` (int64 [D]) of
        logits float32 [S, vocab], each token whose bit is not set in words (int32 [D, words],
        contiguous, at least a bit for each column)."""
        ...

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [S, vocab] -> the largest of each row (NaN if there is one) and the first id at
        which it stands, int64 [S]."""
        ...

    def draw(self, logits: Tensor, rows: Tensor, filters: Filters, noise: Tensor) -> Tensor:
        """A token for each of the rows `rows` (int64 [D]) of logits float32 [S, vocab], which stay:
        the first id at which the sum of weights exceeds noise (float64 [D], in [0, 1)) times the
        sum of all, as `draw.py` says. A row's token depends on that row alone."""
        ...


# name -> factory(device); a factory raises OpsUnavailable with the reason.
OPS: Registry[Callable[[torch.device], Ops]] = Registry("ops", "kernels.ops")


class OpsUnavailable(RuntimeError):
    """This flavour can't run here (no compiler, another CPU or device); the text is the reason."""
