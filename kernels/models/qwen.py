"""This file is Qwen2 (biases on q, k, v) and Qwen3 (norms on each head's q and k)."""

from __future__ import annotations

from kernels.models.base import MODELS, DecoderConfig, HfConfig, decoder_config, layer_windows


@MODELS.register("Qwen2ForCausalLM", "qwen2")
def qwen2(hf: HfConfig) -> DecoderConfig:
    return decoder_config(hf, windows=qwen_windows(hf), qkv_bias=True)


@MODELS.register("Qwen3ForCausalLM", "qwen3")
def qwen3(hf: HfConfig) -> DecoderConfig:
    bias = bool(hf.get("attention_bias", False))
    return decoder_config(hf, windows=qwen_windows(hf), qkv_bias=bias, out_bias=bias, qk_norm=True)


def qwen_windows(hf: HfConfig) -> tuple[int | None, ...]:
    """Qwen configs name a window that counts only if `use_sliding_window` is set."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window", False) else None
    return layer_windows(hf, window)
