"""This file holds a matrix of weights in the form in which its file holds it.

`DenseWeight` is a plain tensor; `BlockWeight` is the raw bytes of a GGUF block format, a row being
whole blocks. It does not know how products are computed: `Ops.prepare_linear` turns a weight into
whatever its device likes best. Nothing here changes a weight in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import torch
from torch import Tensor

# name -> (gguf type, elements in a block, bytes in a block)
BLOCK_FORMATS: dict[str, tuple[gguf.GGMLQuantizationType, int, int]] = {
    kind.name.lower(): (kind, *gguf.GGML_QUANT_SIZES[kind])
    for kind in (
        gguf.GGMLQuantizationType.Q4_0,
        gguf.GGMLQuantizationType.Q4_1,
        gguf.GGMLQuantizationType.Q5_0,
        gguf.GGMLQuantizationType.Q5_1,
        gguf.GGMLQuantizationType.Q8_0,
        gguf.GGMLQuantizationType.Q4_K,
        gguf.GGMLQuantizationType.Q5_K,
        gguf.GGMLQuantizationType.Q6_K,
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """`data`: [N, K], any float dtype; may be a view of a mapped file."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.data.shape[0]), int(self.data.shape[1])

    @property
    def format(self) -> str:
        return str(self.data.dtype).removeprefix("torch.")

    def dequantize(self) -> Tensor:
        """[N, K] float32; the same storage if it is float32 already."""
        return self.data.to(torch.float32)

    def rows(self, index: Tensor) -> DenseWeight:
        """The rows `index` (int64 [M]), in that order."""
        return DenseWeight(self.data[index])


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """`data`: uint8 [N, row_bytes], the bytes of GGUF `format` (a key of `BLOCK_FORMATS`)."""

    format: str
    data: Tensor
    shape: tuple[int, int]  # (N, K)

    def __post_init__(self) -> None:
        _, block_len, block_bytes = BLOCK_FORMATS[self.format]
        n, k = self.shape
        assert k % block_len == 0, f"{self.format} row of {k} is not whole blocks of {block_len}"
        expected = (n, k // block_len * block_bytes)
        assert self.data.dtype == torch.uint8, self.data.dtype
        assert tuple(self.data.shape) == expected, f"{tuple(self.data.shape)} is not {expected}"

    def dequantize(self) -> Tensor:
        """[N, K] float32, newly made, as llama.cpp would compute the values."""
        kind = BLOCK_FORMATS[self.format][0]
        values = gguf.quants.dequantize(self.data.contiguous().numpy(), kind)
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).view(self.shape)

    def rows(self, index: Tensor) -> BlockWeight:
        """The rows `index` (int64 [M]), in that order."""
        return BlockWeight(self.format, self.data[index], (int(index.numel()), self.shape[1]))


Weight = DenseWeight | BlockWeight


def stack(weights: list[Weight]) -> Weight:
    """One weight with the rows of all, in order. Stays quantized if all have one format and
    otherwise becomes dense (float32, or the common dtype of dense ones)."""
    assert weights, "nothing to stack"
    k = weights[0].shape[1]
    assert all(weight.shape[1] == k for weight in weights), [weight.shape for weight in weights]
    first = weights[0]
    if len(weights) == 1:
        return first
    n = sum(weight.shape[0] for weight in weights)
    blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
    if len(blocks) == len(weights) and len({block.format for block in blocks}) == 1:
        return BlockWeight(blocks[0].format, torch.cat([block.data for block in blocks]), (n, k))
    dense = [weight for weight in weights if isinstance(weight, DenseWeight)]
    if len(dense) == len(weights) and len({weight.data.dtype for weight in dense}) == 1:
        return DenseWeight(torch.cat([weight.data for weight in dense]))
    return DenseWeight(torch.cat([weight.dequantize() for weight in weights]))
