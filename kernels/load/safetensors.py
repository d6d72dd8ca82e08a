"""This file loads Hugging Face directories: config.json and safetensors, one file or shards.

Files are mapped and read tensor by tensor, so that no more than one tensor is in memory beside what
the model keeps. The container is parsed here in order to say what is wrong with a damaged one. It
does not know layers. Sizes and offsets in a header are checked against the file before use.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from torch import Tensor

from kernels.load.base import LOADERS, BadFile, BadTensor, MissingFile
from kernels.load.files import END_TOKENS, StoredTensor, TensorTable, id_list, map_file, read_json
from kernels.quant.weight import Weight

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F64": ("float64", 8),
}


@LOADERS.register("safetensors")
class SafetensorsSource:
    """See `WeightSource`."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        """`path`: the directory. Raises LoadError."""
        self.config = read_json(path / "config.json")
        self.name = directory_name(path)
        self.eos_ids = directory_eos_ids(path, self.config)
        self.table = TensorTable(read_directory(path), path)
        self.weight_format = self.table.common_format()
        for name in self.table.tensors:
            if name.endswith(".rotary_emb.inv_freq"):  # old checkpoints store what is computed
                self.table.ignore(name)
        self.finish = self.table.finish
        self.ignore = self.table.ignore

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        return self.table.take(name, shape).weight()

    def vector(self, name: str, length: int) -> Tensor:
        return self.table.take(name, (length,)).dense().float()

    def scalar(self, name: str) -> float | None:
        stored = self.table.tensors.get(name)
        if stored is None:
            return None
        shape = (1,) if stored.shape == (1,) else ()
        value = float(self.table.take(name, shape).dense().float())
        if not 0.0 < value < math.inf:
            raise BadTensor(f"tensor {name} in {stored.file} is {value}, not a positive number")
        return value


def directory_name(path: Path) -> str:
    return path.resolve().name


def directory_eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Ids from generation_config.json, config.json, the tokenizer's eos token, and the end tokens
    that its chat template writes."""
    generation = read_json(path / "generation_config.json", required=False)
    ids = {*id_list(generation.get("eos_token_id")), *id_list(config.get("eos_token_id"))}
    tokenizer_config = read_json(path / "tokenizer_config.json", required=False)
    eos = tokenizer_config.get("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    template = str(tokenizer_config.get("chat_template") or "")
    added = read_json(path / "tokenizer.json", required=False).get("added_tokens") or []
    for token in added:
        content = token.get("content")
        if content == eos or (content in END_TOKENS and content in template):
            ids.update(id_list(token.get("id")))
    return tuple(sorted(ids))


def read_directory(path: Path) -> dict[str, StoredTensor]:
    """All tensors of the directory's shards. Raises LoadError."""
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BadFile(f"{path / INDEX} has no weight_map")
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if not (path / shard).is_file()]
        if missing:
            raise MissingFile(
                f"{path / missing[0]} is missing: {len(missing)} of {len(shards)} shards named in "
                f"{INDEX}"
            )
        tensors = {}
        for shard in shards:
            tensors.update(read_header(path / shard))
        for name, shard in weight_map.items():
            if name not in tensors:
                raise BadTensor(f"tensor {name} is missing in {path / shard}, where {INDEX} has it")
        return tensors
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE)
    others = sorted(file.name for file in path.glob("*.bin"))
    hint = f"; {others[0]} is pickled and not read" if others else ""
    raise MissingFile(f"{path} has neither {SINGLE} nor {INDEX}{hint}")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, checked against its length. Raises BadFile or BadTensor."""
    buffer = map_file(path)
    if len(buffer) < 8:
        raise BadFile(f"{path} is truncated at {len(buffer)} bytes: in its header")
    (header_len,) = struct.unpack_from("<Q", buffer, 0)
    begin = 8 + header_len
    if begin > len(buffer):
        raise BadFile(
            f"{path} is truncated at {len(buffer)} bytes, or no safetensors: in its header"
        )
    try:
        header = json.loads(buffer[8:begin])
        entries = {
            name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadFile(f"{path} has a damaged header") from error
    tensors = {}
    for name, (dtype, shape, first, end) in entries.items():
        if dtype not in DTYPES:
            raise BadTensor(
                f"tensor {name} {list(shape)} in {path} is {dtype}; supported are "
                f"{', '.join(DTYPES)}"
            )
        format_name, item_bytes = DTYPES[dtype]
        byte_count = item_bytes
        for length in shape:
            byte_count *= length
        if begin + end > len(buffer):
            raise BadFile(
                f"{path} is truncated at {len(buffer)} bytes: tensor {name} {list(shape)} ends at "
                f"byte {begin + end}"
            )
        if end - first != byte_count or first < 0:
            raise BadFile(f"{path} has a damaged header: tensor {name} {list(shape)}")
        tensors[name] = StoredTensor(path, shape, format_name, buffer, begin + first, byte_count)
    return tensors
