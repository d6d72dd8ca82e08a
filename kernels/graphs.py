"""This file captures decode steps as CUDA graphs, one for each size of a ladder, and replays them.

A graph covers all of a step: input tokens from the device's table, forward, sampling. What changes
between replays lies in buffers of fixed address: `packed`, which the host fills, the page table,
the pools. Rows beyond those of the step are padding: they write no keys and see none.

It does not know requests or the host's state. Law: a replay computes what the same kernels compute
launched one by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.attention.base import Attention, AttentionBatch, HostRows
from kernels.kv import KvPool
from kernels.layers.decoder import Decoder

Progress = Callable[[str, int, int], None]  # what, done, total


def ladder(rows_max: int) -> list[int]:
    """Sizes up to `rows_max`: close together where a row more costs most."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    sizes += list(range(160, rows_max, 32))
    return [*(size for size in sizes if size < rows_max), rows_max]


class DecodeGraph:
    """One captured size."""

    def __init__(self, owner: DecodeGraphs, size: int) -> None:
        self.size = size
        device = owner.page_table.device
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        longs: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.packed = torch.zeros((6, size), **ints)
        self.packed[0] = -1
        self.ids, self.write_index = torch.zeros(size, **longs), torch.zeros(size, **longs)
        self.positions, self.kv_len = torch.zeros(size, **ints), torch.zeros(size, **ints)
        self.table_rows = torch.zeros(size, **ints)
        self.sampled = torch.arange(size, **longs)
        self.start = torch.arange(size + 1, **ints)
        self.ones = torch.ones(size, **ints)
        self.graph = torch.cuda.CUDAGraph()
        self.logits = self.result = torch.empty(0)
        with torch.inference_mode():
            self.plan(owner)
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                self.compute(owner)  # what is made at the first use is made now
            torch.cuda.current_stream(device).wait_stream(side)
            torch.cuda.synchronize(device)
            with torch.cuda.graph(self.graph, pool=owner.pool):
                self.logits, self.result = self.compute(owner)
        # Attention's scratch of this plan: the graph writes to it.
        self.kept = [getattr(owner.attention, name, None) for name in ("part", "part_lse")]

    def plan(self, owner: DecodeGraphs) -> None:
        ones = self.ones.cpu().numpy()
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
            )
        )

    def compute(self, owner: DecodeGraphs) -> tuple[Tensor, Tensor]:
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
        heat, noise = self.packed[4].view(torch.float32), self.packed[5].view(torch.float32)
        return logits, owner.picker.pick(logits, heat, noise, self.packed[0])

    def replay(self) -> None:
        self.graph.replay()


class DecodeGraphs:
    """Graphs by size; captured when first asked for, or all at once by `capture`."""

    def __init__(
        self,
        model: Decoder,
        kv: KvPool,
        attention: Attention,
        picker: Any,
        page_table: Tensor,
        context_len: int,
    ) -> None:
        self.model, self.kv, self.attention, self.picker = model, kv, attention, picker
        self.page_table, self.context_len = page_table, context_len
        self.sizes = ladder(page_table.shape[0])
        self.captured: dict[int, DecodeGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def fits(self, count: int) -> bool:
        return count <= self.sizes[-1]

    def get(self, count: int) -> DecodeGraph:
        """The smallest graph with room for `count` rows."""
        size = self.sizes[bisect_left(self.sizes, count)]
        graph = self.captured.get(size)
        if graph is None:
            graph = self.captured[size] = DecodeGraph(self, size)
        return graph

    def capture(self, progress: Progress | None = None) -> None:
        """All sizes, the largest first: the others then fit into its memory."""
        for nth, size in enumerate(reversed(self.sizes)):
            self.get(size)
            if progress is not None:
                progress("graphs", nth + 1, len(self.sizes))
