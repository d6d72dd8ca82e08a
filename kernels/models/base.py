"""This file says what a model is to the runner, and finds models by architecture.

A family reads a Hugging Face style config (the GGUF loader makes one from its metadata) into a
`DecoderConfig` and builds the module. It does not know files, batches or sampling. A new family is
one new file in this folder that registers its names: `architectures` of config.json, and the
`general.architecture` of GGUF files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels.layers.rope import RopeConfig
from kernels.load.base import BadConfig
from kernels.ops.base import Heads
from kernels.registry import Registry

HfConfig = dict[str, Any]  # config.json as parsed


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that tells one decoder-only transformer from another."""

    vocab_size: int
    hidden_len: int
    ffn_len: int
    layer_count: int
    heads: Heads
    norm_eps: float
    rope: RopeConfig
    context_len: int
    tied_embeddings: bool
    windows: tuple[int | None, ...]  # of each layer: keys it sees back; None: all
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"  # of the gate: silu, or gelu in its tanh form
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    attention_softcap: float | None = None  # see `AttentionShape`
    final_softcap: float | None = None  # the same, of logits
    embedding_scale: float = 1.0
    norm_offset: float = 0.0  # added to the gains of norms as they are stored
    post_norms: bool = False  # norms after attention and feed-forward, before each is added
    local_rope: RopeConfig | None = None  # of layers with a window; None: `rope`
    vector_lens: tuple[int, ...] | None = None  # what embeddings may be cut to: see `matryoshka`

    @property
    def is_plain(self) -> bool:
        """Whether it is what forwards in one piece know: none of the fields from `activation` on,
        but for what attention does by itself."""
        return (
            self.activation == "silu"
            and self.final_softcap is None
            and self.embedding_scale == 1.0
            and not self.post_norms
            and self.local_rope is None
        )


# architecture -> reader of its config; raises BadConfig.
MODELS: Registry[Callable[[HfConfig], DecoderConfig]] = Registry("models", "kernels.models")


def decoder_config(
    hf: HfConfig,
    *,
    windows: tuple[int | None, ...] | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    tied_by_default: bool = False,
    activation: str | None = None,
    rope: RopeConfig | None = None,
) -> DecoderConfig:
    """What all families read alike. Raises BadConfig naming the field."""
    hidden_len = positive(hf, "hidden_size")
    query_heads = positive(hf, "num_attention_heads")
    kv_heads = positive(hf, "num_key_value_heads", query_heads)
    head_dim = positive(hf, "head_dim", hidden_len // query_heads)
    layer_count = positive(hf, "num_hidden_layers")
    if query_heads % kv_heads:
        raise BadConfig(
            f"num_attention_heads {query_heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    if activation is None:
        activation = hf.get("hidden_act", "silu")
        if activation != "silu":
            raise BadConfig(f"hidden_act {activation!r} is not supported; supported is 'silu'")
    context_len = positive(hf, "max_position_embeddings", 2048)
    return DecoderConfig(
        vocab_size=positive(hf, "vocab_size"),
        hidden_len=hidden_len,
        ffn_len=positive(hf, "intermediate_size"),
        layer_count=layer_count,
        heads=Heads(query_heads, kv_heads, head_dim),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope=rope or RopeConfig.read(hf, head_dim, context_len),
        context_len=context_len,
        tied_embeddings=bool(hf.get("tie_word_embeddings", tied_by_default)),
        windows=windows if windows is not None else (None,) * layer_count,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        qk_norm=qk_norm,
        activation=activation,
        vector_lens=matryoshka(hf, hidden_len),
    )


def matryoshka(hf: HfConfig, hidden_len: int) -> tuple[int, ...] | None:
    """To what lengths embeddings may be cut: None: to none; (): to any. By the fields that other
    servers read as well."""
    lens = hf.get("matryoshka_dimensions")
    if lens is None:
        return () if hf.get("is_matryoshka") is True else None
    if not isinstance(lens, list) or any(type(n) is not int or n < 1 for n in lens):
        raise BadConfig("config.json: matryoshka_dimensions is no list of positive integers")
    return tuple(sorted({n for n in lens if n <= hidden_len})) or None


def positive(hf: HfConfig, field: str, default: int | None = None) -> int:
    value = hf.get(field)
    if value is None:
        value = default
    if value is None:
        raise BadConfig(f"config.json has no {field}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadConfig(f"config.json: {field} is {value!r}, not a positive integer")
    return value


def layer_windows(hf: HfConfig, window: int | None) -> tuple[int | None, ...]:
    """Windows by `layer_types`, or by `max_window_layers` where a config has none."""
    layer_count = positive(hf, "num_hidden_layers")
    kinds = hf.get("layer_types")
    if kinds is None:
        full = hf.get("max_window_layers", 0)
        return tuple(window if layer >= full else None for layer in range(layer_count))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layer_count:
        raise BadConfig(
            f"config.json: layer_types must name full_attention or sliding_attention for each of "
            f"{layer_count} layers; it has {len(kinds)} entries, unknown: {sorted(unknown)}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
