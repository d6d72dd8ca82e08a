"""This file is the decoder-only transformer that every supported family is a setting of.

q, k, v and gate, up are stacked when they are loaded, so that a layer is few large operators. It
does not know files (a `WeightSource` gives it tensors by their Hugging Face names), batching or
sampling. Only the rows that are sampled go through the end of the last layer and the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.base import Attention
from kernels.kv import KvPool
from kernels.load.base import WeightSource
from kernels.models.base import DecoderConfig
from kernels.ops import exact
from kernels.ops.base import Ops, PreparedLinear
from kernels.quant.weight import stack

# As compressed-tensors, modelopt and older quark files call them; `{}` is k or v.
KV_SCALE_NAMES = (
    "self_attn.{}_scale",
    "self_attn.attn.{}_scale",
    "self_attn.{0}_proj.{0}_scale",
    "self_attn.{}_proj.output_scale",
)
Progress = Callable[[str, int, int], None]  # what, done, total


def nothing() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    input_norm: Tensor  # float32 [H]
    qkv: PreparedLinear
    q_norm: Tensor | None  # float32 [d]
    k_norm: Tensor | None
    out: PreparedLinear
    ffn_norm: Tensor
    gate_up: PreparedLinear
    down: PreparedLinear
    post_attention_norm: Tensor | None
    post_ffn_norm: Tensor | None
    kv_scales: tuple[float, float]  # of k and v in a pool of fp8


class Decoder:
    """A loaded model."""

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        ops: Ops,
        dtype: str,
        context_len: int,
        progress: Progress | None = None,
    ) -> None:
        """Reads and prepares all weights, a layer at a time. Raises LoadError."""
        self.config, self.ops, self.dtype = config, ops, dtype
        self.parameter_count = 0
        self.layers: list[DecoderLayer] = []
        steps = config.layer_count + 1
        for index in range(config.layer_count):
            self.layers.append(self.load_layer(source, f"model.layers.{index}."))
            if progress is not None:
                progress("layers", index + 1, steps)
        shape = (config.vocab_size, config.hidden_len)
        embedding = source.matrix("model.embed_tokens.weight", shape)
        self.embedding = ops.prepare_embedding(embedding, dtype)
        head = embedding
        if config.tied_embeddings:
            source.ignore("lm_head.weight")
        else:
            head = source.matrix("lm_head.weight", shape)
            self.parameter_count += shape[0] * shape[1]
        self.head = ops.prepare_linear(head, None, dtype)
        self.parameter_count += shape[0] * shape[1]
        self.norm = self.load_norm(source, "model.norm.weight", config.hidden_len)
        self.cos_sin = config.rope.cos_sin(context_len).to(ops.device)
        self.local_cos_sin = self.cos_sin
        if config.local_rope is not None:
            self.local_cos_sin = config.local_rope.cos_sin(context_len).to(ops.device)
        self.fused = ops.fuse(self)
        # Called when nothing is left of a step on the host but to compute it.
        self.before: Callable[[], None] = nothing
        if progress is not None:
            progress("layers", steps, steps)

    def load_layer(self, source: WeightSource, prefix: str) -> DecoderLayer:
        config, heads = self.config, self.config.heads
        hidden, ffn = config.hidden_len, config.ffn_len
        q_len, kv_len = heads.query * heads.dim, heads.kv * heads.dim

        def vector(name: str, length: int) -> Tensor:
            return self.load_vector(source, prefix + name, length)

        def norm(name: str, length: int = hidden) -> Tensor:
            return self.load_norm(source, f"{prefix}{name}.weight", length)

        def linear(names: list[str], lens: list[int], k: int, bias: bool) -> PreparedLinear:
            parts = [
                source.matrix(f"{prefix}{name}.weight", (n, k))
                for name, n in zip(names, lens, strict=True)
            ]
            self.parameter_count += sum(lens) * k
            biases = None
            if bias:
                biases = torch.cat(
                    [vector(f"{name}.bias", n) for name, n in zip(names, lens, strict=True)]
                )
            return self.ops.prepare_linear(stack(parts), biases, self.dtype)

        qkv_names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        gate_up_names = ["mlp.gate_proj", "mlp.up_proj"]
        ffn_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        return DecoderLayer(
            input_norm=norm("input_layernorm"),
            qkv=linear(qkv_names, [q_len, kv_len, kv_len], hidden, config.qkv_bias),
            q_norm=norm("self_attn.q_norm", heads.dim) if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm", heads.dim) if config.qk_norm else None,
            out=linear(["self_attn.o_proj"], [hidden], q_len, config.out_bias),
            ffn_norm=norm(ffn_norm),
            gate_up=linear(gate_up_names, [ffn, ffn], hidden, config.mlp_bias),
            down=linear(["mlp.down_proj"], [hidden], ffn, config.mlp_bias),
            post_attention_norm=norm("post_attention_layernorm") if config.post_norms else None,
            post_ffn_norm=norm("post_feedforward_layernorm") if config.post_norms else None,
            kv_scales=(load_scale(source, prefix, "k"), load_scale(source, prefix, "v")),
        )

    def load_norm(self, source: WeightSource, name: str, length: int) -> Tensor:
        gain = self.load_vector(source, name, length)
        return gain + self.config.norm_offset if self.config.norm_offset else gain

    def load_vector(self, source: WeightSource, name: str, length: int) -> Tensor:
        self.parameter_count += length
        return source.vector(name, length).to(self.ops.device)

    def forward(
        self,
        ids: Tensor,  # int64 [T]
        positions: Tensor,  # int32 [T]
        write_index: Tensor,  # int64 [T], rows of the pools
        kv: KvPool,
        attention: Attention,  # planned for this step
        sampled: Tensor,  # int64 [S], rows of the step whose logits are wanted
        hidden: Tensor | None = None,  # float32 [S, H]: gets their final hidden states
    ) -> Tensor:
        """Writes this step's keys and values into `kv` and returns logits float32 [S, vocab]."""
        config, ops, heads = self.config, self.ops, self.config.heads
        residual = ops.embed(self.embedding, ids)
        if config.embedding_scale != 1.0:
            residual.mul_(config.embedding_scale)
        if self.fused is not None:
            logits = self.fused(
                residual, positions, write_index, kv.layers, attention, sampled, hidden
            )
            if logits is not None:
                return logits
        self.before()
        x = ops.rms_norm(residual, self.layers[0].input_norm, config.norm_eps)
        gate_mul = ops.silu_mul if config.activation == "silu" else ops.gelu_mul
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if index > 0:
                x = ops.add_rms_norm(x, residual, layer.input_norm, config.norm_eps)
            qkv = ops.linear(layer.qkv, x)
            k_pool, v_pool = kv.layers[index]
            q = ops.rope_write(
                qkv,
                positions,
                self.cos_sin if config.windows[index] is None else self.local_cos_sin,
                k_pool,
                v_pool,
                write_index,
                heads,
                layer.q_norm,
                layer.k_norm,
                config.norm_eps,
                layer.kv_scales,
            )
            if index == last and len(sampled) == 0:
                return residual.new_empty((0, config.vocab_size), dtype=torch.float32)
            mixed = attention.attend(index, q, k_pool, v_pool).flatten(1)
            if index == last and len(sampled) < len(mixed):
                mixed, residual = mixed.index_select(0, sampled), residual.index_select(0, sampled)
            x = ops.linear(layer.out, mixed)
            if layer.post_attention_norm is not None:
                x = ops.rms_norm(x, layer.post_attention_norm, config.norm_eps)
            x = ops.add_rms_norm(x, residual, layer.ffn_norm, config.norm_eps)
            x = ops.linear(layer.down, gate_mul(ops.linear(layer.gate_up, x)))
            if layer.post_ffn_norm is not None:
                x = ops.rms_norm(x, layer.post_ffn_norm, config.norm_eps)
        x = ops.add_rms_norm(x, residual, self.norm, config.norm_eps)
        if hidden is not None:
            hidden.copy_(x)
        logits = ops.linear_float32(self.head, x)
        return logits if config.final_softcap is None else capped(logits, config.final_softcap)


def capped(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap); on a CPU in the same bits in any company."""
    if logits.device.type == "cpu":
        return exact.soft_cap(logits, cap)
    return logits.div_(cap).tanh_().mul_(cap)


def load_scale(source: WeightSource, prefix: str, which: str) -> float:
    """What a checkpoint says keys ("k") or values ("v") in fp8 are to be multiplied with; 1 if it
    says nothing. Raises BadTensor if it is no positive number."""
    for name in KV_SCALE_NAMES:
        found = source.scalar(prefix + name.format(which))
        if found is not None:
            return found
    return 1.0
