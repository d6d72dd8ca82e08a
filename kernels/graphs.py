"""This file captures steps as CUDA graphs and replays them: decode steps by their number of rows,
and steps with prompts by their number of tokens, as long as it is the host that they wait for.

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
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention.base import AttentionBatch, HostRows, SharedPrefix
from kernels.attention.triton import TritonAttention
from kernels.kv import KvPool, free_memory_bytes
from kernels.layers.decoder import Decoder
from kernels.memory import release_freed
from kernels.slots import FlatBatch

Progress = Callable[[str, int, int], None]  # what, done, total
Clock = Callable[[], float]
G = TypeVar("G", bound="Graph")

SHARED_ROWS_MIN = 16  # sizes from which a graph looks for keys that its rows share
CHUNK_ROWS = 8
CHUNK_TOKENS = (16, 32, 64, 128, 256, 512, 1024)
# Prompts that arrive while many decode.
WIDE_DECODES = 64  # or as many as there are slots
WIDE_ROWS = 64
WIDE_TOKENS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Longer ones are left to the attention backend of prompts, which is faster than what is captured.
WIDE_KEYS_MAX = 2048
# Of the time that launching a step's kernels takes on an idle host: what runs longer needs none.
# In service launching takes up to twice as long, beside the threads that wait for results.
HOST_BOUND = 2.0
PACKED = 8  # rows of what the host fills, see `DecodeGraph.packed`


def ladder(rows_max: int) -> list[int]:
    """Sizes up to `rows_max`: close together where a row more costs most."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    sizes += list(range(136, rows_max, 8))
    return [*(size for size in sizes if size < rows_max), rows_max]


class Graph:
    """Something captured: `capture` runs `compute` once, then records it."""

    logits: Tensor
    result: Tensor  # int32 [2, rows]

    def capture(self, owner: Graphs) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            self.plan(owner)
            with owner.tuned():
                self.compute(owner)  # what is made at the first use is made now
            self.is_host_bound = self.measure(owner)
            with torch.cuda.graph(self.graph, pool=owner.pool):
                self.plan(owner)  # its scratch is of the graphs' memory as well
                logits, result = self.compute(owner)
        self.logits, self.result = borrowed(logits), borrowed(result)
        owner.attention.forget()

    def measure(self, owner: Graphs) -> bool:
        """Whether launching the kernels one by one takes about as long as they do."""
        device = owner.page_table.device
        torch.cuda.synchronize(device)
        begin_s = monotonic()
        self.compute(owner)
        launched_s = monotonic()
        torch.cuda.synchronize(device)
        return monotonic() - begin_s < HOST_BOUND * (launched_s - begin_s)

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
    """Steps of up to `decodes` decode rows, then up to `size` tokens in up to `rows` further rows;
    any row may sample.

    `packed` int32, one after the other: ids (negative: the last token of its slot), positions,
    write indices (negative: padding) and slots of all tokens; then, of all rows, the lengths of
    queries and keys, slots, tokens sampled, their slots (negative: none), temperatures and noise;
    then the starts of the queries. Tokens and rows of decode come first, with their padding.
    """

    def __init__(self, owner: Graphs, size: int, rows: int, decodes: int) -> None:
        self.size, self.decodes = size, decodes
        self.token_count, self.row_count = decodes + size, decodes + rows
        total, each = self.token_count, self.row_count
        device = owner.page_table.device
        count = 4 * total + 8 * each + 4
        self.packed = torch.zeros(count, dtype=torch.int32, device=device)
        self.ids, self.positions, self.write_index, self.slot_of = self.packed[: 4 * total].view(
            4, total
        )
        table = self.packed[4 * total :][: 7 * each].view(7, each)
        self.query_len, self.kv_len, self.rows, self.sampled, self.sampled_slots = table[:5]
        self.heat, self.noise = table[5].view(torch.float32), table[6].view(torch.float32)
        self.start = self.packed[4 * total + 7 * each :][: each + 1]
        self.write_index.fill_(-1)
        self.sampled_slots.fill_(-1)
        self.start[: decodes + 1].copy_(torch.arange(decodes + 1, device=device))
        self.start[decodes:].fill_(decodes)
        self.capture(owner)

    def pack(
        self, batch: FlatBatch, heat: NDArray[Any], noise: NDArray[Any], host: NDArray[Any]
    ) -> None:
        """Writes the batch into `host`, int32 of the length of `packed`. Its first `decodes` rows,
        or fewer, are those of one token that come before all others."""
        first = decode_rows(batch)
        total, each = self.token_count, self.row_count
        pad, row_count, count = self.decodes - first, len(batch.slots), len(batch.ids)
        assert first <= self.decodes or not self.decodes, (first, self.decodes)
        if not self.decodes:  # all rows are taken for prompts
            first = pad = 0
        host[: 4 * total + 7 * each] = 0
        tokens = host[: 4 * total].reshape(4, total)
        tokens[2] = -1
        values: tuple[NDArray[Any], ...] = (batch.ids, batch.positions, batch.write_index)
        for part, begin in ((slice(first), 0), (slice(first, None), self.decodes)):
            end = begin + len(batch.ids[part])
            for target, value in zip(tokens, values, strict=False):
                target[begin:end] = value[part]
        tokens[3, :first] = batch.slots[:first]
        tokens[3, self.decodes : self.decodes + count - first] = np.repeat(
            batch.slots[first:], batch.query_len[first:]
        )
        rows = host[4 * total :][: 7 * each].reshape(7, each)
        rows[4] = -1
        for part, begin in ((slice(first), 0), (slice(first, row_count), self.decodes)):
            end = begin + len(batch.slots[part])
            rows[0, begin:end] = batch.query_len[part]
            rows[1, begin:end] = batch.kv_len[part]
            rows[2, begin:end] = batch.slots[part]
        sampled = batch.sampled + np.where(batch.sampled < first, 0, pad)
        rows[3:, : len(sampled)] = (
            sampled,
            batch.sampled_slots,
            heat.view(np.int32),
            noise.view(np.int32),
        )
        start = host[4 * total + 7 * each :]
        start[:] = pad + count
        start[: self.decodes] = np.arange(self.decodes)
        start[self.decodes : self.decodes + row_count - first + 1] = batch.query_start[first:] + pad

    def plan(self, owner: Graphs) -> None:
        lens = np.full(self.row_count, self.size, np.int32)
        lens[: self.decodes] = 1
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


