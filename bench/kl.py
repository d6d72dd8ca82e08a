"""This file measures how far a dtype's predictions lie from those of the weights dequantized to
float32: the KL divergence, teacher-forced over a text of about a thousand tokens.

It drives `Runner` alone, with no actor. The reference is computed by the reference operators in
float32. What is measured is computed in chunks of several lengths, since operators may choose
another way for few rows than for many: a chunk of 1 is what decoding alone computes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.source import SourceError, locate
from actors.vocab.vocab import Vocab
from bench.command import parser_of
from bench.prose import TEXT
from bench.report import Report
from kernels.batch import Sampling, SlotOpen, StepInput
from kernels.load.base import LoadError
from kernels.runner import Runner, RunnerOptions

ABOUT = """\
KL divergence of a dtype from the same weights dequantized to float32, over a text.

  python -m app bench kl
  python -m app bench kl --model DIR --dtypes bfloat16 float16 --text FILE --chunks 1 0
  python -m app bench kl --dtypes bfloat16 --kv-dtypes auto fp8_e4m3
"""


def main(words: Sequence[str] | None = None) -> int:
    """Prints one row for each dtype and chunk length."""
    parser = parser_of("kl", ABOUT)
    parser.add_argument("--model", default="", help="as for `serve`; the embedded one if left out")
    parser.add_argument("--dtypes", nargs="+", default=["auto"], help="auto quantized bfloat16 …")
    parser.add_argument("--kv-dtypes", nargs="+", default=["auto"], help="auto fp8_e4m3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ops", default="auto", help="operators of what is measured")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--chunks", nargs="+", type=int, default=[1, 8, 32, 0], help="0: the whole")
    parser.add_argument("--text", type=Path, help="a text file instead of the built-in text")
    parser.add_argument("--tokens-max", type=int, default=1024, help="of the text")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(words)
    try:
        return measure(found)
    except (SourceError, LoadError, OSError) as error:
        print(f"bench kl: {error}", file=sys.stderr)
        return 2


def measure(found: argparse.Namespace) -> int:
    source = locate(found.model, lambda line: print(line, file=sys.stderr))
    text = TEXT if found.text is None else found.text.read_text("utf-8")
    ids = Vocab.load(source.path).encode(text)[: found.tokens_max]
    options = RunnerOptions(
        dtype="float32",
        ops="reference",
        attention="torch",
        kv_tokens=len(ids),
        slot_count=1,
        step_tokens_max=len(ids),
        threads=found.threads,
        device=found.device,
    )
    report = Report("kl", as_json=found.json, model=source.name, tokens=len(ids))
    reference = torch.log_softmax(logits(Runner.load(source.path, options), ids, 0), dim=-1)
    add(report, "float32", "auto", "reference", 0, reference, reference, ids, 0.0)
    for dtype, kv_dtype in itertools.product(found.dtypes, found.kv_dtypes):
        gc.collect()
        runner = Runner.load(
            source.path,
            replace(
                options,
                dtype=dtype,
                kv_dtype=kv_dtype,
                ops=found.ops,
                attention=found.attention,
            ),
        )
        for chunk in found.chunks:
            begin_s = time.perf_counter()
            scores = logits(runner, ids, chunk)
            elapsed_s = time.perf_counter() - begin_s
            scores = torch.log_softmax(scores, dim=-1)
            flavour = type(runner.model.ops).__name__
            add(
                report,
                runner.facts.dtype,
                kv_dtype,
                flavour,
                chunk,
                reference,
                scores,
                ids,
                elapsed_s,
            )
        del runner
    report.close()
    return 0


def logits(runner: Runner, ids: list[int], chunk: int) -> Tensor:
    """float32 [tokens, vocab]: what is predicted after each token, in steps of `chunk`."""
    runner.reset()
    length = len(ids)
    chunk = chunk or length
    page_count = -(-length // runner.facts.page_size)
    tokens = np.array(ids, np.int32)
    opened = [SlotOpen(0, tokens, length, 0, np.arange(page_count, dtype=np.int32), Sampling())]
    pieces = []
    slot = np.zeros(1, np.int32)
    for begin in range(0, length, chunk):
        count = np.array([min(chunk, length - begin)], np.int32)
        step = StepInput(slot, count, opened=opened)
        opened = []
        runner.slots.apply(step)
        batch = runner.slots.flatten(step)
        batch = replace(batch, sampled=np.arange(len(batch.ids), dtype=np.int64))
        with torch.inference_mode():
            pieces.append(runner.forward(batch).cpu().clone())
        nothing = np.empty(0, np.int32)
        runner.slots.settle(batch, nothing, nothing, nothing)
    return torch.cat(pieces)


def add(
    report: Report,
    dtype: str,
    kv_dtype: str,
    flavour: str,
    chunk: int,
    reference: Tensor,
    scores: Tensor,
    ids: list[int],
    elapsed_s: float,
) -> None:
    divergences = (reference.exp() * (reference - scores)).sum(dim=-1).double()
    following = torch.tensor(ids[1:])
    loss = -scores[:-1].gather(1, following[:, None]).double().mean()
    same = (reference.argmax(dim=-1) == scores.argmax(dim=-1)).double().mean()
    report.add(
        dtype=dtype,
        keys=kv_dtype,
        operators=flavour,
        chunk=chunk or "whole",
        kl_mean=round(float(divergences.mean()), 5),
        kl_max=round(float(divergences.max()), 4),
        same_top_percent=round(100 * float(same), 2),
        perplexity=round(float(loss.exp()), 3),
        seconds=elapsed_s,
    )


if __name__ == "__main__":
    sys.exit(main())
