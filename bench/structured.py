"""This file measures what structured output costs: compiling, each step's masks, the first token;
and what it brings that forced tokens are not sampled.

What is compared takes turns in one process over one loaded model, and the fastest fifth of each
counts: what else runs on the machine touches both. It does not know HTTP or actors.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.vocab.vocab import Vocab
from bench.command import parser_of
from bench.report import Report, percentile
from kernels.batch import Constraint, Ints, Sampling, SlotOpen, StepInput
from kernels.constrain import Constrainer, TokenTable
from kernels.runner import Flight, Runner, RunnerOptions

ABOUT = """\
What structured output costs: decode steps of constrained rows beside free ones (`share`: free over
constrained); the time to the first token of one row, free, and constrained by a grammar that is new
and by one that is known; and answers with and without --token-jump (`jump`: how much faster with).

  python -m app bench structured --model MODEL --rows 1 8 32
  python -m app bench structured --model bench/models/qwen3_0_6b --invented --device cuda
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
FORM = {
    "type": "object",
    "properties": {
        "customer_billing_address": {"type": "string", "maxLength": 12},
        "preferred_delivery_window": {"enum": ["morning_before_noon", "afternoon_until_six"]},
        "is_returning_customer": {"type": "boolean"},
    },
    "required": [
        "customer_billing_address",
        "preferred_delivery_window",
        "is_returning_customer",
    ],
    "additionalProperties": False,
}
FORMS = {"type": "array", "items": FORM, "minItems": 40}
GRAMMARS: dict[str, Constraint] = {
    "schema": Constraint("json_schema", json.dumps(PERSON)),
    "json": Constraint("json_schema", '{"type": "array", "minItems": 500}'),
    "regex": Constraint("regex", "([a-z]+ [0-9]{3}\n){200,}"),
    "forms": Constraint("json_schema", json.dumps(FORMS)),
}
DEPTH = 2  # steps in flight, as of a scheduler
BLOCK = 20  # steps that are timed together, where they are launched ahead
PROMPT = "Write an object about a person who lives somewhere:"


@dataclass(frozen=True, slots=True)
class Invented:
    """A vocabulary for a model that has none: an end, bytes, pairs of letters, words of no use."""

    token_bytes: list[bytes]
    special: frozenset[int] = frozenset({0})

    @classmethod
    def of(cls, size: int) -> Invented:
        letters = [bytes([byte]) for byte in range(97, 123)]
        pieces = [b"<end>", *(bytes([byte]) for byte in range(256))]
        pieces += [first + second for first in letters for second in letters]
        pieces += [b"<word %d>" % nth for nth in range(max(0, size - len(pieces)))]
        return cls(pieces[:size])

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [1 + byte for byte in text.encode()]


