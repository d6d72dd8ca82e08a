"""This file runs a whole decoder in one call of the compiled library.

It computes the same bits as operator by operator. What it saves is Python between operators: at
batch 1 that is as long as the arithmetic. It reads a `kernels.layers.decoder.Decoder` whose linears
`CpuOps` prepared, and knows no other kind of model.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from kernels.ops.cpu import native
from kernels.ops.cpu.native import BatchStruct, HeadsStruct, LinearStruct, pointer

Pools = list[tuple[Tensor, Tensor]]


class LayerStruct(ctypes.Structure):
    """hs_layer in stack.c."""

    _fields_ = (
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("input_norm", c_void_p),
        ("ffn_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("window", c_int64),
    )


class ModelStruct(ctypes.Structure):
    """hs_model in stack.c."""

    _fields_ = (
        ("layer_count", c_int64),
        ("hidden", c_int64),
        ("ffn", c_int64),
        ("layers", c_void_p),
        ("norm", c_void_p),
        ("cos_sin", c_void_p),
        ("head", LinearStruct),
        ("heads", HeadsStruct),
        ("eps", c_float),
        ("reserved", c_int32),
    )


class CpuDecoder:
    """See `FusedForward`. Keeps `decoder`, whose tensors the structs point into."""

    def __init__(self, library: ctypes.CDLL, decoder: Any) -> None:
        self.library, self.decoder = library, decoder
        config = decoder.config
        self.layers = (LayerStruct * config.layer_count)(
            *(
                LayerStruct(
                    qkv=layer.qkv.struct,
                    out=layer.out.struct,
                    gate_up=layer.gate_up.struct,
                    down=layer.down.struct,
                    input_norm=pointer(layer.input_norm),
                    ffn_norm=pointer(layer.ffn_norm),
                    q_norm=pointer(layer.q_norm),
                    k_norm=pointer(layer.k_norm),
                    window=window or 0,
                )
                for layer, window in zip(decoder.layers, config.windows, strict=True)
            )
        )
        self.model = ModelStruct(
            layer_count=config.layer_count,
            hidden=config.hidden_len,
            ffn=config.ffn_len,
            layers=ctypes.addressof(self.layers),
            norm=pointer(decoder.norm),
            cos_sin=pointer(decoder.cos_sin),
            head=decoder.head.struct,
            eps=config.norm_eps,
        )
        self.pools: Pools | None = None
        self.pool_pointers: tuple[Any, Any] = (None, None)

    def __call__(
        self,
        residual: Tensor,
        positions: Tensor,
        write_index: Tensor,
        pools: Pools,
        attention: Any,
        sampled: Tensor,
        hidden: Tensor | None = None,
    ) -> Tensor | None:
        batch = getattr(attention, "batch", None)
        if not isinstance(batch, BatchStruct):
            return None
        config = self.decoder.config
        assert residual.is_contiguous() and residual.dtype == torch.float32
        assert positions.dtype == torch.int32 and write_index.dtype == torch.int64
        assert sampled.dtype == torch.int64 and attention.shape.heads == config.heads
        if hidden is not None:
            assert hidden.is_contiguous() and hidden.dtype == torch.float32
            assert hidden.shape == (sampled.shape[0], config.hidden_len), hidden.shape
        if self.pools is not pools:
            self.bind(pools, attention)
        positions, write_index = positions.contiguous(), write_index.contiguous()
        sampled = sampled.contiguous()
        logits = torch.empty((sampled.shape[0], config.vocab_size))
        self.decoder.before()  # last of all, so that whoever runs then does not hold up the step
        native.check(
            self.library.hs_forward(
                ctypes.addressof(self.model),
                ctypes.addressof(batch),
                residual.data_ptr(),
                residual.shape[0],
                positions.data_ptr(),
                write_index.data_ptr(),
                self.pool_pointers[0],
                self.pool_pointers[1],
                sampled.data_ptr(),
                sampled.shape[0],
                logits.data_ptr(),
                pointer(hidden),
            )
        )
        return logits

    def bind(self, pools: Pools, attention: Any) -> None:
        """Takes the pools' addresses and the attention's settings into the structs."""
        config = self.decoder.config
        dtype = attention.shape.dtype
        assert all(each.is_contiguous() and each.dtype == dtype for pair in pools for each in pair)
        assert attention.shape.windows == config.windows, attention.shape.windows
        self.model.heads = native.heads_struct(
            config.heads, dtype == torch.bfloat16, attention.shape.scale, config.norm_eps
        )
        pointers = c_void_p * len(pools)
        self.pools = pools
        self.pool_pointers = (
            pointers(*(k.data_ptr() for k, _ in pools)),
            pointers(*(v.data_ptr() for _, v in pools)),
        )
