"""This file is the door to the operators for CUDA GPUs: it says whether they can run here.

By capability, never by a device's name: a CUDA device that computes bfloat16, and Triton. It
imports neither Triton nor its kernels before it is asked.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from kernels.ops.base import OPS, OpsUnavailable

CAPABILITY_MIN = (8, 0)  # bfloat16 products and asynchronous copies


@OPS.register("cuda")
def cuda_ops(device: torch.device) -> Any:
    """`kernels.ops.triton.ops.TritonOps`. Raises OpsUnavailable with the reason."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise OpsUnavailable("there is no CUDA device")
    if importlib.util.find_spec("triton") is None:
        raise OpsUnavailable("triton is not installed")
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY_MIN:
        raise OpsUnavailable(f"compute capability {capability} is below {CAPABILITY_MIN}")
    from kernels.ops.triton.ops import TritonOps

    return TritonOps(device)


@OPS.register("cuda_fixed")
def cuda_fixed_ops(device: torch.device) -> Any:
    """`kernels.ops.triton.fixed_ops.FixedOps`. Raises OpsUnavailable with the reason."""
    cuda_ops(device)
    from kernels.ops.triton.fixed_ops import FixedOps

    return FixedOps(device)