def decode_rows(batch: FlatBatch) -> int:
    """How many rows of one token come before all others."""
    longer = batch.query_len != 1
    return int(longer.argmax()) if longer.any() else len(longer)


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
        slot_count = page_table.shape[0]
        self.wide_sizes: list[int] = []
        if slot_count > CHUNK_ROWS:
            self.wide_sizes = [size for size in WIDE_TOKENS if size <= step_tokens_max]
        self.wide_decodes = sorted({min(WIDE_DECODES, slot_count), slot_count})
        self.decodes: dict[tuple[int, bool], DecodeGraph] = {}
        self.chunks: dict[tuple[int, int], ChunkGraph] = {}  # by decode rows and tokens
        self.pool = torch.cuda.graph_pool_handle()
        self.bytes_max = bytes_max
        self.byte_count = 0

    def tuned(self) -> AbstractContextManager[None]:
        """While it lasts, products of new sizes are measured."""
        tuning = getattr(self.model.ops, "tuning", None)
        return nullcontext() if tuning is None else tuning.opened()

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

    def chunk(self, decodes: int, rows: int, tokens: int, keys: int = 0) -> ChunkGraph | None:
        """The smallest graph for a step of `decodes` decode rows and `tokens` tokens in `rows`
        further rows that see up to `keys`, unless they are too many."""
        narrow = decodes + rows <= min(CHUNK_ROWS, self.page_table.shape[0])
        if narrow and self.token_sizes and decodes + tokens <= self.token_sizes[-1]:
            return self.chunk_of(0, CHUNK_ROWS, self.token_sizes, decodes + tokens)
        if not self.wide_sizes or tokens > self.wide_sizes[-1]:
            return None
        if rows > WIDE_ROWS or keys > WIDE_KEYS_MAX:
            return None
        wide = next(count for count in self.wide_decodes if count >= decodes)
        return self.chunk_of(wide, WIDE_ROWS, self.wide_sizes, tokens)

    def chunk_of(self, decodes: int, rows: int, sizes: list[int], tokens: int) -> ChunkGraph | None:
        sizes = sizes[bisect_left(sizes, tokens) :]
        if (decodes, sizes[0]) not in self.chunks:
            graph = self.made(partial(ChunkGraph, self, sizes[0], rows, decodes))
            if graph is not None:
                self.chunks[decodes, sizes[0]] = graph
                if decodes and not graph.is_host_bound:  # nor are those of more tokens
                    self.wide_sizes = [size for size in self.wide_sizes if size <= sizes[0]]
        keys = ((decodes, size) for size in sizes)
        return next((self.chunks[key] for key in keys if key in self.chunks), None)

    def made(self, make: Callable[[], G]) -> G | None:
        """What `make` captures, if there is memory for it."""
        if self.is_full:
            return None
        device = self.page_table.device
        release_freed(device)  # as a capture does: what it gives back would hide what it takes
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
        memory, and their steps into it. Steps with prompts come last, and from the smallest, since
        it is not known before up to which size graphs pay. Returns how many are left."""
        end_s = now() + seconds_max
        cascades = getattr(self.attention, "cascades", False)
        sharing = [size for size in self.row_sizes if cascades and size >= SHARED_ROWS_MIN]
        makes: list[Callable[[], Any]] = [
            *(partial(self.chunk, 0, 1, size) for size in reversed(self.token_sizes)),
            *(partial(self.decode, size) for size in reversed(self.row_sizes)),
            *(partial(self.decode, size, True) for size in reversed(sharing)),
            *(
                partial(self.chunk, count, WIDE_ROWS, size)
                for size in self.wide_sizes
                for count in self.wide_decodes
            ),
        ]
        for nth, make in enumerate(makes):
            if self.is_full or now() >= end_s:
                return len(makes) - nth
            make()
            if progress is not None:
                progress("graphs", nth + 1, len(makes))
        return 0
