"""This file measures what scheduler and cache cost a decode step: CPU time, by running sequences.

The actors are real, in Cells without their encoding. It knows no model: the worker is a table of
ready answers.
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from actors.cache.actor import Cache
from actors.runtime.testkit import Cell
from actors.scheduler.actor import Scheduler
from bench.command import parser_of
from bench.report import Report, median, percentile
from messages.base import Address
from messages.config import CacheConfig, Paths, SchedulerConfig
from messages.scheduler import Submit
from messages.types import Sampling, StopRules, pack, unpack
from messages.worker import Facts, Step, StepDone

ABOUT = """\
Processor time of scheduler and cache for a decode step, by running sequences.

  python -m app bench planner
  python -m app bench planner --sequences 64 --steps 1000

The actors are real, the worker is a table of ready answers, whose time is not counted. `core_ms` is
the scheduler's core alone.
"""
PATHS = Paths()
PROMPT_LEN = 64
TARGETS_MS = {64: 1.0, 256: 1.0, 1024: 2.0}  # a step, that are aimed at


class House:
    """Scheduler and cache with their messages passed by reference, as on one loop."""

    def __init__(self, sequence_count: int, output_len: int) -> None:
        page_size = 16
        length = PROMPT_LEN + output_len + 64
        facts = Facts(
            model="none",
            vocab_size=32_000,
            context_len=length + 1,
            page_size=page_size,
            page_count=2 * sequence_count * (length // page_size + 2),
            eos_ids=(2,),
            dtype="none",
            device="none",
        )
        notes = {PATHS.worker: msgspec.msgpack.encode(facts)}
        config = SchedulerConfig(running_max=sequence_count, prefill_budget=4096, policy="fcfs")
        cache_config = CacheConfig(page_size=page_size)
        self.scheduler = Scheduler(config, cache_config, PATHS)
        self.cache = Cache(cache_config, PATHS)
        self.cells = {
            PATHS.scheduler: Cell(self.scheduler, path=PATHS.scheduler, notes=notes),
            PATHS.cache: Cell(self.cache, path=PATHS.cache, notes=notes),
        }
        self.sent: deque[tuple[str, Any]] = deque()
        for cell in self.cells.values():
            cell.send = self.send  # type: ignore[method-assign]
            cell.start()
        self.steps: deque[Step] = deque()
        self.known: dict[int, list[int]] = {}  # slot -> known and computed tokens
        self.token_count = 0
        self.step_count = 0

    def send(self, target: Any, message: Any, request: str | None) -> None:
        self.sent.append((target.path, message))

    def tell(self, path: str, message: Any) -> None:
        """One message to its actor's handler, without the Cell's encoding and checks."""
        actor = self.cells[path].actor
        getattr(actor, actor.handlers[type(message)].method)(message)

    def pass_on(self) -> None:
        """All messages that are on their way, but steps."""
        while self.sent:
            path, message = self.sent.popleft()
            if path == PATHS.worker:
                self.steps.append(message)
            elif path in self.cells:
                self.tell(path, message)
            else:
                self.token_count += len(message.rows)

    def submit(self, index: int, max_tokens: int) -> None:
        self.tell(
            PATHS.scheduler,
            Submit(
                f"request-{index:06d}",
                1,
                Address("front", PATHS.gateway, 1),
                pack((index * 7919 + at) % 32_000 for at in range(PROMPT_LEN)),
                Sampling(max_tokens=max_tokens, ignore_eos=True),
                StopRules(),
            ),
        )
        self.pass_on()

    def answer(self, step: Step) -> StepDone:
        """What the worker would say; not counted."""
        for row in step.opened:
            self.known[row.slot] = [len(row.tokens) // 4, row.cached_len]
        slots, tokens = array("i"), array("i")
        for slot, count in zip(unpack(step.slots), unpack(step.counts), strict=True):
            row = self.known[slot]
            row[1] += count
            if row[1] == row[0]:
                row[0] += 1
                slots.append(slot)
                tokens.append(1000 + slot)
        self.step_count += 1
        return StepDone(step.epoch, step.step, slots.tobytes(), tokens.tobytes(), elapsed_us=1)


def measure(sequence_count: int, step_count: int) -> tuple[list[float], list[float]]:
    """Milliseconds a decode step: of both actors, and of the scheduler's core within that."""
    house = House(sequence_count, step_count)
    for index in range(sequence_count):
        house.submit(index, step_count + 60)
    schedule = house.scheduler.schedule
    while schedule.running.prefilling or len(schedule.running.decoding) < sequence_count:
        done = house.answer(house.steps.popleft())
        house.tell(PATHS.scheduler, done)
        house.pass_on()
    core_s = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> None:
            nonlocal core_s
            begin_s = time.process_time()
            call(*arguments)
            core_s += time.process_time() - begin_s

        return wrapper

    schedule.step_done = timed(schedule.step_done)  # type: ignore[method-assign]
    schedule.pump = timed(schedule.pump)  # type: ignore[method-assign]
    both_ms: list[float] = []
    cores_ms: list[float] = []
    gc.collect()
    for _ in range(step_count):
        done = house.answer(house.steps.popleft())
        core_s = 0.0
        begin_s = time.process_time()
        house.tell(PATHS.scheduler, done)
        house.pass_on()
        both_ms.append(1e3 * (time.process_time() - begin_s))
        cores_ms.append(1e3 * core_s)
    assert len(schedule.running.decoding) == sequence_count, "the sequences did not all run"
    return both_ms, cores_ms


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one row for each count of sequences."""
    parser = parser_of("planner", ABOUT)
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[64, 256, 1024], help="that run"
    )
    parser.add_argument("--steps", type=int, default=200, help="decode steps to measure")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args(argv)
    report = Report("planner", as_json=arguments.json, prompt_len=PROMPT_LEN)
    for count in arguments.sequences:
        both_ms, cores_ms = measure(count, arguments.steps)
        report.add(
            sequences=count,
            step_ms=sum(both_ms) / len(both_ms),
            p50_ms=median(both_ms),
            p99_ms=percentile(both_ms, 0.99),
            core_ms=sum(cores_ms) / len(cores_ms),
            us_per_row=1e3 * sum(both_ms) / len(both_ms) / count,
            target_ms=TARGETS_MS.get(count, float("nan")),
        )
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
