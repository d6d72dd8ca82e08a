"""This file loads GGUF files: F32, F16, BF16 and the block formats of `quant/weight.py`.

The container is parsed here (the `gguf` package takes over a second for the vocabulary alone);
blocks are read by that package. Metadata become a config in Hugging Face's terms, tensors get
Hugging Face's names, and the reordering of rows of q and k that llama files carry is undone. It
does not know tokenizers: of the vocabulary it takes the ids that end a text.

Trust: sizes and offsets come from the file and are checked against its length before use.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from kernels.load.base import LOADERS, BadConfig, BadFile, BadTensor, MissingFile
from kernels.load.files import END_TOKENS, StoredTensor, TensorTable, map_file
from kernels.quant.weight import BLOCK_FORMATS, Weight

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
DENSE_FORMATS = {
    gguf.GGMLQuantizationType.F32: ("float32", 4),
    gguf.GGMLQuantizationType.F16: ("float16", 2),
    gguf.GGMLQuantizationType.BF16: ("bfloat16", 2),
}
CONTROL = 3  # token type of tokens that stand for no text

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
POST_NORMED = frozenset({"gemma2", "gemma3"})
POST_NORM_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# The metadata do not say what the largest of each generation scales its queries by; their numbers
# of layers tell them from the others.
WIDE_QUERY_LAYERS = {"gemma2": 46, "gemma3": 62}
# general.architecture whose converter reorders the rows of q and k
REORDERED = frozenset({"llama"})


@LOADERS.register("gguf")
class GgufSource:
    """See `WeightSource`."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        """`path`: a .gguf file, or a directory that holds one. Raises LoadError."""
        if path.is_dir():
            found = sorted(path.glob("*.gguf"))
            if len(found) != 1:
                raise MissingFile(f"{path} holds {len(found)} .gguf files, not one")
            path = found[0]
        parsed = GgufParser(path, map_file(path)).parse()
        self.metadata = parsed.metadata
        self.architecture = str(self.required("general.architecture"))
        self.table = TensorTable(
            {gguf_name(name, self.architecture): stored for name, stored in parsed.tensors.items()},
            path,
        )
        self.name = str(self.metadata.get("general.name") or path.stem)
        self.config = self.read_config()
        self.eos_ids = self.read_eos_ids()
        self.weight_format = self.table.common_format()
        self.finish = self.table.finish
        self.ignore = self.table.ignore

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        weight = self.table.take(name, shape).weight()
        index = self.row_order(name, shape[0])
        return weight if index is None else weight.rows(index)

    def vector(self, name: str, length: int) -> Tensor:
        stored = self.table.take(name, (length,))
        if not hasattr(torch, stored.format):
            raise BadTensor(f"tensor {name} in {stored.file} is {stored.format}, not a float type")
        values = stored.dense().float()
        index = self.row_order(name, length)
        return values if index is None else values[index]

    def scalar(self, name: str) -> float | None:
        return None  # these files have no place for any

    def row_order(self, name: str, rows: int) -> Tensor | None:
        """Rows of q and k as Hugging Face has them, pairs being (i, i + d/2); None: as stored."""
        if self.architecture not in REORDERED:
            return None
        kinds = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for kind, heads_field in kinds.items():
            if kind in name:
                heads = self.config[heads_field]
                return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
        return None

    def required(self, key: str) -> Any:
        if key not in self.metadata:
            raise BadConfig(f"the GGUF metadata has no {key}")
        return self.metadata[key]

    def read_config(self) -> dict[str, Any]:
        arch = self.architecture
        get = self.metadata.get
        tokens = get("tokenizer.ggml.tokens")
        vocab_size = get(f"{arch}.vocab_size") or (len(tokens) if tokens else None)
        embedding = self.table.tensors.get("model.embed_tokens.weight")
        if embedding is not None and len(embedding.shape) == 2:
            vocab_size = embedding.shape[0]  # padded vocabularies are larger than the token list
        config = {
            "architectures": [arch],
            "vocab_size": vocab_size,
            "hidden_size": self.required(f"{arch}.embedding_length"),
            "intermediate_size": self.required(f"{arch}.feed_forward_length"),
            "num_hidden_layers": self.required(f"{arch}.block_count"),
            "num_attention_heads": self.required(f"{arch}.attention.head_count"),
            "num_key_value_heads": get(f"{arch}.attention.head_count_kv"),
            "head_dim": get(f"{arch}.attention.key_length"),
            "max_position_embeddings": self.required(f"{arch}.context_length"),
            "rms_norm_eps": self.required(f"{arch}.attention.layer_norm_rms_epsilon"),
            "sliding_window": get(f"{arch}.attention.sliding_window"),
            "tie_word_embeddings": "lm_head.weight" not in self.table.tensors,
            "attention_bias": "model.layers.0.self_attn.o_proj.bias" in self.table.tensors,
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in self.table.tensors,
            "attn_logit_softcapping": get(f"{arch}.attn_logit_softcapping"),
            "final_logit_softcapping": get(f"{arch}.final_logit_softcapping"),
            "rope_local_base_freq": get(f"{arch}.rope.freq_base_swa"),
            "rms_norm_offset": 0.0,  # what Gemma's files leave off is in these
            "rope_theta": get(f"{arch}.rope.freq_base"),
            "rope_scaling": self.read_rope_scaling(),
        }
        pattern = get(f"{arch}.attention.sliding_window_pattern")
        if isinstance(pattern, list):
            kinds = {True: "sliding_attention", False: "full_attention"}
            config["layer_types"] = [kinds[bool(windowed)] for windowed in pattern]
        else:
            config["sliding_window_pattern"] = pattern
        scale = get(f"{arch}.attention.scale")
        if scale:
            config["query_pre_attn_scalar"] = scale**-2
        elif config["num_hidden_layers"] == WIDE_QUERY_LAYERS.get(arch):
            config["query_pre_attn_scalar"] = config["hidden_size"] / config["num_attention_heads"]
        divisors = self.table.tensors.get("rope_freqs.weight")
        if divisors is not None:
            self.table.ignore("rope_freqs.weight")
            config["rope_divisors"] = tuple(divisors.dense().float().flatten().tolist())
        return {key: value for key, value in config.items() if value is not None}

    def read_rope_scaling(self) -> dict[str, Any] | None:
        scaling = f"{self.architecture}.rope.scaling."
        kind = self.metadata.get(scaling + "type", "none")
        if kind == "none":
            return None
        values = {
            "rope_type": kind,
            "factor": self.metadata.get(scaling + "factor"),
            "original_max_position_embeddings": self.metadata.get(
                scaling + "original_context_length"
            ),
        }
        return {key: value for key, value in values.items() if value is not None}

    def read_eos_ids(self) -> tuple[int, ...]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        stated = [self.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        ids = {entry for entry in stated if isinstance(entry, int)}
        tokens = self.metadata.get("tokenizer.ggml.tokens") or []
        types = self.metadata.get("tokenizer.ggml.token_type") or []
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False)):
            if kind == CONTROL and token in END_TOKENS:
                ids.add(index)
        return tuple(sorted(ids))


def gguf_name(name: str, architecture: str) -> str:
    """Hugging Face's name for a tensor; one that we don't know keeps its own."""
    if name in NAMES:
        return NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    names = LAYER_NAMES | (POST_NORM_NAMES if architecture in POST_NORMED else {})
    if match is None or match[2] not in names:
        return name
    return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"


@dataclass(slots=True)
class GgufParser:
    """Reads header, metadata and tensor table; `position` is the next byte."""

    path: Path
    buffer: mmap.mmap
    position: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def parse(self) -> GgufParser:
        magic, version = self.take("4sI")
        if magic != b"GGUF":
            raise BadFile(f"{self.path} is not a GGUF file")
        if version not in (2, 3):
            raise BadFile(f"{self.path} is GGUF version {version}; supported are 2 and 3")
        tensor_count, metadata_count = self.take("QQ")
        for _ in range(metadata_count):
            key = self.string()
            (kind,) = self.take("I")
            self.metadata[key] = self.value(kind)
        entries = [self.tensor_entry() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise BadFile(f"{self.path}: general.alignment is {alignment!r}")
        data_begin = -(-self.position // alignment) * alignment
        for name, shape, kind, offset in entries:
            self.tensors[name] = self.stored(name, shape, kind, data_begin + offset)
        return self

    def take(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        try:
            values = struct.unpack_from(layout, self.buffer, self.position)
        except struct.error as error:
            raise self.truncated("in its header") from error
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        end = self.position + length
        if end > len(self.buffer):
            raise self.truncated("in its header")
        text = self.buffer[self.position : end].decode("utf-8", "replace")
        self.position = end
        return text

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.take(SCALARS[kind])[0]
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth > 4:
            raise BadFile(f"{self.path} is damaged: metadata of type {kind} at {self.position}")
        item_kind, count = self.take("IQ")
        if count > len(self.buffer):
            raise self.truncated("in its header")
        if item_kind in SCALARS:
            return list(self.take(f"{count}{SCALARS[item_kind]}"))
        return [self.value(item_kind, depth + 1) for _ in range(count)]

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (dimension_count,) = self.take("I")
        if dimension_count > 8:
            raise BadFile(f"{self.path} is damaged: tensor {name} has {dimension_count} dimensions")
        lengths = self.take(f"{dimension_count}Q")
        kind, offset = self.take("IQ")
        return name, tuple(reversed(lengths)), kind, offset

    def stored(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
        try:
            known = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise BadTensor(f"tensor {name} in {self.path} has unknown type {kind}") from None
        count = 1
        for length in shape:
            count *= length
        if known in DENSE_FORMATS:
            format_name, item_bytes = DENSE_FORMATS[known]
            byte_count = count * item_bytes
        elif known.name.lower() in BLOCK_FORMATS:
            format_name = known.name.lower()
            _, block_len, block_bytes = BLOCK_FORMATS[format_name]
            if not shape or shape[-1] % block_len:
                raise BadTensor(
                    f"tensor {name} {list(shape)} in {self.path} is no whole blocks of {known.name}"
                )
            byte_count = count // block_len * block_bytes
        else:
            supported = [entry.name for entry in DENSE_FORMATS] + [n.upper() for n in BLOCK_FORMATS]
            raise BadTensor(
                f"tensor {name} {list(shape)} in {self.path} is {known.name}; supported are "
                f"{', '.join(supported)}"
            )
        if offset + byte_count > len(self.buffer):
            raise self.truncated(f"tensor {name} {list(shape)} ends at byte {offset + byte_count}")
        return StoredTensor(self.path, shape, format_name, self.buffer, offset, byte_count)

    def truncated(self, where: str) -> BadFile:
        return BadFile(f"{self.path} is truncated at {len(self.buffer)} bytes: {where}")
