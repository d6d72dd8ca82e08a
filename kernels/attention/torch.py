"""This file is attention over pages in plain torch: any device, any dtype of pools, computed in
float32, soft caps, windows and scales included.

Queries are cut into tiles of `TILE` absolute positions and keys into blocks of `BLOCK`, both
counted from position 0 of their sequence, so that a chunk of a prompt or a lone decode row is
computed as the same products as the whole prompt would be. Tiles of all rows are put together in
groups of `GROUP`: every product of the step has one shape. Python loops over groups and blocks,
never over sequences.

Laws (see `base.py`): a key past the row's end is replaced by the row's last key and then masked, so
unnamed pages are never read. It does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.base import ATTENTION, AttentionBatch, AttentionShape
from kernels.ops import exact

TILE = 16  # queries
BLOCK = 128  # keys
GROUP = 4  # tiles in one product: what a lone decode row pays for is GROUP * TILE queries


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """`GROUP` tiles that are computed together over the blocks that any of them needs. Products are
    of whole tiles; all else is done for the Q queries that there are, in the batch's order."""

    query_index: Tensor  # int64 [GROUP * TILE], rows of q; T (a row of zeros) where there is none
    tile: Tensor  # int64 [Q], in [0, GROUP): where each query lies
    row: Tensor  # int64 [Q], in [0, TILE)
    position: Tensor  # int64 [Q, 1, 1, 1], in its sequence
    key_index: list[Tensor]  # of each block: int64 [GROUP, BLOCK], rows of the pools
    first_keys: list[int]  # absolute position of each block's first key


