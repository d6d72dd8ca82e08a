"""This file is the contract of attention over a paged KV pool.

A backend is planned once a step, on the host's arrays, and then attends once a layer. It does not
know models or sampling. Row r of the batch is one sequence; its queries are
q[query_start[r] : query_start[r+1]], at absolute positions kv_len[r] - query_len[r] + i. Prefill
chunks and decode rows mix freely. Pools may be narrower than queries (fp8 with a scale for the keys
and one for the values of each layer); products are of the queries' dtype then.

Laws: a query at position p sees the keys j <= p (and j > p - window with a sliding window), each
read at page_table[r, j // page_size] * page_size + j % page_size. Nothing else of the pools is read
into a result: a page that no row names may hold NaN. In float32 on a CPU a result has the same bits
however the sequence was cut into chunks, wherever its pages lie, whatever their size and whoever
shares the batch: keys are reduced in an order that depends on absolute positions alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops.base import Heads
from kernels.registry import Registry


@dataclass(frozen=True, slots=True)
class HostRows:
    """The same rows where the host can read them without waiting for a device."""

    query_len: NDArray[np.int32]  # [rows]
    kv_len: NDArray[np.int32]  # [rows]
    page_table: NDArray[np.int32]  # [rows, pages_max], by row and not by slot


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Whole pages at the start of many rows of one query each, which may be read once for all."""

    lens: Tensor  # int32 [rows]: 0, or the length in tokens, less than the row's kv_len
    source: Tensor  # int32 [2]: a row of page_table that has the pages, and the length


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What one step attends over; tensors on the device of the pools."""

    page_table: Tensor  # int32 [rows, pages_max]; entries past a row's pages are never read
    query_start: Tensor  # int32 [rows + 1], from 0 to T
    query_len: Tensor  # int32 [rows], each >= 1
    kv_len: Tensor  # int32 [rows], this step's tokens included
    page_size: int
    query_len_max: int
    kv_len_max: int
    table_rows: Tensor | None = None  # int32 [rows]: whose page_table row is whose; None: its own
    host: HostRows | None = None
    shared: SharedPrefix | None = None


class Attention(Protocol):
    """One backend for one model: made with its heads, scale and (None or tokens) window."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepares what every layer of the step needs; replaces the last plan."""
        ...

    def attend(
        self, layer_index: int, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """q [T, hq, d], pools [page_count * page_size, hkv, d] -> [T, hq, d]. The keys and values
        of this step's tokens are in the pools already. `out`, if given, is written and returned."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend is made from."""

    heads: Heads
    scale: float
    windows: tuple[int | None, ...]  # of each layer; None: all keys
    dtype: torch.dtype  # of the pools
    device: torch.device
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    query_dtype: torch.dtype | None = None  # of queries and results; None: as the pools
    kv_scales: tuple[tuple[float, float], ...] = ()  # of each layer; none: 1
    context_len: int = 0  # tokens a row may have; 0: not known

    @property
    def wide_dtype(self) -> torch.dtype:
        return self.query_dtype or self.dtype

    def scales(self, layer_index: int) -> tuple[float, float]:
        """What keys and values as they lie in the pools are to be multiplied with."""
        return self.kv_scales[layer_index] if self.kv_scales else (1.0, 1.0)


# name -> factory(shape); a factory raises ops.base.OpsUnavailable with the reason.
ATTENTION: Registry[Callable[[AttentionShape], Attention]] = Registry(
    "attention", "kernels.attention"
)
