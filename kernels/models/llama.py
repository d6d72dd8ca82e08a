"""This file is Llama and what copies it, Mistral with its sliding window among them."""

from __future__ import annotations

from kernels.models.base import MODELS, DecoderConfig, HfConfig, decoder_config, layer_windows


@MODELS.register("LlamaForCausalLM", "llama")
def llama(hf: HfConfig) -> DecoderConfig:
    bias = bool(hf.get("attention_bias", False))
    return decoder_config(hf, qkv_bias=bias, out_bias=bias)


@MODELS.register("MistralForCausalLM", "mistral")
def mistral(hf: HfConfig) -> DecoderConfig:
    return decoder_config(hf, windows=layer_windows(hf, hf.get("sliding_window")))
