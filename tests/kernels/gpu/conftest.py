"""This file says where GPU tests run: on a CUDA device, or in Triton's interpreter if the variable
TRITON_INTERPRET is set (slow, but shows whether the kernels are right)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from tests.kernels.conftest import Answered, answered, oracle_once

# FlashInfer's compiler takes some 5 GB for each file, and several processes of tests may build.
os.environ.setdefault("MAX_JOBS", "4")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda")


@pytest.fixture(scope="session")
def cuda(device: torch.device) -> torch.device:
    """For what the interpreter can't do: graphs, FlashInfer, whole models."""
    if device.type != "cuda":
        pytest.skip("there is no CUDA device")
    return device


@pytest.fixture(scope="session")
def tiny_models(
    cuda: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answered]:
    """As those for a CPU, answered by transformers in float32 on the GPU."""
    directory = oracle_once(tmp_path_factory, "tiny_cuda", "tiny@cuda")
    return {
        path.stem: answered(directory / path.stem, path)
        for path in sorted(directory.glob("*.json"))
    }


@pytest.fixture(scope="session")
def smollm2_answered(
    cuda: torch.device, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Answered:
    directory = oracle_once(
        tmp_path_factory, "smollm2_cuda", "smollm2@cuda", str(smollm2.resolve())
    )
    return answered(smollm2, directory / "answers.json")
