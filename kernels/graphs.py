"""This file captures steps as CUDA graphs and replays them: decode steps by their number of rows,
and steps of few rows and tokens (a prompt that arrives) by their number of tokens.

A graph covers all of a step: input tokens from the device's table, forward, sampling. What changes
between replays lies in buffers of fixed address: `packed`, which the host fills, the page table,
the pools. Rows beyond those of the step are padding: they write no keys and see none. All graphs
use the same memory, one after the other: what a replay leaves is read before the next one begins.

It does not know requests or the host's state. Laws: a replay computes what the same kernels compute
launched one by one; graphs take no more memory than they were given (and one of them).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.attention.base import AttentionBatch, HostRows, SharedPrefix
from kernels.attention.triton import TritonAttention
from kernels.kv import KvPool, free_memory_bytes
from kernels.layers.decoder import Decoder

Progress = Callable[[str, int, int], None]  # what, done, total
Clock = Callable[[], float]
G = TypeVar("G", bound="Graph")

SHARED_ROWS_MIN = 16  # sizes from which a graph looks for keys that its rows share
CHUNK_ROWS = 8
CHUNK_TOKENS = (16, 32, 64, 128, 256, 512, 1024)
PACKED = 8  # rows of what the host fills, see `DecodeGraph.packed`


def ladder(rows_max: int) -> list[int]:
    """Sizes up to `rows_max`: close together where a row more costs most."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    sizes += list(range(160, rows_max, 32))
    return [*(size for size in sizes if size < rows_max), rows_max]


class Graph:
    """Something captured: `capture` runs `compute` once, then records it."""

    logits: Tensor
    result: Tensor  # int32 [2, rows]

    def capture(self, owner: Graphs) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            self.plan(owner)
            self.compute(owner)  # what is made at the first use is made now
            torch.cuda.synchronize(owner.page_table.device)
            with torch.cuda.graph(self.graph, pool=owner.pool):
                self.plan(owner)  # its scratch is of the graphs' memory as well
                logits, result = self.compute(owner)
        self.logits, self.result = borrowed(logits), borrowed(result)
        owner.attention.forget()

    def plan(self, owner: Graphs) -> None:
        raise NotImplementedError

    def compute(self, owner: Graphs) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def replay(self) -> None:
        self.graph.replay()


class DecodeGraph(Graph):
    """Decode steps of up to `size` rows; with `sharing` those of which many begin alike.

    `packed` [8, size] int32: slots (negative: padding), positions, pages written to, ids (negative:
    the device's last token), temperatures and noise (float32 bits), shared lengths, and, in the
    last row, the slot whose table has the shared pages and their length in tokens.
    """

    def __init__(self, owner: Graphs, size: int, sharing: bool) -> None:
        self.size, self.sharing = size, sharing
        device = owner.page_table.device
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        longs: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.packed = torch.zeros((PACKED, max(size, 4)), **ints)
        self.packed[0] = -1
        self.ids, self.write_index = torch.zeros(size, **longs), torch.zeros(size, **longs)
        self.positions, self.kv_len = torch.zeros(size, **ints), torch.zeros(size, **ints)
        self.table_rows = torch.zeros(size, **ints)
        self.sampled = torch.arange(size, **longs)
        self.start = torch.arange(size + 1, **ints)
        self.ones = torch.ones(size, **ints)
        self.capture(owner)

    def plan(self, owner: Graphs) -> None:
        ones = np.ones(self.size, np.int32)
        shared = None
        if self.sharing:
            shared = SharedPrefix(self.packed[6], self.packed[7])
        owner.attention.plan(
            AttentionBatch(
                page_table=owner.page_table,
                query_start=self.start,
                query_len=self.ones,
                kv_len=self.kv_len,
                page_size=owner.kv.page_size,
                query_len_max=1,
                kv_len_max=owner.context_len,
                table_rows=self.table_rows,
                host=HostRows(ones, ones, ones[:, None]),
                shared=shared,
            )
        )

    def compute(self, owner: Graphs) -> tuple[Tensor, Tensor]:
        owner.picker.stage(
            self.packed,
            owner.page_table,
            owner.kv.page_size,
            self.ids,
            self.positions,
            self.kv_len,
            self.write_index,
            self.table_rows,
        )
        logits = owner.model.forward(
            self.ids, self.positions, self.write_index, owner.kv, owner.attention, self.sampled
        )
        size = self.size
        heat, noise = (self.packed[row, :size].view(torch.float32) for row in (4, 5))
        return logits, owner.picker.pick(logits, heat, noise, self.packed[0, :size])


