"""This file is what loaders share: mapped files, tensors by name with their checks, and end ids.

It does not know formats. `TensorTable` keeps the laws of a `WeightSource`: nothing is given out
under another shape than was asked, and a tensor that nobody asked for is an error.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.load.base import BadFile, BadTensor, MissingFile
from kernels.quant.weight import BlockWeight, DenseWeight, Weight

# Tokens that end a turn or a text, in the families we know. A GGUF file names one end id only; a
# model whose template closes turns with another would run on.
END_TOKENS = frozenset(
    {
        "</s>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<end_of_turn>",
    }
)


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes, read on demand. Raises MissingFile or BadFile (empty)."""
    try:
        with path.open("rb") as file:
            # A private writable map: torch warns about buffers that it could not write to.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise MissingFile(f"{path} does not exist") from error
    except ValueError as error:
        raise BadFile(f"{path} is empty") from error
    except OSError as error:
        raise BadFile(f"{path} can't be read: {error.strerror}") from error


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """A JSON object; {} if it isn't there and isn't `required`. Raises MissingFile or BadFile."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise MissingFile(f"{path} does not exist") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} is not valid JSON: {error}") from error
    except OSError as error:
        raise BadFile(f"{path} can't be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise BadFile(f"{path} holds no JSON object")
    return value


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies; not read yet."""

    file: Path
    shape: tuple[int, ...]
    format: str  # a torch dtype ("float32"), or a key of BLOCK_FORMATS
    buffer: mmap.mmap
    offset: int
    byte_count: int

    def dense(self) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.format)
        count = self.byte_count // dtype.itemsize
        if count == 0:
            return torch.empty(self.shape, dtype=dtype)
        if self.offset % dtype.itemsize:  # a file may place a tensor anywhere
            raw = torch.frombuffer(
                self.buffer, dtype=torch.uint8, count=self.byte_count, offset=self.offset
            )
            return raw.clone().view(dtype).view(self.shape)
        flat = torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=self.offset)
        return flat.view(self.shape)

    def weight(self) -> Weight:
        if hasattr(torch, self.format):
            return DenseWeight(self.dense())
        n, k = self.shape
        raw = torch.frombuffer(
            self.buffer, dtype=torch.uint8, count=self.byte_count, offset=self.offset
        )
        return BlockWeight(self.format, raw.view(n, -1), (n, k))


class TensorTable:
    """Tensors by name, each to be asked for once."""

    def __init__(self, tensors: dict[str, StoredTensor], origin: Path) -> None:
        self.tensors = tensors
        self.origin = origin
        self.wanted: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Raises BadTensor naming tensor, shapes and file."""
        stored = self.tensors.get(name)
        if stored is None:
            raise BadTensor(f"tensor {name} {list(shape)} is missing in {self.origin}")
        self.wanted.add(name)
        if stored.shape != shape:
            raise BadTensor(
                f"tensor {name} in {stored.file} has shape {list(stored.shape)}; "
                f"the config implies {list(shape)}"
            )
        return stored

    def ignore(self, name: str) -> None:
        self.wanted.add(name)

    def finish(self) -> None:
        surplus = sorted(set(self.tensors) - self.wanted)
        if surplus:
            first = self.tensors[surplus[0]]
            more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
            raise BadTensor(
                f"tensor {surplus[0]} {list(first.shape)} in {first.file} has no place in the "
                f"model{more}"
            )

    def common_format(self) -> str:
        """The format of most bytes among matrices."""
        byte_counts: dict[str, int] = {}
        for stored in self.tensors.values():
            if len(stored.shape) == 2:
                before = byte_counts.get(stored.format, 0)
                byte_counts[stored.format] = before + stored.byte_count
        return max(byte_counts, key=lambda name: byte_counts[name], default="float32")


def id_list(value: object) -> list[int]:
    """eos_token_id as configs have it: an id, a list of ids, or nothing."""
    values: Iterable[object] = value if isinstance(value, list) else [value]
    return [entry for entry in values if isinstance(entry, int) and not isinstance(entry, bool)]
