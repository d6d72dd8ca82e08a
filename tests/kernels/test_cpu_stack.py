"""A decoder in one compiled call against the same one operator by operator: equal to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.base import ATTENTION, Attention, AttentionBatch, AttentionShape
from kernels.kv import KvPool
from kernels.layers.decoder import Decoder
from kernels.layers.rope import RopeConfig
from kernels.models.base import DecoderConfig
from kernels.ops.base import Heads
from kernels.quant.weight import DenseWeight, Weight
from tests.kernels.cpu_cases import CPU, block_weight, compiled_ops, generator, threads

OPS = compiled_ops()
PLAIN = DecoderConfig(
    vocab_size=200,
    hidden_len=96,
    ffn_len=160,
    layer_count=3,
    heads=Heads(6, 2, 16),
    norm_eps=1e-5,
    rope=RopeConfig(dim=16, theta=1e4),
    context_len=512,
    tied_embeddings=True,
    windows=(None, None, None),
)
CONFIGS = {
    "plain": PLAIN,
    "biased": replace(PLAIN, qkv_bias=True, out_bias=True, mlp_bias=True),
    "normed heads": replace(PLAIN, qk_norm=True, heads=Heads(4, 1, 32), rope=RopeConfig(32, 1e6)),
    "windows": replace(PLAIN, windows=(20, None, 70)),
    "untied": replace(PLAIN, tied_embeddings=False),
}


class InventedSource:
    """A WeightSource whose tensors are made when they are asked for, by their names."""

    name, config, eos_ids, weight_format = "invented", {}, (0,), "float32"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        seed = sum(name.encode())
        if self.kind == "dense":
            values = torch.randn(shape, generator=generator(seed)) / shape[1] ** 0.5
            return DenseWeight(values)
        return block_weight(self.kind, *shape, seed=seed)

    def vector(self, name: str, length: int) -> Tensor:
        return torch.randn(length, generator=generator(sum(name.encode()))) * 0.1 + 1

    def scalar(self, name: str) -> float | None:
        return None

    def ignore(self, name: str) -> None: ...

    def finish(self) -> None: ...


class Stepper:
    """A decoder with a pool, run step by step over one row of pages."""

    def __init__(self, config: DecoderConfig, kind: str, dtype: str, fused: bool) -> None:
        self.model = Decoder(config, InventedSource(kind), OPS, dtype, 512)
        assert self.model.fused is not None
        if not fused:
            self.model.fused = None
        self.kv = KvPool(config.layer_count, config.heads, 40, 16, OPS.kv_dtype(dtype), CPU)
        for k, v in self.kv.layers:
            k.fill_(torch.nan)
            v.fill_(torch.nan)
        shape = AttentionShape(config.heads, 0.2, config.windows, OPS.kv_dtype(dtype), CPU)
        self.attention: Attention = ATTENTION.get("cpu")(shape)
        self.pages = torch.randperm(40, generator=generator(1)).int()

    def step(self, rows: list[tuple[int, int]], sampled: list[int]) -> Tensor:
        """rows: (kv_len, query_len) of sequences that have ten pages each."""
        table = self.pages.view(4, 10)[: len(rows)]
        positions = [torch.arange(kv - count, kv) for kv, count in rows]
        index = [table[i][each // 16].long() * 16 + each % 16 for i, each in enumerate(positions)]
        counts = torch.tensor([count for _, count in rows]).int()
        self.attention.plan(
            AttentionBatch(
                page_table=table,
                query_start=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
                query_len=counts,
                kv_len=torch.tensor([kv for kv, _ in rows]).int(),
                page_size=16,
                query_len_max=int(counts.max()),
                kv_len_max=max(kv for kv, _ in rows),
            )
        )
        total = int(counts.sum())
        ids = torch.randint(0, 200, (total,), generator=generator(total))
        self.hidden = torch.full((len(sampled), self.model.config.hidden_len), torch.nan)
        return self.model.forward(
            ids,
            torch.cat(positions).int(),
            torch.cat(index),
            self.kv,
            self.attention,
            torch.tensor(sampled, dtype=torch.int64),
            self.hidden,
        )


STEPS: list[tuple[list[tuple[int, int]], list[int]]] = [
    ([(150, 150), (140, 140), (20, 20)], [149, 309]),  # more rows than one part of the feed-forward
    ([(151, 1), (141, 1), (33, 13), (9, 9)], [0, 1, 23]),
    ([(152, 1), (150, 9)], []),
    ([(153, 1)], [0]),
    ([(154, 1), (151, 1)], [0, 1]),
]


@pytest.mark.parametrize("thread_count", [1, 2])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("dense", "float32"),
        ("dense", "bfloat16"),
        ("q4_1", "quantized"),
        ("q8_0", "quantized"),
        ("q4_0", "quantized"),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_call_has_the_bits_of_operator_by_operator(
    name: str, kind: str, dtype: str, thread_count: int
) -> None:
    fused, apart = (Stepper(CONFIGS[name], kind, dtype, each) for each in (True, False))
    with threads(OPS, thread_count):
        for rows, sampled in STEPS:
            got, want = fused.step(rows, sampled), apart.step(rows, sampled)
            assert got.shape == (len(sampled), 200) and got.isfinite().all()
            assert torch.equal(got, want), (rows, sampled)
            assert torch.equal(fused.hidden, apart.hidden) and fused.hidden.isfinite().all()
    for pair, other in zip(fused.kv.layers, apart.kv.layers, strict=True):
        for got_pool, want_pool in zip(pair, other, strict=True):
            assert torch.equal(got_pool.nan_to_num(7.0), want_pool.nan_to_num(7.0))


def test_another_attention_is_left_to_the_operators() -> None:
    stepper = Stepper(PLAIN, "dense", "float32", True)
    want = stepper.step([(50, 50)], [49])
    shape = AttentionShape(PLAIN.heads, 0.2, PLAIN.windows, torch.float32, CPU)
    stepper.attention = ATTENTION.get("torch")(shape)
    got = stepper.step([(50, 50)], [49])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_poisoned_sequence_leaves_its_neighbours_as_they_were() -> None:
    results: list[Any] = []
    for poison in (False, True):
        stepper = Stepper(PLAIN, "q4_1", "quantized", True)
        stepper.step([(30, 30), (40, 40)], [])
        if poison:
            stepper.kv.layers[0][0][stepper.pages[10] * 16] = torch.nan
        results.append(stepper.step([(31, 1), (41, 1)], [0, 1]))
    assert torch.equal(results[0][0], results[1][0])
    assert results[1][1].isnan().all()
