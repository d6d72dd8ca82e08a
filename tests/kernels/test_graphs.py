"""What the host hands to a captured step: on a CPU, without capturing any."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.graphs import ChunkGraph, decode_rows, ladder
from kernels.slots import FlatBatch

COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=10)


def batch_of(decodes: int, counts: list[int], seed: int) -> FlatBatch:
    """A step of `decodes` decode rows and then rows of `counts` tokens, about half of them sampled,
    with values that name their place."""
    rng = np.random.default_rng(seed)
    lens = np.array([1] * decodes + counts, np.int32)
    start = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=start[1:])
    sampling = rng.random(len(lens)) < 0.5
    sampling[:decodes] = True
    slots = rng.permutation(400)[: len(lens)].astype(np.int32)
    total = int(start[-1])
    return FlatBatch(
        slots=slots,
        query_len=lens,
        kv_len=lens + rng.integers(0, 50, len(lens)).astype(np.int32),
        query_start=start,
        ids=np.arange(1000, 1000 + total, dtype=np.int64),
        positions=np.arange(2000, 2000 + total, dtype=np.int32),
        write_index=np.arange(3000, 3000 + total, dtype=np.int64),
        page_table=np.zeros((len(lens), 1), np.int32),
        sampled=(start[1:][sampling] - 1).astype(np.int64),
        sampled_slots=slots[sampling],
    )


def packed(size: int, rows: int, decodes: int, batch: FlatBatch) -> tuple[ChunkGraph, Any]:
    graph = object.__new__(ChunkGraph)
    graph.size, graph.decodes = size, decodes
    graph.token_count, graph.row_count = decodes + size, decodes + rows
    host = np.full(4 * graph.token_count + 8 * graph.row_count + 4, 77, np.int32)
    count = len(batch.sampled)
    heat = np.linspace(0.1, 1.0, count, dtype=np.float32)
    graph.pack(batch, heat, heat / 2, host)
    return graph, host


@given(st.integers(0, 12), COUNTS, st.integers(0, 99), st.booleans())
def test_a_packed_step_is_the_step(decodes: int, counts: list[int], seed: int, wide: bool) -> None:
    batch = batch_of(decodes, counts, seed)
    first = decode_rows(batch)
    assert first >= decodes
    graph, host = packed(400, 24, 24 if wide else 0, batch)
    total, each = graph.token_count, graph.row_count
    tokens = host[: 4 * total].reshape(4, total)
    rows = host[4 * total :][: 7 * each].reshape(7, each)
    start = host[4 * total + 7 * each :][: each + 1]
    real = tokens[2] >= 0
    assert tokens[0, real].tolist() == batch.ids.tolist()
    assert tokens[1, real].tolist() == batch.positions.tolist()
    assert tokens[2, real].tolist() == batch.write_index.tolist()
    assert tokens[3, real].tolist() == np.repeat(batch.slots, batch.query_len).tolist()
    assert not tokens[:2, ~real].any() and not tokens[3, ~real].any()
    # The starts are those of the rows' tokens, and rows of padding have none.
    assert (np.diff(start) >= 0).all() and start[-1] <= total
    kept = np.flatnonzero(rows[1])
    assert rows[0, kept].tolist() == batch.query_len.tolist()
    assert rows[1, kept].tolist() == batch.kv_len.tolist()
    assert rows[2, kept].tolist() == batch.slots.tolist()
    for row, begin, count in zip(kept, start[kept], batch.query_len, strict=True):
        assert real[begin : begin + count].all()
        if row >= graph.decodes:
            assert start[row + 1] - begin == count
    if wide:
        assert start[:24].tolist() == list(range(24)) and (kept[:first] < 24).all()
        assert (kept[first:] >= 24).all()
    count = len(batch.sampled)
    assert tokens[0, rows[3, :count]].tolist() == batch.ids[batch.sampled].tolist()
    assert rows[4, :count].tolist() == batch.sampled_slots.tolist()
    assert (rows[4, count:] == -1).all()
    heat = rows[5, :count].copy().view(np.float32)
    assert np.allclose(rows[6, :count].copy().view(np.float32), heat / 2)


def test_sizes_grow_to_the_number_of_slots() -> None:
    for slot_count in (1, 3, 64, 256, 300):
        sizes = ladder(slot_count)
        assert sizes == sorted(set(sizes)) and sizes[-1] == slot_count
