"""This file makes the table of rotary angles: default, linear, llama3 and yarn frequencies.

It reads both spellings of the config (`rope_parameters`, and the older `rope_theta` with
`rope_scaling`). It does not rotate: `Ops.rope_write` does. Angles are computed in float32, as the
models were trained; another kind of scaling is refused and never ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.load.base import BadConfig

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One model's frequencies; fields of a kind are read only for that kind."""

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_context_len: int = 0
    low_factor: float = 1.0  # llama3
    high_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] | None = None  # of each frequency, as GGUF files give them

    @staticmethod
    def read(hf: dict[str, Any], head_dim: int, context_len: int) -> RopeConfig:
        """From a Hugging Face style config. Raises BadConfig."""
        scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        theta = scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in KINDS:
            raise BadConfig(
                f"rope scaling {kind!r} is not supported; supported: {', '.join(KINDS)}"
            )
        partial = scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise BadConfig(f"partial_rotary_factor {partial} is not supported; supported is 1.0")
        if head_dim % 2:
            raise BadConfig(f"head_dim {head_dim} is odd: rotary pairs need an even one")
        factor = float(scaling.get("factor", 1.0))
        missing = [
            field
            for field in ("low_freq_factor", "high_freq_factor")
            if kind == "llama3" and field not in scaling
        ]
        if missing or (kind != "default" and "factor" not in scaling):
            raise BadConfig(f"rope scaling {kind!r} needs {', '.join(missing) or 'factor'}")
        return RopeConfig(
            dim=head_dim,
            theta=float(theta),
            kind=kind,
            factor=factor,
            original_context_len=int(
                scaling.get("original_max_position_embeddings") or context_len
            ),
            low_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_factor=float(scaling.get("high_freq_factor", 4.0)),
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            attention_factor=rope_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
            truncate=bool(scaling.get("truncate", True)),
            divisors=hf.get("rope_divisors"),
        )

    def cos_sin(self, positions_max: int) -> Tensor:
        """float32 [positions_max, dim]: cosines of the dim/2 angles, then their sines."""
        angles = torch.arange(positions_max).float()[:, None] * self.frequencies()
        return torch.cat((angles.cos(), angles.sin()), dim=1) * self.attention_factor

    def frequencies(self) -> Tensor:
        """float32 [dim/2]."""
        exponent = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
        plain = 1.0 / self.theta**exponent
        if self.divisors is not None:
            plain = plain / torch.tensor(self.divisors, dtype=torch.float32)
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            return self.frequencies_llama3(plain)
        if self.kind == "yarn":
            return self.frequencies_yarn(plain)
        return plain

    def frequencies_llama3(self, plain: Tensor) -> Tensor:
        """Long waves are stretched by the factor, short ones kept, those between blended."""
        wave_len = 2 * math.pi / plain
        low, high = self.low_factor, self.high_factor
        kept = (self.original_context_len / wave_len - low) / (high - low)
        blended = (1 - kept) * plain / self.factor + kept * plain
        stretched = torch.where(
            wave_len > self.original_context_len / low, plain / self.factor, blended
        )
        return torch.where(wave_len < self.original_context_len / high, plain, stretched)

    def frequencies_yarn(self, plain: Tensor) -> Tensor:
        """Between the dimensions that turn beta_fast and beta_slow times, a ramp from plain to
        stretched."""

        def dimension(turns: float) -> float:
            turn_len = self.original_context_len / (turns * 2 * math.pi)
            return self.dim * math.log(turn_len) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(self.dim // 2).float() - low) / (high - low)).clamp(0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)


def rope_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """What yarn multiplies cosines and sines by."""
    stated = scaling.get("attention_factor")
    if stated is not None:
        return float(stated)

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return grown(float(mscale)) / grown(float(mscale_all))
    return grown(1.0)
