"""This file settles what a runner's options leave open: loader, device, operators, attention, what
keys and values are kept in, how large the pool may be.

Each choice that was left open goes into notes with its reason. It loads nothing and does not know
steps. What can't be had raises BadConfig, naming the option, or MemoryError, saying how much is
missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.attention.base import ATTENTION, Attention, AttentionShape
from kernels.fit import Wanted, gib
from kernels.kv import free_memory_bytes, page_bytes
from kernels.layers.decoder import Decoder
from kernels.load.base import LOADERS, BadConfig, WeightSource, detect
from kernels.models.base import MODELS, DecoderConfig
from kernels.ops.base import KV_DTYPES, OPS, Ops, OpsUnavailable
from kernels.quant.weight import BLOCK_FORMATS
from kernels.registry import UnknownName

DTYPES = ("auto", "quantized", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    dtype: str = "auto"  # one of DTYPES; auto: what the operators do fast for the file's weights
    device: str = "auto"
    load_format: str = "auto"  # a name of LOADERS
    page_size: int = 16
    kv_tokens: int = 0  # 0: as many as memory_fraction of the free memory holds
    slot_count: int = 64
    step_tokens_max: int = 2048
    context_len: int = 0  # 0: the model's own
    kv_dtype: str = "auto"  # or one of KV_DTYPES, under the operators' dtype
    deterministic: bool = False  # results have the same bits in any batch, cut in any chunks
    attention: str = "auto"  # a name of ATTENTION
    grammar: str = "auto"  # a name of GRAMMARS
    ops: str = "auto"  # a name of OPS
    threads: int = 0  # 0: as many as cores that this process may use
    memory_fraction: float = 0.5  # of what is free beside weights, steps and graphs
    seed: int = 0  # of invented weights
    graphs: bool = True  # decode steps are captured, where the device can
    lazy_graphs: bool = False  # captured when first needed, not by `warm_up`
    graph_bytes: int = 2 << 30  # of the device's memory for graphs
    graph_seconds: float = 60.0  # of `warm_up` for them; those left are captured when needed
    token_jump: bool = True  # tokens that a grammar forces are appended without sampling


def open_source(path: Path, options: RunnerOptions) -> WeightSource:
    name = options.load_format
    if name == "auto":
        name = detect(path)
    try:
        factory = LOADERS.get(name)
    except UnknownName as error:
        raise BadConfig(str(error)) from None
    return factory(path, options.seed)


def read_config(source: WeightSource) -> DecoderConfig:
    """By the first of `architectures` that we know."""
    names = source.config.get("architectures")
    if not isinstance(names, list) or not names:
        raise BadConfig(f"{source.name}: config.json names no architectures")
    known = [name for name in names if name in MODELS.names()]
    if not known:
        raise BadConfig(
            f"{source.name}: unknown architecture {names[0]!r}; "
            f"known are: {', '.join(MODELS.names())}"
        )
    return MODELS.get(known[0])(source.config)


def settle_device(options: RunnerOptions) -> torch.device:
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError:
        raise BadConfig(f"unknown device {name!r}") from None


def settle_ops(
    options: RunnerOptions, weight_format: str, device: torch.device, notes: list[str]
) -> tuple[Ops, str]:
    """Operators and dtype; each choice that was left open goes into `notes` with its reason."""
    quantized = weight_format in BLOCK_FORMATS
    if options.dtype == "quantized" and not quantized:
        raise BadConfig(
            f"dtype 'quantized' needs block-quantized weights; these are {weight_format}"
        )
    wanted = [options.dtype]
    if options.dtype == "auto":
        wanted = [*(["quantized"] if quantized else []), "bfloat16", "float32"]
    names = [options.ops] if options.ops != "auto" else [device.type, "reference"]
    if options.deterministic:
        names = deterministic_names(options, device)
    flavours: list[tuple[str, Ops]] = []
    for name in names:
        try:
            flavours.append((name, OPS.get(name)(device)))
        except (OpsUnavailable, UnknownName) as reason:
            if options.ops != "auto":
                raise BadConfig(str(reason)) from reason
            notes.append(f"operators {name!r} not used: {reason}")
    for dtype in wanted:
        for name, ops in flavours:
            if ops.supports(dtype, weight_format):
                notes.append(f"weights {weight_format} computed as {dtype} by operators {name!r}")
                return ops, dtype
    name, ops = flavours[-1]
    notes.append(f"weights {weight_format} computed as {wanted[-1]} by operators {name!r}")
    return ops, wanted[-1]


def deterministic_names(options: RunnerOptions, device: torch.device) -> list[str]:
    """Operators whose results do not depend on the company, to be tried in this order."""
    if device.type == "cpu":
        names = ["cpu", "reference"] if options.dtype in ("auto", "float32") else ["cpu"]
    else:
        names = [f"{device.type}_fixed"]
    if options.ops not in ("auto", *names):
        raise BadConfig(
            f"operators {options.ops!r} are not deterministic here; these are: {', '.join(names)}"
        )
    return names if options.ops == "auto" else [options.ops]


def settle_kv_dtype(options: RunnerOptions, ops: Ops, dtype: str) -> torch.dtype:
    if options.kv_dtype not in ("auto", *KV_DTYPES):
        known = ", ".join(("auto", *KV_DTYPES))
        raise BadConfig(f"unknown dtype of the KV cache {options.kv_dtype!r}; known are: {known}")
    try:
        return ops.kv_dtype(dtype, options.kv_dtype)
    except OpsUnavailable as reason:
        raise BadConfig(str(reason)) from reason


def attention_shape(model: Decoder, kv_dtype: torch.dtype, context_len: int) -> AttentionShape:
    config, ops = model.config, model.ops
    narrow = kv_dtype in KV_DTYPES.values()
    return AttentionShape(
        heads=config.heads,
        scale=config.attention_scale or config.heads.dim**-0.5,
        windows=config.windows,
        dtype=kv_dtype,
        device=ops.device,
        softcap=config.attention_softcap,
        query_dtype=ops.activation_dtype(model.dtype) if narrow else None,
        kv_scales=tuple(layer.kv_scales for layer in model.layers) if narrow else (),
        context_len=context_len,
    )


def settle_attention(options: RunnerOptions, shape: AttentionShape, notes: list[str]) -> Attention:
    kind = shape.device.type
    own = {"cuda": ("flashinfer", "triton")}.get(kind, (kind,))
    names = [options.attention] if options.attention != "auto" else [*own, "torch"]
    if options.deterministic and kind == "cuda":
        if options.attention not in ("auto", "fixed"):
            raise BadConfig(f"attention {options.attention!r} is not deterministic; 'fixed' is")
        names = ["fixed"]
    for name in names:
        try:
            attention = ATTENTION.get(name)(shape)
        except (OpsUnavailable, UnknownName) as reason:
            if name == names[-1]:
                raise BadConfig(str(reason)) from reason
            notes.append(f"attention {name!r} not used: {reason}")
        else:
            notes.append(f"attention {name!r}")
            return attention
    raise AssertionError("the last name returns or raises")


def settle_context(wanted: int, own: int) -> int:
    if wanted > own:
        raise BadConfig(f"a context of {wanted} tokens was asked for; the model's own is {own}")
    return wanted or own


def pool_wanted(
    options: RunnerOptions, config: DecoderConfig, dtype: torch.dtype, context_len: int
) -> Wanted:
    return Wanted(
        page_bytes=page_bytes(config.layer_count, config.heads, options.page_size, dtype),
        page_size=options.page_size,
        context_len=context_len,
        slot_count=options.slot_count,
        kv_tokens=options.kv_tokens,
        memory_fraction=options.memory_fraction,
        graph_bytes=options.graph_bytes if options.graphs else 0,
    )


def check_weights_fit(config: DecoderConfig, dtype: str, device: torch.device) -> None:
    """Raises MemoryError before anything is read. An estimate: vectors are left out."""
    heads, hidden = config.heads, config.hidden_len
    layer = hidden * (heads.qkv_len + heads.query * heads.dim + 3 * config.ffn_len)
    matrices = config.layer_count * layer
    matrices += (1 if config.tied_embeddings else 2) * config.vocab_size * hidden
    needed = matrices * getattr(torch, dtype).itemsize
    free = free_memory_bytes(device)
    if needed > free:
        raise MemoryError(
            f"the weights need {gib(needed)} as {dtype}; {gib(free)} are free:"
            f" {gib(needed - free)} are missing"
        )
