"""Loaders: what is right is loaded the same from each format; what is wrong is named."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.load.base import (
    LOADERS,
    BadConfig,
    BadFile,
    BadTensor,
    LoadError,
    MissingFile,
    detect,
)
from kernels.load.files import map_file
from kernels.load.gguf import GgufParser, GgufSource
from kernels.quant.weight import BLOCK_FORMATS, BlockWeight
from kernels.runner import Runner, RunnerOptions
from tests.kernels.driver import Driver, load

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 5,
}
PROMPTS = [[1, 2, 3], [9] * 20, [50]]


def shapes() -> dict[str, tuple[int, ...]]:
    names: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (96, 64),
        "lm_head.weight": (96, 64),
        "model.norm.weight": (64,),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        names |= {
            prefix + "input_layernorm.weight": (64,),
            prefix + "post_attention_layernorm.weight": (64,),
            prefix + "self_attn.q_proj.weight": (64, 64),
            prefix + "self_attn.k_proj.weight": (32, 64),
            prefix + "self_attn.v_proj.weight": (32, 64),
            prefix + "self_attn.o_proj.weight": (64, 64),
            prefix + "mlp.gate_proj.weight": (32, 64),
            prefix + "mlp.up_proj.weight": (32, 64),
            prefix + "mlp.down_proj.weight": (64, 32),
        }
    return names


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * 0.15 + ("norm" in name)
        for name, shape in shapes().items()
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model of one safetensors file."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), path / "model.safetensors")
    return path


def shard(path: Path) -> Path:
    """Makes three shards of the one file."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for number in range(3):
        name = f"model-0000{number + 1}-of-00003.safetensors"
        part = {key: tensors[key].clone() for key in sorted(tensors)[number::3]}
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def reorder(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp's converter lays them."""
    rows, columns = values.shape
    split = values.reshape(heads, 2, rows // heads // 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType, **extra: np.ndarray) -> Path:
    """The same model as a GGUF file, its matrices as `kind`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(32)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(["a", "<|im_end|>", "b", "<|im_end|>"] + [f"t{n}" for n in range(92)])
    writer.add_token_types([1, 3, 1, 1] + [1] * 92)
    writer.add_eos_token_id(7)
    short = {
        "model.embed_tokens": "token_embd",
        "lm_head": "output",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers.": "blk.",
    }
    for name, tensor in weights().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = reorder(values, 4 if "q_proj" in name else 2)
        for long, brief in short.items():
            name = name.replace(long, brief)
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            raw = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
    for name, values in extra.items():
        writer.add_tensor(name.replace("__", "."), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def answers(path: Path, **options: object) -> list[list[int]]:
    return Driver(load(path, kv_tokens=512, **options)).generate(PROMPTS, 5)


def test_shards_and_one_file_and_gguf_give_the_same(directory: Path, tmp_path: Path) -> None:
    expected = answers(directory)
    gguf_path = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    assert answers(gguf_path) == expected
    assert answers(shard(directory)) == expected


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_formats_are_read_as_the_package_reads_them(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    source = GgufSource(write_gguf(tmp_path / "model.gguf", kind))
    assert source.weight_format == {"F16": "float16", "BF16": "bfloat16"}.get(name, name.lower())
    for tensor, shape in shapes().items():
        if len(shape) == 1:
            assert torch.equal(source.vector(tensor, shape[0]), weights()[tensor])
            continue
        got = source.matrix(tensor, shape)  # type: ignore[arg-type]
        assert isinstance(got, BlockWeight) == name.startswith("Q")
        raw = gguf.quants.quantize(weights()[tensor].numpy(), kind)
        expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
        assert torch.equal(got.dequantize(), expected), tensor
    source.finish()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_block_format_is_found_in_a_gguf_file(name: str, tmp_path: Path) -> None:
    """The package writes few of the formats: the blocks are random bytes here."""
    kind, block_len, block_bytes = BLOCK_FORMATS[name]
    raw = np.random.default_rng(0).integers(0, 256, (6, 512 // block_len * block_bytes), np.uint8)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("blk.3.ffn_up.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufParser(path, map_file(path)).parse().tensors["blk.3.ffn_up.weight"]
    weight = found.weight()
    assert isinstance(weight, BlockWeight)
    assert (weight.format, weight.shape) == (name, (6, 512))
    assert np.array_equal(weight.data.numpy(), raw)


def test_end_ids_are_the_stated_ones_and_the_control_tokens(tmp_path: Path) -> None:
    source = GgufSource(write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.F16))
    assert source.eos_ids == (1, 7)  # id 3 has the text, and is no control token


def test_end_ids_of_a_directory_come_from_all_its_files(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [6, 5]}')
    (directory / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "</s>"}, "chat_template": "x<|im_end|>y"}'
    )
    added = [
        {"id": 1, "content": "</s>"},
        {"id": 2, "content": "<|im_end|>"},
        {"id": 3, "content": "<|end|>"},
    ]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert LOADERS.get("safetensors")(directory, 0).eos_ids == (1, 2, 5, 6)


def test_bfloat16_and_float16_run_in_their_own_dtype(directory: Path) -> None:
    tensors = {name: value.bfloat16() for name, value in weights().items()}
    save_file(tensors, directory / "model.safetensors")
    for dtype in ("bfloat16", "float16"):
        runner = Runner.load(
            directory, RunnerOptions(dtype=dtype, ops="reference", attention="torch", kv_tokens=512)
        )
        assert runner.facts.dtype == dtype
        assert str(runner.kv.layers[0][0].dtype) == f"torch.{dtype}"
        assert len(Driver(runner).generate(PROMPTS, 5)) == 3


def test_dummy_weights_depend_on_the_seed_alone(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    first = answers(directory, load_format="dummy", seed=1)
    assert answers(directory, load_format="dummy", seed=1) == first
    assert answers(directory, load_format="dummy", seed=2) != first


def test_parameters_are_counted(directory: Path) -> None:
    count = sum(tensor.numel() for tensor in weights().values())
    assert load(directory, kv_tokens=64).facts.parameter_count == count


Damage = Callable[[Path], object]


def edit(**changes: object) -> Damage:
    def apply(path: Path) -> None:
        (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))

    return apply


def retensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def apply(path: Path) -> None:
        tensors = weights()
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def cut(count: int) -> Damage:
    def apply(path: Path) -> None:
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:count])

    return apply


def lose_shard(path: Path) -> None:
    (shard(path) / "model-00002-of-00003.safetensors").unlink()


def misindex(path: Path) -> None:
    index = shard(path) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Damage, type[LoadError], list[str]]] = {
    "absent": (shutil.rmtree, MissingFile, ["model", "does not exist"]),
    "empty": (
        lambda path: [file.unlink() for file in path.iterdir()],
        MissingFile,
        ["config.json"],
    ),
    "config only": (
        lambda path: (path / "model.safetensors").unlink(),
        MissingFile,
        ["neither model.safetensors"],
    ),
    "bad json": (
        lambda path: (path / "config.json").write_text("{"),
        BadFile,
        ["config.json", "not valid JSON"],
    ),
    "no architecture": (edit(architectures=None), BadConfig, ["names no architectures"]),
    "unknown architecture": (
        edit(architectures=["FooForCausalLM"]),
        BadConfig,
        ["FooForCausalLM", "LlamaForCausalLM"],
    ),
    "unknown rope": (
        edit(rope_scaling={"type": "longrope", "factor": 2}),
        BadConfig,
        ["longrope", "yarn"],
    ),
    "missing field": (edit(hidden_size=None), BadConfig, ["hidden_size"]),
    "field of another type": (edit(vocab_size="many"), BadConfig, ["vocab_size", "many"]),
    "heads": (edit(num_key_value_heads=3), BadConfig, ["num_key_value_heads"]),
    "activation": (edit(hidden_act="gelu"), BadConfig, ["gelu", "silu"]),
    "truncated data": (cut(60_000), BadFile, ["model.safetensors", "truncated at 60000"]),
    "truncated header": (cut(100), BadFile, ["truncated at 100"]),
    "truncated length": (cut(3), BadFile, ["truncated at 3"]),
    "no bytes": (cut(0), BadFile, ["model.safetensors is empty"]),
    "missing tensor": (
        retensor(lambda tensors: tensors.pop(UP)),
        BadTensor,
        [UP, "[32, 64]", "missing"],
    ),
    "surplus tensor": (
        retensor(lambda tensors: tensors.update(more=torch.ones(3, 2))),
        BadTensor,
        ["more", "[3, 2]", "model.safetensors", "no place"],
    ),
    "shape": (
        retensor(lambda tensors: tensors.update({UP: torch.ones(64, 32)})),
        BadTensor,
        [UP, "[64, 32]", "[32, 64]", "model.safetensors"],
    ),
    "type": (
        retensor(lambda tensors: tensors.update({UP: torch.ones(32, 64, dtype=torch.int8)})),
        BadTensor,
        [UP, "I8"],
    ),
    "lost shard": (lose_shard, MissingFile, ["model-00002-of-00003.safetensors", "1 of 3"]),
    "index": (misindex, BadTensor, ["model.extra", "model-00001"]),
    "context": (edit(max_position_embeddings=16), BadConfig, ["64", "16"]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_wrong_with_a_directory_is_named(name: str, directory: Path) -> None:
    damage, kind, words = DAMAGES[name]
    damage(directory)
    with pytest.raises(kind) as raised:
        load(directory, kv_tokens=64, context_len=64)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("count", [0, 3, 10, 100, 2000, 30_000])
def test_a_cut_gguf_file_says_so(count: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.F16)
    path.write_bytes(path.read_bytes()[:count])
    with pytest.raises(BadFile) as raised:
        load(path)
    assert "model.gguf" in str(raised.value)
    assert "truncated" in str(raised.value) or count == 0


def test_any_cut_of_a_gguf_file_is_a_load_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.F16)
    content = path.read_bytes()
    for count in range(1, len(content), 997):
        path.write_bytes(content[:count])
        with pytest.raises(LoadError):
            GgufSource(path)


def test_damaged_counts_in_a_gguf_file_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.F16)
    content = bytearray(path.read_bytes())
    for offset, value in ((8, 2**62), (16, 2**62), (24, 2**63)):
        damaged = content.copy()
        struct.pack_into("<Q", damaged, offset, value)
        path.write_bytes(damaged)
        with pytest.raises(LoadError):
            GgufSource(path)
    path.write_bytes(b"GGUG" + content[4:])
    with pytest.raises(BadFile, match="not a GGUF file"):
        GgufSource(path)


def test_surplus_and_unsupported_tensors_of_a_gguf_file_are_named(tmp_path: Path) -> None:
    extra = write_gguf(
        tmp_path / "extra.gguf", gguf.GGMLQuantizationType.F32, blk__0__foo=np.ones(3, np.float32)
    )
    with pytest.raises(BadTensor, match=r"blk\.0\.foo \[3\] in .*extra.gguf has no place"):
        load(extra, kv_tokens=64)
    doubles = write_gguf(
        tmp_path / "doubles.gguf", gguf.GGMLQuantizationType.F32, more=np.ones(3, np.float64)
    )
    with pytest.raises(BadTensor, match=r"more \[3\] in .*doubles.gguf is F64; supported"):
        load(doubles, kv_tokens=64)


def test_formats_are_detected(directory: Path, tmp_path: Path) -> None:
    assert detect(directory) == "safetensors"
    path = write_gguf(tmp_path / "odd name", gguf.GGMLQuantizationType.F16)
    assert detect(path) == "gguf"
    text = tmp_path / "text"
    text.write_text("hello")
    with pytest.raises(BadFile, match="neither"):
        detect(text)


@pytest.mark.real
def test_smollm2_loads_and_says_what_it_is(smollm2: Path) -> None:
    facts = load(smollm2, kv_tokens=64).facts
    assert (facts.vocab_size, facts.context_len) == (49152, 8192)
    assert facts.parameter_count == 134_515_008
    assert facts.eos_ids == (0, 2)  # <|endoftext|> and <|im_end|>
