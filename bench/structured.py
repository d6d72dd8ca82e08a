"""This file measures what structured output costs: compiling, and each step's masks.

Decode steps of the same rows, free and constrained, take turns in one process over one loaded
model, and the fastest fifth of each counts: what else runs on the machine touches both.
It does not know HTTP or actors.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.vocab.vocab import Vocab
from bench.report import Report, percentile
from kernels.batch import Constraint, Sampling, SlotOpen, StepInput
from kernels.constrain import Constrainer, TokenTable
from kernels.runner import Runner, RunnerOptions

ABOUT = """\
What structured output costs: time to compile a grammar, cold and warm, and decode steps of
constrained rows beside free ones.

  python -m app bench structured --model MODEL --rows 1 8 32
"""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
        },
        "notes": {"type": "array", "items": {"type": "string"}, "minItems": 40},
    },
    "required": ["name", "age", "tags", "home", "notes"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, Constraint] = {
    "schema": Constraint("json_schema", json.dumps(PERSON)),
    "json": Constraint("json_schema", '{"type": "array", "minItems": 500}'),
    "regex": Constraint("regex", "([a-z]+ [0-9]{3}\n){200,}"),
}
PROMPT = "Write an object about a person who lives somewhere:"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="app bench structured",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a directory or a .gguf file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each kind")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--engine", default="auto", help="a name of the grammar seam")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(list(words))
    slot_count = 2 * max(found.rows)
    options = RunnerOptions(
        slot_count=slot_count, kv_tokens=slot_count * 256, context_len=256, threads=found.threads
    )
    runner = Runner.load(Path(found.model), options)
    runner.warm_up()
    vocab = Vocab.load(found.model)
    report = Report("structured", as_json=found.json, model=runner.facts.name)
    begin_s = time.perf_counter()
    constrainer = use(runner, vocab, found.engine)
    vocabulary_ms = (time.perf_counter() - begin_s) * 1e3
    for name, constraint in GRAMMARS.items():
        cold_ms = timed_ms(lambda c=constraint: constrainer.prepare(c))
        warm_ms = timed_ms(lambda c=constraint: constrainer.prepare(c))
        for rows in found.rows:
            free, bound = measure(runner, vocab, constraint, rows, found.steps)
            report.add(
                grammar=name,
                rows=rows,
                free_ms=free,
                bound_ms=bound,
                share=free / bound,
                cold_ms=cold_ms,
                warm_ms=warm_ms,
                vocabulary_ms=vocabulary_ms,
            )
    report.close()
    return 0


def use(runner: Runner, vocab: Vocab, engine: str) -> Constrainer:
    facts = runner.facts
    table = TokenTable(
        vocab.token_bytes,
        vocab.special,
        facts.eos_ids,
        facts.vocab_size,
        lambda text: vocab.encode(text, add_special=False),
    )
    return runner.use_vocabulary(table, engine)


def timed_ms(work: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    work()
    return (time.perf_counter() - begin_s) * 1e3


def measure(
    runner: Runner, vocab: Vocab, constraint: Constraint, rows: int, step_count: int
) -> tuple[float, float]:
    """Milliseconds (20th percentile) of a decode step of `rows` free rows, and of constrained."""
    prompt = np.array(vocab.encode(PROMPT), np.int32)
    pages = runner.slots.page_table.shape[1]
    runner.reset(keep_kv=True)
    groups = []
    for group, rule in enumerate((None, constraint)):
        slots = np.arange(group * rows, (group + 1) * rows, dtype=np.int32)
        opened = [
            SlotOpen(
                int(slot),
                prompt,
                len(prompt),
                0,
                np.arange(slot * pages, (slot + 1) * pages, dtype=np.int32),
                Sampling(temperature=0.8, seed=int(slot)),
                rule,
            )
            for slot in slots
        ]
        counts = np.full(rows, len(prompt), np.int32)
        runner.execute(StepInput(slots, counts, opened=opened))
        groups.append(slots)
    ones = np.ones(rows, np.int32)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(step_count):
        for slots, kept in zip(groups, times, strict=True):
            kept.append(timed_ms(lambda s=slots: runner.execute(StepInput(s, ones))))
    return percentile(times[0], 0.2), percentile(times[1], 0.2)
