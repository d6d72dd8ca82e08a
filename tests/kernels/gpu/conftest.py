"""This file says where GPU tests run: on a CUDA device, or in Triton's interpreter if the variable
TRITON_INTERPRET is set (slow, but shows whether the kernels are right)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

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
