"""This file measures the CPU operators, each beside what torch offers for the same, in one run.

It does not know a model: operators are called with tensors of a model's shapes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.command import parser_of
from bench.report import Report
from kernels.attention.base import ATTENTION, AttentionBatch, AttentionShape
from kernels.ops.base import OPS, Heads, Ops, OpsUnavailable
from kernels.quant.weight import BLOCK_FORMATS, BlockWeight, DenseWeight

ABOUT = """\
The compiled operators of a CPU, each beside what torch offers for the same.

  python -m app bench ops
  python -m app bench ops --rows 1 512 --context 4096

Ours and torch's take turns, and the best of many turns counts: what else runs on the machine
touches both alike, and the ratio says more than the microseconds. Shapes are SmolLM2-135M's unless
told otherwise; no model is loaded.
"""
CPU = torch.device("cpu")
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shapes:
    hidden: int
    ffn: int
    vocab: int
    heads: Heads
    context: int


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one number of rows, and how torch can do it."""

    op: str
    rows: int
    ours: Work
    others: Mapping[str, Work]
    products: int = 0  # multiplications and additions in pairs, for the rate


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one row for each operator and number of rows."""
    parser = parser_of("ops", ABOUT)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512], help="of a step")
    parser.add_argument("--hidden", type=int, default=576, help="of the shape, as the next three")
    parser.add_argument("--ffn", type=int, default=1536)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], metavar=("Q", "KV", "D"))
    parser.add_argument("--context", type=int, default=256, help="keys of each decode row")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each row of the table")
    parser.add_argument("--threads", type=int, default=0, help="0: cores")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args(argv)
    try:
        ops = OPS.get("cpu")(CPU)
    except OpsUnavailable as reason:
        print(f"there are no compiled operators here: {reason}", file=sys.stderr)
        return 1
    if arguments.threads:
        ops.set_threads(arguments.threads)
    shapes = Shapes(
        arguments.hidden,
        arguments.ffn,
        arguments.vocab,
        Heads(*arguments.heads),
        arguments.context,
    )
    report = Report(
        "ops", as_json=arguments.json, torch=torch.__version__, threads=torch.get_num_threads()
    )
    with torch.inference_mode():
        for case in cases(ops, shapes, arguments.rows):
            report.add(**measure(case, arguments.seconds))
    report.close()
    return 0


def cases(ops: Ops, shapes: Shapes, rows: Sequence[int]) -> Iterator[Case]:
    hidden, ffn = shapes.hidden, shapes.ffn
    yield from linear_cases(ops, "gate, up", "q4_1", 2 * ffn, hidden, rows)
    yield from linear_cases(ops, "down", "q4_1", hidden, ffn, rows)
    yield from linear_cases(ops, "gate, up", "bfloat16", 2 * ffn, hidden, rows)
    yield from linear_cases(ops, "gate, up", "float32", 2 * ffn, hidden, rows)
    few = [count for count in rows if count <= 64]  # logits are wanted of sampled rows alone
    yield from linear_cases(ops, "logits", "q8_0", shapes.vocab, hidden, few)
    for count in rows:
        yield from row_cases(ops, shapes, count)
    for count in rows:
        decode = count <= 64
        lens = [shapes.context] * count if decode else [count]
        yield attention_case(shapes, lens, [1] * count if decode else [count])


def linear_cases(
    ops: Ops, what: str, kind: str, n: int, k: int, rows: Sequence[int]
) -> Iterator[Case]:
    wide = torch.randn(n, k) * 0.02
    if kind in BLOCK_FORMATS:
        _, block_len, block_bytes = BLOCK_FORMATS[kind]
        data = torch.randint(0, 32, (n, k // block_len * block_bytes), dtype=torch.uint8)
        prepared = ops.prepare_linear(BlockWeight(kind, data, (n, k)), None, "quantized")
    else:
        prepared = ops.prepare_linear(DenseWeight(wide), None, kind)
    narrow = wide.bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(narrow) if k % 32 == 0 else narrow
    bytes_weight = torch.randint(-127, 127, (n, k), dtype=torch.int8).t()
    pointwise = torch.ops.mkldnn._linear_pointwise
    for count in rows:
        x = torch.randn(count, k)
        others = {"float32 linear": partial(functional.linear, x, wide)}
        if kind != "float32":
            half = x.bfloat16()
            x_bytes = torch.randint(-127, 127, (count, k), dtype=torch.int8)
            others |= {
                "bfloat16 linear": partial(functional.linear, half, narrow),
                "bfloat16 packed": partial(pointwise, half, packed, None, "none", [], ""),
                "int8 x int8, no scales": partial(torch._int_mm, x_bytes, bytes_weight),
            }
        op = f"{what} {kind} {k}x{n}"
        yield Case(op, count, partial(ops.linear, prepared, x), others, count * n * k)


def row_cases(ops: Ops, shapes: Shapes, rows: int) -> Iterator[Case]:
    hidden, heads = shapes.hidden, shapes.heads
    x, residual, weight = torch.randn(rows, hidden), torch.zeros(rows, hidden), torch.ones(hidden)

    def add_norm() -> Tensor:
        return functional.rms_norm(residual.add_(x), (hidden,), weight, 1e-5)

    yield Case(
        "add, norm",
        rows,
        lambda: ops.add_rms_norm(x, residual, weight, 1e-5),
        {"add_, rms_norm": add_norm},
    )
    gate_up = torch.randn(rows, 2 * shapes.ffn)

    def silu_mul() -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    yield Case("silu, mul", rows, lambda: ops.silu_mul(gate_up), {"silu, mul_": silu_mul})
    qkv, positions = torch.randn(rows, heads.qkv_len), torch.arange(rows, dtype=torch.int32)
    cos_sin, at = torch.randn(rows, heads.dim), torch.arange(rows)
    k_pool, v_pool = (torch.zeros(rows, heads.kv, heads.dim) for _ in range(2))
    reference = OPS.get("reference")(CPU)

    def rope(flavour: Ops) -> Work:
        return lambda: flavour.rope_write(
            qkv, positions, cos_sin, k_pool, v_pool, at, heads, None, None, 1e-5
        )

    yield Case("rope, KV write", rows, rope(ops), {"in torch": rope(reference)})


def attention_case(shapes: Shapes, kv_lens: list[int], query_lens: list[int]) -> Case:
    """Pages of 16, in disorder; torch's gather them and attend with the fused operator."""
    heads, page_size, rows = shapes.heads, 16, len(kv_lens)
    pages_max = -(-max(kv_lens) // page_size)
    table = torch.randperm(rows * pages_max).int().view(rows, pages_max)
    pool_shape = (rows * pages_max * page_size, heads.kv, heads.dim)
    k_pool, v_pool = (torch.randn(pool_shape).bfloat16() for _ in range(2))
    q = torch.randn(sum(query_lens), heads.query, heads.dim)
    backend = ATTENTION.get("cpu")(AttentionShape(heads, 0.125, (None,), torch.bfloat16, CPU))
    backend.plan(
        AttentionBatch(
            page_table=table,
            query_start=torch.tensor([0, *query_lens]).cumsum(0).int(),
            query_len=torch.tensor(query_lens).int(),
            kv_len=torch.tensor(kv_lens).int(),
            page_size=page_size,
            query_len_max=max(query_lens),
            kv_len_max=max(kv_lens),
        )
    )
    index = (table.long()[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    index = index[:, : max(kv_lens)]
    grouped = q.view(rows, query_lens[0], heads.query, heads.dim).transpose(1, 2).bfloat16()

    def gathered() -> Tensor:
        k, v = (pool[index].transpose(1, 2) for pool in (k_pool, v_pool))
        return functional.scaled_dot_product_attention(
            grouped, k, v, is_causal=query_lens[0] > 1, scale=0.125, enable_gqa=True
        )

    what = "decode" if max(query_lens) == 1 else "prefill"
    return Case(
        f"attention, {what} over {max(kv_lens)} keys",
        sum(query_lens),
        lambda: backend.attend(0, q, k_pool, v_pool),
        {"gather, sdpa bfloat16": gathered},
    )


def measure(case: Case, seconds: float) -> dict[str, object]:
    """Turns of ours and each of torch's until the time is up; the best turn of each."""
    works = {"": case.ours, **case.others}
    best = dict.fromkeys(works, float("inf"))
    unusable = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or best[""] == float("inf"):
        for name, work in works.items():
            if name in unusable:
                continue
            begin_s = time.perf_counter()
            try:
                work()
            except RuntimeError:  # this build of torch lacks it, or not for this shape
                unusable.append(name)
                continue
            best[name] = min(best[name], time.perf_counter() - begin_s)
    ours_s = best.pop("")
    name = min(best, key=lambda each: best[each])
    return {
        "op": case.op,
        "rows": case.rows,
        "us": 1e6 * ours_s,
        "Gproducts/s": case.products / ours_s / 1e9 if case.products else None,
        "torch's best": name,
        "torch us": 1e6 * best[name],
        "times faster": best[name] / ours_s,
        "all of torch's us": ", ".join(f"{key} {1e6 * s:,.0f}" for key, s in best.items()),
    }


if __name__ == "__main__":
    sys.exit(main())
