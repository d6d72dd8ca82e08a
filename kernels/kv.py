"""This file owns the bytes of keys and values: one pool of pages per layer.

It does not know which page belongs to whom: the scheduler leases page numbers, and `slots.py`
keeps each sequence's table. A token at position p of a sequence lies at row
page_table[p // page_size] * page_size + p % page_size.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from kernels.memory import mapped_zeros
from kernels.ops.base import Heads

FORGET_BYTES_MAX = 256 << 20
# A host's memory is not ours alone as a GPU's is, and a pool of many GiB would be filled, sooner or
# later, with prefixes that no one asks for again.
HOST_POOL_BYTES = 4 << 30


class KvPool:
    """`layers[i]` is (k, v), each [page_count * page_size, hkv, d]. Not cleared when pages change
    hands: what a page holds beyond its sequence's length is never read."""

    def __init__(
        self,
        layer_count: int,
        heads: Heads,
        page_count: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises MemoryError if the pool does not fit."""
        assert page_count >= 1 and page_size >= 1, (page_count, page_size)
        self.page_count, self.page_size = page_count, page_size
        shape = (page_count * page_size, heads.kv, heads.dim)
        try:
            self.layers: list[tuple[Tensor, Tensor]] = [
                (pool_zeros(shape, dtype, device), pool_zeros(shape, dtype, device))
                for _ in range(layer_count)
            ]
        except (MemoryError, RuntimeError) as error:
            raise MemoryError(
                f"a pool of {page_count} pages of {page_size} tokens does not fit: "
                f"{page_bytes(layer_count, heads, page_size, dtype) * page_count >> 20} MiB"
            ) from error

    def forget(self) -> None:
        """Makes it visible if anything reads KV from before: fills the first page with NaN, or all
        of them if the pool is small. A large one is touched as it is used, not at once."""
        rows = self.page_size
        if self.byte_count() <= FORGET_BYTES_MAX:
            rows = self.page_count * self.page_size
        for k, v in self.layers:
            k[:rows].fill_(torch.nan)
            v[:rows].fill_(torch.nan)

    def byte_count(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.layers)


def pool_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the host committed as it is touched: torch.zeros would write all of it at once."""
    if device.type == "cpu":
        return mapped_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def page_bytes(layer_count: int, heads: Heads, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return 2 * layer_count * page_size * heads.kv * heads.dim * dtype.itemsize


def fitting_page_count(
    page_bytes: int,
    page_size: int,
    context_len: int,
    slot_count: int,
    bytes_max: int,
    modest_bytes: int | None = None,
) -> int:
    """As many pages as `bytes_max` holds, and no more than could ever be used: a context for each
    slot. With `modest_bytes` no more than that either, unless one context needs it."""
    by_memory = bytes_max // page_bytes
    if modest_bytes is not None:
        by_memory = min(by_memory, max(modest_bytes // page_bytes, -(-context_len // page_size)))
    return max(min(by_memory, -(-slot_count * context_len // page_size)), 0)


def free_memory_bytes(device: torch.device) -> int:
    """Memory that could be had now, the limit of the control group observed."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    candidates = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    fields = dict(line.split(":", 1) for line in read_lines("/proc/meminfo") if ":" in line)
    if "MemAvailable" in fields:
        candidates = [int(fields["MemAvailable"].split()[0]) * 1024]
    limit, used = (
        read_lines("/sys/fs/cgroup/memory.max"),
        read_lines("/sys/fs/cgroup/memory.current"),
    )
    if limit and used and limit[0].isdigit():
        candidates.append(max(int(limit[0]) - int(used[0]), 0))
    return min(candidates)


def read_lines(path: str) -> list[str]:
    """Lines of a file of the system, none if it isn't there."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split("\n")
    except OSError:
        return []
