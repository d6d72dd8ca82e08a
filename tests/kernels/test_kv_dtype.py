"""Pools of fp8: half the memory of bfloat16, a quarter of float32; refused where nothing reads
them; scales as a checkpoint gives them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.load.base import BadConfig, BadTensor
from kernels.ops.base import Heads, OpsUnavailable
from kernels.ops.reference import ReferenceOps
from kernels.runner import Runner, RunnerOptions
from tests.kernels.conftest import Answered
from tests.kernels.driver import Driver, load

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def test_a_pool_of_fp8_takes_a_quarter_of_float32(tiny_models: dict[str, Answered]) -> None:
    path = tiny_models["llama"].path
    sizes = [load(path, kv_dtype=name).kv.byte_count() for name in ("auto", "fp8_e4m3")]
    assert sizes[0] == 4 * sizes[1]


def test_compiled_operators_refuse_fp8_and_say_why(tiny_models: dict[str, Answered]) -> None:
    with pytest.raises(BadConfig, match="keep no keys in fp8_e4m3"):
        load(tiny_models["llama"].path, "cpu", kv_dtype="fp8_e4m3")
    options = RunnerOptions(kv_dtype="fp4", ops="reference", device="cpu", kv_tokens=64)
    with pytest.raises(
        BadConfig, match=r"unknown dtype of the KV cache 'fp4'; known are: auto, fp8"
    ):
        Runner.load(tiny_models["llama"].path, options)


def test_keys_in_fp8_are_divided_by_their_scale_and_cut_off() -> None:
    ops, heads = ReferenceOps(CPU), Heads(1, 1, 4)
    qkv = torch.tensor([[1.0, 2, 3, 4, 8, -4000, 8, 8, 6, 6, 4000, torch.nan]])
    cos_sin = torch.tensor([[1.0, 1, 0, 0]])
    k_pool, v_pool = (torch.zeros(3, 1, 4, dtype=FP8) for _ in range(2))
    at, zero = torch.tensor([2]), torch.zeros(1, dtype=torch.int32)
    q = ops.rope_write(
        qkv, zero, cos_sin, k_pool, v_pool, at, heads, None, None, 0.0, kv_scales=(4.0, 2.0)
    )
    assert q.flatten().tolist() == [1, 2, 3, 4]
    assert k_pool[2, 0].float().tolist() == [2, -448, 2, 2]
    assert v_pool[2, 0, :3].float().tolist() == [3, 3, 448] and v_pool[2, 0, 3].isnan()
    assert not k_pool[:2].float().any() and not v_pool[:2].float().any()


def scaled(path: Path, to: Path, scale: float) -> Path:
    shutil.copytree(path, to)
    tensors = load_file(to / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(scale)
    tensors["model.layers.2.self_attn.v_proj.v_scale"] = torch.tensor([0.5])
    save_file(tensors, to / "model.safetensors")
    return to


def test_scales_come_from_the_checkpoint(tiny_models: dict[str, Answered], tmp_path: Path) -> None:
    known = tiny_models["llama"]
    path = scaled(known.path, tmp_path / "model", 0.25)
    plain = load(path)  # without fp8 they are not used
    assert Driver(plain).generate(known.prompts[:4], 4) == [each[:4] for each in known.answers[:4]]
    runner = load(path, kv_dtype="fp8_e4m3")
    assert [layer.kv_scales for layer in runner.model.layers] == [(0.25, 1), (1, 1), (1, 0.5)]
    assert runner.attention.shape.kv_scales[0] == (0.25, 1.0)  # type: ignore[attr-defined]
    with pytest.raises(BadTensor, match=r"k_scale .* is -1\.0, not a positive number"):
        load(scaled(known.path, tmp_path / "bad", -1.0))


def test_keys_in_fp8_stay_close(tiny_models: dict[str, Answered]) -> None:
    """Most first tokens are what they were; the pool's scales must have been used for that."""
    for name in ("llama", "gemma2"):
        known = tiny_models[name]
        first = [[answer[0]] for answer in known.answers]
        runner = load(known.path, kv_dtype="fp8_e4m3")
        layers = [replace(layer, kv_scales=(1.7, 0.6)) for layer in runner.model.layers]
        for answers in (
            Driver(runner).generate(known.prompts, 1),
            Driver(rescaled(runner, layers)).generate(known.prompts, 1),
        ):
            same = sum(a == b for a, b in zip(answers, first, strict=True))
            assert same > 0.7 * len(first), (name, same)


def rescaled(runner: Runner, layers: list) -> Runner:
    runner.model.layers = layers
    shape = runner.attention.shape  # type: ignore[attr-defined]
    scales = tuple(layer.kv_scales for layer in layers)
    runner.attention = type(runner.attention)(replace(shape, kv_scales=scales))  # type: ignore[call-arg]
    runner.reset()
    return runner


def test_deterministic_takes_what_keeps_the_law(tiny_models: dict[str, Answered]) -> None:
    path = tiny_models["llama"].path
    load(path, deterministic=True)  # the reference, in float32
    options = RunnerOptions(
        ops="reference", dtype="bfloat16", device="cpu", kv_tokens=64, deterministic=True
    )
    with pytest.raises(BadConfig, match="operators 'reference' are not deterministic here"):
        Runner.load(path, options)


def test_compiled_attention_has_no_soft_cap(tiny_models: dict[str, Answered]) -> None:
    with pytest.raises((BadConfig, OpsUnavailable), match="soft cap|compiled"):
        Runner.load(
            tiny_models["gemma2"].path,
            RunnerOptions(attention="cpu", device="cpu", kv_tokens=64, dtype="float32"),
        )
