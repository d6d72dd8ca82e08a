"""Each family as a GGUF file answers as the oracle does from safetensors: names, metadata, rows."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from kernels.layers.rope import RopeConfig
from tests.kernels.conftest import Answered
from tests.kernels.driver import Driver, load

# Sliding windows have a place in the metadata of Gemma's files only.
FAMILIES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "llama_scaled": gguf.MODEL_ARCH.LLAMA,
    "llama_linear": gguf.MODEL_ARCH.LLAMA,
    "qwen2_yarn": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}

LOCAL_THETA = 10000.0  # as the oracle's


def convert(source: Path, path: Path, arch: gguf.MODEL_ARCH) -> Path:
    """What llama.cpp's converter does, by the package's own table of names."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", LOCAL_THETA)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    tensors = load_file(source / "model.safetensors")
    if "gemma" in writer.arch:
        tensors = {name: each + ("norm" in name) for name, each in tensors.items()}
        add_windows_and_caps(writer, config)
    add_scaling(writer, config, rope)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, values in tensors.items():
        heads = 0
        if arch == gguf.MODEL_ARCH.LLAMA and "q_proj" in name:
            heads = config["num_attention_heads"]
        if arch == gguf.MODEL_ARCH.LLAMA and "k_proj" in name:
            heads = config["num_key_value_heads"]
        if heads:
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert short is not None, name
        writer.add_tensor(short, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_windows_and_caps(writer: gguf.GGUFWriter, config: dict) -> None:
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", windowed)
    if config.get("query_pre_attn_scalar"):
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(field):
            writer.add_float32(f"{writer.arch}.{field}", config[field])


def add_scaling(writer: gguf.GGUFWriter, config: dict, rope: dict) -> None:
    kind = rope["rope_type"]
    if kind == "llama3":
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        read = RopeConfig.read({"rope_parameters": rope}, dim, 512)
        plain = RopeConfig(dim=dim, theta=rope["rope_theta"]).frequencies()
        writer.add_tensor("rope_freqs.weight", (plain / read.frequencies()).numpy())
    elif kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


@pytest.mark.parametrize("model", FAMILIES)
def test_a_gguf_file_answers_as_the_oracle(
    model: str, tiny_models: dict[str, Answered], tmp_path: Path
) -> None:
    known = tiny_models[model]
    path = convert(known.path, tmp_path / "model.gguf", FAMILIES[model])
    assert Driver(load(path)).generate(known.prompts, 8) == [each[:8] for each in known.answers]
