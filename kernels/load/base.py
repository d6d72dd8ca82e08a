"""This file is the contract of loaders, and the family of errors that loading may end in.

A loader opens a path and gives a `WeightSource`: a config in Hugging Face's terms and tensors by
Hugging Face's names, read one at a time. It does not know layers or devices. Errors name what is
wrong (tensor, shape, file) and what was expected; they are for the operator, not for clients.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from kernels.quant.weight import Weight
from kernels.registry import Registry


class LoadError(Exception):
    """The model can't be loaded; the text says what is missing or wrong, and where."""


class MissingFile(LoadError):
    """A file or directory isn't there."""


class BadFile(LoadError):
    """A file is truncated, damaged or of another format."""


class BadConfig(LoadError):
    """The config lacks a field or asks for what isn't supported."""


class BadTensor(LoadError):
    """A tensor is missing, surplus or has another shape or type than the config implies."""


class WeightSource(Protocol):
    """An opened model. Tensors may be views of a mapped file: keep the source while they live."""

    name: str  # of the model, for people
    config: dict[str, Any]  # Hugging Face style, with "architectures"
    eos_ids: tuple[int, ...]
    weight_format: str  # of most of the weights: a dtype, or a key of BLOCK_FORMATS

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        """Raises BadTensor if it is missing or its shape isn't `shape`."""
        ...

    def vector(self, name: str, length: int) -> Tensor:
        """float32 [length]. Raises BadTensor."""
        ...

    def scalar(self, name: str) -> float | None:
        """A positive number; None if there is none of that name. Raises BadTensor."""
        ...

    def ignore(self, name: str) -> None:
        """Declares that `name` may exist and isn't wanted."""
        ...

    def finish(self) -> None:
        """Raises BadTensor if there are tensors that nobody asked for."""
        ...


# format -> factory(path, seed of invented weights); raises LoadError. `detect` picks for a path.
LOADERS: Registry[Callable[[Path, int], WeightSource]] = Registry("loaders", "kernels.load")


def detect(path: Path) -> str:
    """The name of the loader for what lies at `path`. Raises MissingFile or BadFile."""
    if not path.exists():
        raise MissingFile(f"{path} does not exist")
    if path.is_file():
        if path.suffix == ".gguf" or read_head(path, 4) == b"GGUF":
            return "gguf"
        raise BadFile(f"{path} is neither a .gguf file nor a directory with config.json")
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file():
        return "safetensors"
    if len(ggufs) == 1:
        return "gguf"
    if ggufs:
        raise MissingFile(f"{path} holds {len(ggufs)} .gguf files; name one: {ggufs[0].name}, …")
    raise MissingFile(f"{path} has no config.json (and no .gguf file)")


def read_head(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)
