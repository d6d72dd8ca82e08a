"""This file invents random weights of a config's shape, for measuring without a checkpoint.

Each tensor depends on its name and the seed alone. It reads config.json and no weights.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

from kernels.load.base import LOADERS, BadConfig
from kernels.load.files import read_json
from kernels.load.safetensors import directory_eos_ids, directory_name
from kernels.quant.weight import DenseWeight, Weight

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@LOADERS.register("dummy")
class DummySource:
    """See `WeightSource`."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        """`path`: a directory with config.json, or the config file itself. Raises LoadError."""
        directory = path if path.is_dir() else path.parent
        self.config = read_json(path / "config.json" if path.is_dir() else path)
        self.name = directory_name(directory)
        self.eos_ids = directory_eos_ids(directory, self.config)
        self.seed = seed
        self.device = torch.device("cpu")  # where matrices are invented; each has its own values
        self.weight_format = str(
            self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16"
        )
        if self.weight_format not in DTYPES:
            raise BadConfig(f"config.json: dtype {self.weight_format!r} is not a float type")

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        scale = float(self.config.get("initializer_range", 0.02))
        generator = self.generator(name, self.device)
        values = torch.randn(shape, generator=generator, device=self.device) * scale
        return DenseWeight(values.to(DTYPES[self.weight_format]))

    def vector(self, name: str, length: int) -> Tensor:
        if name.endswith(".bias"):
            return torch.randn(length, generator=self.generator(name)) * 0.02
        return torch.ones(length)

    def scalar(self, name: str) -> float | None:
        return None

    def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def ignore(self, name: str) -> None:
        """Nothing is stored, so nothing is surplus."""

    def finish(self) -> None:
        """Nothing is stored, so nothing is surplus."""
