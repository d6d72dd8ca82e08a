"""Rotary tables; that whole models with each scaling are right is in test_oracle.py."""

from __future__ import annotations

import pytest
import torch

from kernels.layers.rope import RopeConfig
from kernels.load.base import BadConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def read(**config: object) -> RopeConfig:
    return RopeConfig.read(dict(config), 64, 1024)


def test_both_spellings_of_a_config_mean_the_same() -> None:
    old = read(rope_theta=500.0, rope_scaling=LLAMA3)
    assert old == read(rope_parameters={**LLAMA3, "rope_theta": 500.0})
    assert read(rope_scaling={"type": "linear", "factor": 2}).kind == "linear"
    assert read() == read(rope_scaling=None, rope_theta=10000.0)


def test_divisors_of_a_gguf_file_are_llama3_scaling() -> None:
    scaled = read(rope_theta=500.0, rope_scaling=LLAMA3).frequencies()
    plain = read(rope_theta=500.0).frequencies()
    assert plain[0] == scaled[0] and scaled[-1] < plain[-1]
    divided = read(rope_theta=500.0, rope_divisors=tuple((plain / scaled).tolist()))
    assert torch.allclose(divided.frequencies(), scaled, rtol=1e-6)


def test_table_holds_cosines_then_sines() -> None:
    table = read().cos_sin(10)
    assert table.shape == (10, 64) and table.dtype == torch.float32
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32
    assert torch.allclose(table[3, 0], torch.tensor(3.0).cos())
    assert torch.allclose(table[3, 32], torch.tensor(3.0).sin())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        read(**config)