@ATTENTION.register("torch")
class TorchAttention:
    """See `Attention`."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.group_heads = shape.heads.query // shape.heads.kv
        assert self.group_heads * shape.heads.kv == shape.heads.query, shape.heads
        self.plans: dict[int | None, list[Group]] = {}
        rows, count, dim = TILE * self.group_heads, GROUP * shape.heads.kv, shape.heads.dim
        self.batched = shape.device.type != "cpu" or (
            exact.bmm_is_placeless(count, rows, dim, BLOCK, transposed=True)
            and exact.bmm_is_placeless(count, rows, BLOCK, dim, transposed=False)
        )

    def plan(self, batch: AttentionBatch) -> None:
        device = batch.page_table.device
        start, query_len = batch.query_start[:-1].long(), batch.query_len.long()
        kv_len = batch.kv_len.long()
        first = kv_len - query_len  # position of each row's first query
        first_tile = first // TILE
        tile_count = (kv_len - 1) // TILE - first_tile + 1
        rows = torch.arange(len(kv_len), device=device)
        row = rows.repeat_interleave(tile_count)  # of each tile
        nth = torch.arange(len(row), device=device) - (tile_count.cumsum(0) - tile_count)[row]
        base = (first_tile[row] + nth) * TILE  # position of each tile's first query

        position = base[:, None] + torch.arange(TILE, device=device)  # [tiles, TILE]
        inside = (position >= first[row, None]) & (position < kv_len[row, None])
        token = position - first[row, None] + start[row, None]
        total = int(query_len.sum())
        query_index = torch.where(inside, token, total)
        self.plans = {
            window: plan_groups(batch, window, row, base, query_index, kv_len)
            for window in dict.fromkeys(self.shape.windows)
        }

    def attend(
        self, layer_index: int, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor | None = None
    ) -> Tensor:
        window = self.shape.windows[layer_index]
        k_scale, v_scale = self.shape.scales(layer_index)
        scale = self.shape.scale * k_scale
        q_padded = torch.cat((q.float() * scale, q.new_zeros(1, *q.shape[1:]).float()))
        pieces = [
            self.attend_group(group, window, q_padded, k_pool, v_pool)
            for group in self.plans[window]
        ]  # each [Q, hkv, g, d]; a tile holds the queries of one row in order, as the batch does
        result = torch.cat(pieces).view(q.shape)
        result = (result * v_scale if v_scale != 1.0 else result).to(q.dtype)
        return result if out is None else out.copy_(result)

    def attend_group(
        self, group: Group, window: int | None, q_padded: Tensor, k_pool: Tensor, v_pool: Tensor
    ) -> Tensor:
        kv, dim, g = self.shape.heads.kv, self.shape.heads.dim, self.group_heads
        q = q_padded.index_select(0, group.query_index).view(GROUP, TILE, kv, g, dim)
        q = q.permute(0, 2, 1, 3, 4).reshape(GROUP * kv, TILE * g, dim)
        scores = []
        for index, first_key in zip(group.key_index, group.first_keys, strict=True):
            keys = gather(k_pool, index)  # [GROUP * hkv, BLOCK, d]
            tiles = self.bmm(q, keys.transpose(1, 2)).view(GROUP, kv, TILE, g, BLOCK)
            score = tiles[group.tile, :, group.row]  # [Q, hkv, g, BLOCK]
            if self.shape.softcap is not None:
                score = exact.soft_cap(score, self.shape.softcap)
            key = torch.arange(first_key, first_key + BLOCK, device=q.device)
            hidden = key > group.position
            if window is not None:
                hidden = hidden | (key <= group.position - window)
            scores.append(score.masked_fill_(hidden, -torch.inf))
        peak = scores[0].amax(-1, keepdim=True)
        for score in scores[1:]:
            peak = torch.maximum(peak, score.amax(-1, keepdim=True))
        total = torch.zeros_like(peak)
        mixed = q.new_zeros(len(group.tile), kv, g, dim)
        tiles = q.new_zeros(GROUP, kv, TILE, g, BLOCK)
        for score, index in zip(scores, group.key_index, strict=True):
            weight = exact.exp(score.sub_(peak))
            total.add_(exact.fold_sum(weight))
            tiles[group.tile, :, group.row] = weight
            product = self.bmm(tiles.view(GROUP * kv, TILE * g, BLOCK), gather(v_pool, index))
            mixed.add_(product.view(GROUP, kv, TILE, g, dim)[group.tile, :, group.row])
        return mixed.div_(total)

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        if self.batched:
            return torch.bmm(a, b)
        return torch.stack([torch.mm(left, right) for left, right in zip(a, b, strict=True)])


def plan_groups(
    batch: AttentionBatch,
    window: int | None,
    row: Tensor,  # int64 [tiles]: row of the batch
    base: Tensor,  # int64 [tiles]: position of the tile's first query
    query_index: Tensor,  # int64 [tiles, TILE]
    kv_len: Tensor,  # int64 [rows]
) -> list[Group]:
    """Groups of tiles in order, the last one filled up with copies whose queries are padding."""
    device = row.device
    total = int(batch.query_start[-1])
    missing = -len(row) % GROUP
    row = torch.cat((row, row[:1].expand(missing)))
    base = torch.cat((base, base[:1].expand(missing)))
    padding = query_index.new_full((missing, TILE), total)
    query_index = torch.cat((query_index, padding))
    last_key = torch.minimum(base + TILE, kv_len[row]) - 1
    end_blocks = (last_key // BLOCK + 1).view(-1, GROUP).amax(1).tolist()
    first_key = torch.zeros_like(base) if window is None else (base - window + 1).clamp_(min=0)
    begin_blocks = (first_key // BLOCK).view(-1, GROUP).amin(1).tolist()
    groups = []
    for nth, (begin, end) in enumerate(zip(begin_blocks, end_blocks, strict=True)):
        tiles = slice(nth * GROUP, (nth + 1) * GROUP)
        rows = row[tiles, None]
        key = torch.arange(begin * BLOCK, end * BLOCK, device=device)
        key = torch.minimum(key, kv_len[rows] - 1)
        page = batch.page_table[rows, key // batch.page_size].long()
        index = page * batch.page_size + key % batch.page_size  # [GROUP, keys]
        tile, place = (query_index[tiles] < total).nonzero(as_tuple=True)
        groups.append(
            Group(
                query_index[tiles].flatten(),
                tile,
                place,
                (base[tiles][tile] + place).view(-1, 1, 1, 1),
                list(index.split(BLOCK, dim=1)),
                list(range(begin * BLOCK, end * BLOCK, BLOCK)),
            )
        )
    return groups


def gather(pool: Tensor, index: Tensor) -> Tensor:
    """pool [tokens, hkv, d], index [GROUP, BLOCK] -> float32 [GROUP * hkv, BLOCK, d]."""
    _, kv, dim = pool.shape
    flat = index[:, None, :] * kv + torch.arange(kv, device=pool.device)[:, None]
    rows = pool.view(-1, dim)
    if pool.dtype.itemsize == 1:  # torch moves no floats of one byte
        chosen = rows.view(torch.uint8).index_select(0, flat.flatten()).view(pool.dtype)
    else:
        chosen = rows.index_select(0, flat.flatten())
    return chosen.float().view(-1, BLOCK, dim)