def main(words: Sequence[str]) -> int:
    parser = parser_of("structured", ABOUT)
    parser.add_argument("--model", required=True, help="a directory or a .gguf file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="of a step")
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each kind")
    parser.add_argument("--tokens", type=int, default=100, help="of answers with and without jumps")
    parser.add_argument("--rounds", type=int, default=5, help="of first tokens, and of answers")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument(
        "--invented", action="store_true", help="weights and vocabulary are made up"
    )
    parser.add_argument("--threads", type=int, default=0, help="of the forward; 0: cores")
    parser.add_argument("--engine", default="auto", help="a name of the grammar seam")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(list(words))
    slot_count = 2 * max(found.rows)
    options = RunnerOptions(
        slot_count=slot_count,
        kv_tokens=slot_count * 256,
        context_len=256,
        threads=found.threads,
        device=found.device,
        load_format="dummy" if found.invented else "auto",
    )
    runner = Runner.load(Path(found.model), options)
    runner.warm_up()
    vocab = Invented.of(runner.facts.vocab_size) if found.invented else Vocab.load(found.model)
    report = Report("structured", as_json=found.json, model=runner.facts.name)
    begin_s = time.perf_counter()
    constrainer = use(runner, vocab, found.engine)
    vocabulary_ms = (time.perf_counter() - begin_s) * 1e3
    for name, constraint in GRAMMARS.items():
        cold_ms = timed_ms(lambda c=constraint: constrainer.prepare(c))
        first = first_tokens(runner, vocab, constraint, found.rounds)
        for rows in found.rows:
            free, bound = measure(runner, vocab, constraint, rows, found.steps)
            slow, fast = jumps(runner, vocab, constraint, rows, found.tokens, found.rounds)
            report.add(
                grammar=name,
                rows=rows,
                free_ms=free,
                bound_ms=bound,
                share=free / bound,
                jump=slow / fast,
                compile_ms=cold_ms,
                first_free_ms=first[0],
                first_cold_ms=first[1],
                first_warm_ms=first[2],
                vocabulary_ms=vocabulary_ms,
            )
    report.close()
    return 0


def use(runner: Runner, vocab: Vocab | Invented, engine: str) -> Constrainer:
    facts = runner.facts
    table = TokenTable(
        vocab.token_bytes,
        vocab.special | set(facts.eos_ids),
        facts.eos_ids or (0,),
        facts.vocab_size,
        lambda text: vocab.encode(text, add_special=False),
    )
    return runner.use_vocabulary(table, engine)


def timed_ms(work: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    work()
    return (time.perf_counter() - begin_s) * 1e3


def opening(
    runner: Runner, vocab: Vocab | Invented, slots: Sequence[int], rule: Constraint | None
) -> tuple[list[SlotOpen], int]:
    """Rows that begin, and how long their prompt is."""
    prompt = np.array(vocab.encode(PROMPT), np.int32)
    pages = runner.slots.page_table.shape[1]
    opened = [
        SlotOpen(
            slot,
            prompt,
            len(prompt),
            0,
            np.arange(slot * pages, (slot + 1) * pages, dtype=np.int32),
            Sampling(temperature=0.8, seed=slot),
            rule,
        )
        for slot in slots
    ]
    return opened, len(prompt)


def first_tokens(
    runner: Runner, vocab: Vocab | Invented, constraint: Constraint, rounds: int
) -> tuple[float, float, float]:
    """Milliseconds to one row's first token: free, by a grammar not seen before, by a known one."""
    times: tuple[list[float], ...] = ([], [], [])
    for nth in range(1, rounds + 1):
        # Another text for the same grammar.
        rest = "(x{0})" * nth if constraint.kind == "regex" else " " * nth
        fresh = Constraint(constraint.kind, constraint.text + rest)
        for kept, rule in zip(times, (None, fresh, fresh), strict=True):
            runner.reset(keep_kv=True)
            opened, count = opening(runner, vocab, [0], rule)
            step = StepInput(np.zeros(1, np.int32), np.array([count], np.int32), opened=opened)
            kept.append(timed_ms(lambda s=step: runner.execute(s)))
    free, cold, warm = (percentile(kept, 0.2) for kept in times)
    return free, cold, warm


def jumps(
    runner: Runner,
    vocab: Vocab | Invented,
    constraint: Constraint,
    rows: int,
    token_count: int,
    rounds: int,
) -> tuple[float, float]:
    """Milliseconds for `token_count` tokens of each row, without and with jumps."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for kept, jump in zip(times, (False, True), strict=True):
            runner.options = replace(runner.options, token_jump=jump)
            kept.append(timed_ms(lambda: answer(runner, vocab, constraint, rows, token_count)))
    return percentile(times[0], 0.2), percentile(times[1], 0.2)


def answer(
    runner: Runner, vocab: Vocab | Invented, constraint: Constraint, rows: int, token_count: int
) -> None:
    """Rows until each has its tokens. A step is planned by what the step before the last one has
    brought, as by a scheduler with two in flight."""
    runner.reset(keep_kv=True)
    opened, prompt_len = opening(runner, vocab, range(rows), constraint)
    counts = np.full(rows, prompt_len, np.int32)
    slots = np.arange(rows, dtype=np.int32)
    runner.execute(StepInput(slots, counts, opened=opened))
    planned = counts.copy()
    told: deque[np.ndarray] = deque([planned + 1], maxlen=DEPTH)
    while (going := told[0] - prompt_len < token_count).any():
        counts = np.maximum(told[0] - planned, 1)[going]
        planned[going] += counts
        runner.execute(StepInput(slots[going], counts.astype(np.int32)))
        told.append(runner.slots.known_len[:rows].copy())


def measure(
    runner: Runner, vocab: Vocab | Invented, constraint: Constraint, rows: int, step_count: int
) -> tuple[float, float]:
    """Milliseconds (20th percentile) of a decode step of `rows` free rows, and of constrained."""
    runner.options = replace(runner.options, token_jump=False)
    runner.reset(keep_kv=True)
    groups = []
    for group, rule in enumerate((None, constraint)):
        slots = np.arange(group * rows, (group + 1) * rows, dtype=np.int32)
        opened, count = opening(runner, vocab, slots.tolist(), rule)
        runner.execute(StepInput(slots, np.full(rows, count, np.int32), opened=opened))
        groups.append(slots)
    times: tuple[list[float], list[float]] = ([], [])
    size = BLOCK if runner.is_asynchronous else 1
    for _ in range(-(-step_count // size)):
        for slots, kept in zip(groups, times, strict=True):
            kept.append(timed_ms(lambda s=slots: decode(runner, s, size)) / size)
    return percentile(times[0], 0.2), percentile(times[1], 0.2)


def decode(runner: Runner, slots: Ints, step_count: int) -> None:
    """Steps of one token each, launched ahead where that can be."""
    step = StepInput(slots, np.ones(len(slots), np.int32))
    flights: deque[Flight] = deque()
    for _ in range(step_count):
        flights.append(runner.launch(step))
        if len(flights) >= DEPTH:
            flights.popleft().result()
    for flight in flights:
        flight.result()
