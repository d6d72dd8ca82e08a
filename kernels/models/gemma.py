"""This file is Gemma in its three generations: a gelu gate, scaled embeddings, gains stored as
their distance from 1. Gemma 2 caps scores and logits and has a window in every other layer; Gemma 3
has norms on each head's q and k instead of caps, windows in all but every sixth layer, and rotates
those by other frequencies. Pictures are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernels.layers.rope import RopeConfig
from kernels.load.base import BadConfig
from kernels.models.base import (
    MODELS,
    DecoderConfig,
    HfConfig,
    decoder_config,
    layer_windows,
    positive,
)

HEAD_DIM = 256
GELU = "gelu_pytorch_tanh"
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # of Gemma 3


@MODELS.register("GemmaForCausalLM", "gemma")
def gemma(hf: HfConfig) -> DecoderConfig:
    return gemma_config(hf)


@MODELS.register("Gemma2ForCausalLM", "gemma2")
def gemma2(hf: HfConfig) -> DecoderConfig:
    return with_caps(hf, gemma_config(hf, windows=windows_of(hf, every=2)))


@MODELS.register("Gemma3ForCausalLM", "gemma3")
def gemma3(hf: HfConfig) -> DecoderConfig:
    if hf.get("use_bidirectional_attention"):
        raise BadConfig("use_bidirectional_attention is not supported")
    head_dim = positive(hf, "head_dim", HEAD_DIM)
    context_len = positive(hf, "max_position_embeddings", 131_072)
    nested = hf.get("rope_parameters") or {}
    if "full_attention" in nested:
        rope, local = (
            {"rope_parameters": nested[k]} for k in ("full_attention", "sliding_attention")
        )
    else:
        rope = {"rope_theta": THETA, **hf}
        local = {"rope_theta": hf.get("rope_local_base_freq", LOCAL_THETA)}
    config = gemma_config(
        {**hf, "max_position_embeddings": context_len},
        windows=windows_of(hf, positive(hf, "sliding_window_pattern", 6)),
        qk_norm=True,
        rope=RopeConfig.read(rope, head_dim, context_len),
    )
    local_rope = RopeConfig.read(local, head_dim, context_len)
    return replace(with_caps(hf, config), local_rope=local_rope)


def with_caps(hf: HfConfig, config: DecoderConfig) -> DecoderConfig:
    """What the second and the third Gemma added: norms behind, a scale of its own, soft caps."""
    return replace(
        config,
        post_norms=True,
        attention_scale=attention_scale(hf),
        attention_softcap=positive_float(hf, "attn_logit_softcapping"),
        final_softcap=positive_float(hf, "final_logit_softcapping"),
    )


def gemma_config(hf: HfConfig, **own: Any) -> DecoderConfig:
    """What the three have in common. Raises BadConfig."""
    activation = hf.get("hidden_activation") or GELU  # `hidden_act`, where there is one, is wrong
    if activation != GELU:
        raise BadConfig(f"hidden_activation {activation!r} is not supported; supported is {GELU!r}")
    bias = bool(hf.get("attention_bias", False))
    config = decoder_config(
        {"head_dim": HEAD_DIM, "max_position_embeddings": 8192, **hf},
        qkv_bias=bias,
        out_bias=bias,
        tied_by_default=True,
        activation="gelu",
        **own,
    )
    return replace(
        config,
        embedding_scale=config.hidden_len**0.5,
        norm_offset=float(hf.get("rms_norm_offset", 1.0)),  # GGUF files have it added already
    )


def windows_of(hf: HfConfig, every: int) -> tuple[int | None, ...]:
    """By `layer_types`; where there are none, all layers but each `every`th have a window."""
    window = positive(hf, "sliding_window", 4096)
    kinds = hf.get("layer_types") or [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(positive(hf, "num_hidden_layers"))
    ]
    return layer_windows({**hf, "layer_types": kinds}, window)


def attention_scale(hf: HfConfig) -> float:
    scalar = positive_float(hf, "query_pre_attn_scalar") or positive(hf, "head_dim", HEAD_DIM)
    return float(scalar**-0.5)


def positive_float(hf: HfConfig, field: str) -> float | None:
    """None: the config has none."""
    value = hf.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise BadConfig(f"config.json: {field} is {value!r}, not a positive number")
    return float(value)