class ChunkGraph(Graph):
    """Steps of up to `size` tokens in up to `CHUNK_ROWS` rows, of which any may sample.

    `packed` int32, one after the other: ids (negative: the last token of its slot), positions,
    write indices (negative: padding) and slots of `size` tokens; then, of CHUNK_ROWS rows each, the
    lengths of queries and keys, slots, tokens sampled, their slots (negative: none), temperatures
    and noise; then the starts of the queries.
    """

    def __init__(self, owner: Graphs, size: int) -> None:
        self.size = size
        device = owner.page_table.device
        count = 4 * size + 7 * CHUNK_ROWS + CHUNK_ROWS + 4
        self.packed = torch.zeros(count, dtype=torch.int32, device=device)
        tokens = self.packed[: 4 * size].view(4, size)
        self.ids, self.positions, self.write_index, self.slot_of = tokens
        rows = self.packed[4 * size :][: 7 * CHUNK_ROWS].view(7, CHUNK_ROWS)
        self.query_len, self.kv_len, self.rows, self.sampled, self.sampled_slots = rows[:5]
        self.heat, self.noise = rows[5].view(torch.float32), rows[6].view(torch.float32)
        self.start = self.packed[4 * size + 7 * CHUNK_ROWS :][: CHUNK_ROWS + 1]
        self.write_index.fill_(-1)
        self.sampled_slots.fill_(-1)
        self.capture(owner)

    def plan(self, owner: Graphs) -> None:
        lens = np.full(CHUNK_ROWS, self.size, np.int32)  # none of them a decode row
        owner.attention.plan(
            AttentionBatch(
                page_table=owner.page_table,
                query_start=self.start,
                query_len=self.query_len,
                kv_len=self.kv_len,
                page_size=owner.kv.page_size,
                query_len_max=self.size,
                kv_len_max=owner.context_len,
                table_rows=self.rows,
                host=HostRows(lens, lens, lens[:, None]),
            )
        )

    def compute(self, owner: Graphs) -> tuple[Tensor, Tensor]:
        last = owner.picker.last_token.index_select(0, self.slot_of)
        ids = torch.where(self.ids < 0, last, self.ids).long()
        logits = owner.model.forward(
            ids,
            self.positions,
            self.write_index.long(),
            owner.kv,
            owner.attention,
            self.sampled.long(),
        )
        return logits, owner.picker.pick(logits, self.heat, self.noise, self.sampled_slots)


class Borrowed:
    """A tensor's place, for whoever makes a tensor of it again."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": {torch.float32: "<f4", torch.int32: "<i4"}[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def borrowed(tensor: Tensor) -> Tensor:
    """The same values at the same place, which is not kept: the next capture may use it."""
    assert tensor.is_contiguous()
    return torch.as_tensor(Borrowed(tensor), device=tensor.device)


class Graphs:
    """All that is captured; when first asked for, or all at once by `capture`. `bytes_max`: of the
    device's memory; once it is used up, a step takes a larger graph that there is, or none."""

    def __init__(
        self,
        model: Decoder,
        kv: KvPool,
        attention: TritonAttention,
        picker: Any,
        page_table: Tensor,
        context_len: int,
        step_tokens_max: int,
        bytes_max: int,
    ) -> None:
        self.model, self.kv, self.attention, self.picker = model, kv, attention, picker
        self.page_table, self.context_len = page_table, context_len
        self.row_sizes = ladder(page_table.shape[0])
        self.token_sizes = [size for size in CHUNK_TOKENS if size <= step_tokens_max]
        self.decodes: dict[tuple[int, bool], DecodeGraph] = {}
        self.chunks: dict[int, ChunkGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.bytes_max = bytes_max
        self.byte_count = 0

    @property
    def is_full(self) -> bool:
        return self.byte_count >= self.bytes_max

    def decode(self, count: int, sharing: bool = False) -> DecodeGraph | None:
        """The smallest graph with room for `count` rows."""
        sizes = self.row_sizes[bisect_left(self.row_sizes, count) :]
        if (sizes[0], sharing) not in self.decodes:
            graph = self.made(partial(DecodeGraph, self, sizes[0], sharing))
            if graph is not None:
                self.decodes[sizes[0], sharing] = graph
        return next((self.decodes[n, sharing] for n in sizes if (n, sharing) in self.decodes), None)

    def chunk(self, rows: int, tokens: int) -> ChunkGraph | None:
        """The smallest graph for a step of few rows and tokens, unless it has too many."""
        sizes = self.token_sizes[bisect_left(self.token_sizes, tokens) :]
        if rows > min(CHUNK_ROWS, self.page_table.shape[0]) or not sizes:
            return None
        if sizes[0] not in self.chunks:
            graph = self.made(partial(ChunkGraph, self, sizes[0]))
            if graph is not None:
                self.chunks[sizes[0]] = graph
        return next((self.chunks[size] for size in sizes if size in self.chunks), None)

    def made(self, make: Callable[[], G]) -> G | None:
        """What `make` captures, if there is memory for it."""
        if self.is_full:
            return None
        device = self.page_table.device
        before = free_memory_bytes(device)
        try:
            return make()
        except torch.OutOfMemoryError:
            self.bytes_max = 0
            return None
        finally:
            self.byte_count += max(before - free_memory_bytes(device), 0)

    def capture(
        self,
        progress: Progress | None = None,
        seconds_max: float = math.inf,
        now: Clock = monotonic,
    ) -> int:
        """All sizes, as far as time and memory go; the largest first: the others then fit into its
        memory, and their steps into it. Returns how many are left."""
        end_s = now() + seconds_max
        cascades = getattr(self.attention, "cascades", False)
        sharing = [size for size in self.row_sizes if cascades and size >= SHARED_ROWS_MIN]
        makes: list[Callable[[], Any]] = [
            *(partial(self.chunk, 1, size) for size in reversed(self.token_sizes)),
            *(partial(self.decode, size) for size in reversed(self.row_sizes)),
            *(partial(self.decode, size, True) for size in reversed(sharing)),
        ]
        for nth, make in enumerate(makes):
            if self.is_full or now() >= end_s:
                return len(makes) - nth
            make()
            if progress is not None:
                progress("graphs", nth + 1, len(makes))
        return 0
