"""This file measures what the actors cost: a hop in a process, a hop to another one, a decode step
beside the same step without actors, and the share of it that recovery takes.

It knows `Engine` and, from inside, the worker's runner and the gateway's ledger. The steps that the
actors made the runner compute are recorded and computed again by the same runner in the same
thread, with nobody around: the same batches, pages and weights, and the same tokens come of it.
Both are timed in turn, so that what disturbs the machine disturbs both. A wave's time is that in
which all its streams decode. What the host does between the computations of two steps is also shown
by itself: a machine that others use disturbs that least.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from actors.engine import Engine
from actors.gateway.record import Ledger, Record, Verdict
from actors.runtime.system import System
from actors.settings import add_flags, given_flags, read_config
from actors.worker.actor import Worker
from bench import hop, mailbox
from bench.command import parser_of
from bench.report import Report, median
from kernels.batch import StepInput
from kernels.runner import Flight, Runner
from messages.config import Config, Paths
from messages.gateway import Delta

ABOUT = """\
What the actors cost, and recovery while nothing is lost.

  python -m app bench overhead
  python -m app bench overhead --only decode --model model.gguf --sequences 64 --tokens 96

hop       tell to handler, by reference, on one loop
process   a step of the batch to another process over ipc, half of the way there and back
decode    a token of every stream through tokenizer, scheduler, worker, detokenizer and gateway,
          against the same steps by the runner alone; all on one loop, and in several processes
recovery  the ledger's share of the process's processor time (an upper bound: its clock is in it),
          and waves with a ledger that keeps nothing, against waves with the real one
"""

PARTS = ("hop", "process", "decode", "recovery")
PROMPT_LEN = 16
HOPS = 100_000


class Careless(Ledger):
    """Passes all on: no attempts, no gaps, no tokens kept, nobody asked for. Loses on any death."""

    def take(self, delta: Delta, now_s: float) -> tuple[Verdict, Record | None]:
        record = self.records.get(delta.request)
        if record is None:
            return Verdict.DROPPED, None
        if delta.finish is not None:
            del self.records[record.request]
        return Verdict.TAKEN, record

    def silent(self, now_s: float) -> list[Record]:
        return []


class Timed(Ledger):
    """The real one, with a clock around what it does for each token and each sweep."""

    def take(self, delta: Delta, now_s: float) -> tuple[Verdict, Record | None]:
        begin_ns = time.perf_counter_ns()
        found = super().take(delta, now_s)
        TIMES_NS.append(time.perf_counter_ns() - begin_ns)
        return found

    def silent(self, now_s: float) -> list[Record]:
        begin_ns = time.perf_counter_ns()
        found = super().silent(now_s)
        TIMES_NS.append(time.perf_counter_ns() - begin_ns)
        return found


TIMES_NS: list[int] = []


def system_of(engine: Engine) -> System:
    assert engine._system is not None, "not started"
    return engine._system


def actor_of(engine: Engine, path: str) -> Any:
    found = system_of(engine).local(path)
    assert found is not None, f"{path} is elsewhere"
    return found


@contextmanager
def ledger(engine: Engine, kind: type[Ledger]) -> Iterator[None]:
    """Another behaviour over the same records, between two waves."""
    own = actor_of(engine, Paths().gateway).recovery.ledger
    before, own.__class__ = own.__class__, kind
    try:
        yield
    finally:
        own.__class__ = before


# Waves


async def one_stream(engine: Engine, ids: list[int], tokens: int) -> list[tuple[float, int]]:
    """When tokens came, and how many there were by then."""
    seen: list[tuple[float, int]] = []
    count = 0
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async for delta in engine.astream(ids, **sampling):
        count += len(delta.token_ids)
        seen.append((time.perf_counter(), count))
    return seen


async def one_wave(engine: Engine, found: argparse.Namespace, nth: int) -> float:
    """Seconds for a token of every stream, while all of them decode."""
    rng = random.Random(nth)  # no prompt is cached
    prompts = [
        [rng.randrange(10, found.vocab) for _ in range(PROMPT_LEN)] for _ in range(found.sequences)
    ]
    streams = await asyncio.gather(*(one_stream(engine, ids, found.tokens) for ids in prompts))
    begin_s = max(next(at_s for at_s, count in seen if count) for seen in streams)
    end_s = min(seen[-1][0] for seen in streams)
    assert begin_s < end_s, "the streams did not run together: more --tokens"
    return (end_s - begin_s) / (
        sum(counted(seen, end_s) - counted(seen, begin_s) for seen in streams) / len(streams)
    )


def counted(seen: Sequence[tuple[float, int]], at_s: float) -> int:
    return max((count for when_s, count in seen if when_s <= at_s), default=0)


# The same steps without actors


class Launched(NamedTuple):
    """What the runner was given, what came of it, and when."""

    step: StepInput
    flight: Flight
    begin_s: float
    computes_s: float  # from then on nothing was left but to compute; not known of a device
    end_s: float

    def is_decode_of(self, sequences: int) -> bool:
        return len(self.step.slots) == sequences and bool((self.step.counts == 1).all())


class Parts(NamedTuple):
    """Of decode steps of all sequences, medians in seconds."""

    between_s: float  # from the end of one to the beginning of the next
    before_s: float  # from its beginning until it computes

    @staticmethod
    def of(steps: Sequence[Launched], sequences: int) -> Parts:
        found = [step for step in steps if step.is_decode_of(sequences)]
        return Parts(
            median(after.begin_s - step.end_s for step, after in pairwise(found)),
            median(step.computes_s - step.begin_s for step in found),
        )


@contextmanager
def launches(runner: Runner) -> Iterator[list[Launched]]:
    """What the runner is given meanwhile."""
    found: list[Launched] = []
    launch, before = runner.launch, runner.model.before
    computes_s = 0.0

    def computes() -> None:
        nonlocal computes_s
        computes_s = time.perf_counter()
        before()

    def recording(step: StepInput) -> Flight:
        nonlocal computes_s
        begin_s = computes_s = time.perf_counter()
        flight = launch(step)
        found.append(Launched(step, flight, begin_s, computes_s, time.perf_counter()))
        return flight

    runner.launch = recording  # type: ignore[method-assign]
    runner.when_computing(computes)
    try:
        yield found
    finally:
        del runner.launch  # the class has it
        runner.when_computing(before)


async def recorded(
    engine: Engine, found: argparse.Namespace, nth: int
) -> tuple[float, list[Launched], float]:
    """A wave, what the runner did for it, and what it cost the loop's thread: seconds of a
    processor for each token, opening the streams included."""
    worker: Worker = actor_of(engine, Paths().worker)
    with launches(worker.runner) as steps:
        begin_s = time.thread_time()
        step_s = await one_wave(engine, found, nth)
        busy_s = time.thread_time() - begin_s
    return step_s, steps, busy_s / (found.sequences * found.tokens)


async def replayed(
    engine: Engine, steps: Sequence[Launched], sequences: int
) -> tuple[float, Parts]:
    """Seconds for a decode step of all sequences, by the runner alone, in its own thread."""
    worker: Worker = actor_of(engine, Paths().worker)
    return await worker.context.in_thread(
        lambda: replay(worker.runner, steps, sequences), lane="forward"
    )


def replay(runner: Runner, steps: Sequence[Launched], sequences: int) -> tuple[float, Parts]:
    runner.reset(keep_kv=True)
    with launches(runner) as again:
        step_s = replay_steps(runner, steps, sequences)
    return step_s, Parts.of(again, sequences)


def replay_steps(runner: Runner, steps: Sequence[Launched], sequences: int) -> float:
    is_open: set[int] = set()
    times_s: list[float] = []
    for launched in steps:
        step, flight = launched.step, launched.flight
        # The first ones also close what the wave before has left.
        closed = [slot for slot in step.closed.tolist() if slot in is_open]
        if len(closed) != len(step.closed):
            step = replace(step, closed=np.array(closed, np.int32))
        is_open.difference_update(closed)
        is_open.update(row.slot for row in step.opened)
        begin_s = time.perf_counter()
        output = runner.execute(step)
        took_s = time.perf_counter() - begin_s
        if launched.is_decode_of(sequences):
            times_s.append(took_s)
        if not runner.is_asynchronous:  # there a flight is read once
            before = flight.result()
            assert (output.slots == before.slots).all() and (output.tokens == before.tokens).all()
    assert times_s, "no step had all sequences: --max-running is less"
    return sum(times_s) / len(times_s)


# Parts


def add_hop(report: Report, found: argparse.Namespace) -> None:
    rates = [
        asyncio.run(mailbox.measure(mailbox.Token(1, 2, 3), HOPS, encode_always=False))
        for _ in range(found.rounds)
    ]
    report.add(what="hop, same loop", value=1e6 / median(rates), unit="us", target="3")


async def add_process(report: Report, found: argparse.Namespace) -> None:
    async for row in hop.rows([found.sequences], 2000):
        report.add(
            what="hop to another process, p50",
            value=row["round_trip_us_p50"] / 2,
            unit="us",
            target="100",
        )


def add_decode(report: Report, found: argparse.Namespace, config: Config, only: Any) -> None:
    placements = ("inline", "processes") if only("decode") else ("inline",)
    with ExitStack() as stack:
        engines = {}
        for placement in placements:
            runtime = msgspec.structs.replace(config.runtime, placement=placement)
            engine = Engine.of(msgspec.structs.replace(config, runtime=runtime), show=say)
            engines[placement] = stack.enter_context(engine)
        inline = engines["inline"]
        found.vocab = actor_of(inline, Paths().worker).runner.facts.vocab_size
        for engine in engines.values():
            engine.call(one_wave(engine, found, -1))  # warms up
            system_of(engine).freeze()  # as `serve` does
        if only("decode"):
            compare_steps(report, found, engines)
        if only("recovery"):
            compare_ledgers(report, found, inline)


def compare_steps(report: Report, found: argparse.Namespace, engines: dict[str, Engine]) -> None:
    inline = engines["inline"]
    times: dict[str, list[float]] = {"alone": []}
    parts: dict[str, list[Parts]] = {"alone": [], "inline": []}
    loop_s: list[float] = []
    for nth in range(found.rounds):
        step_s, steps, token_s = inline.call(recorded(inline, found, nth))
        times.setdefault("inline", []).append(step_s)
        loop_s.append(token_s)
        alone_s, alone = inline.call(replayed(inline, steps, found.sequences))
        times["alone"].append(alone_s)
        parts["inline"].append(Parts.of(steps, found.sequences))
        parts["alone"].append(alone)
        for placement in engines.keys() - {"inline"}:
            engine = engines[placement]
            step_s = engine.call(one_wave(engine, found, nth))
            times.setdefault(placement, []).append(step_s)
    report.add(what="decode step, runner alone", value=median(times["alone"]) * 1e3, unit="ms")
    for placement in engines:
        pairs = zip(times[placement], times["alone"], strict=True)
        report.add(
            what=f"decode step, {placement}", value=median(times[placement]) * 1e3, unit="ms"
        )
        report.add(
            what=f"overhead, {placement} (median of pairs)",
            value=100 * (median(each / alone for each, alone in pairs) - 1),
            unit="%",
            target="5",
        )
    for how, each in parts.items():
        for what, value_s in (
            ("between two steps", median(part.between_s for part in each)),
            ("before a step computes", median(part.before_s for part in each)),
        ):
            report.add(what=f"{what}, {how}", value=value_s * 1e3, unit="ms")
    what = "processor time of the loop, of each token, inline"
    report.add(what=what, value=1e6 * median(loop_s), unit="us")


def compare_ledgers(report: Report, found: argparse.Namespace, engine: Engine) -> None:
    ratios, shares = [], []
    for nth in range(found.rounds):
        times: dict[type[Ledger], float] = {}
        kinds = (Careless, Ledger) if nth % 2 else (Ledger, Careless)
        for index, kind in enumerate(kinds):
            with ledger(engine, kind):
                times[kind] = engine.call(one_wave(engine, found, 1000 + 2 * nth + index))
        ratios.append(times[Ledger] / times[Careless])
        with ledger(engine, Timed):
            TIMES_NS.clear()
            begin_s = time.process_time()
            engine.call(one_wave(engine, found, 2000 + nth))
            shares.append(sum(TIMES_NS) / 1e9 / (time.process_time() - begin_s))
    us_a_token = sum(TIMES_NS) / 1e3 / (found.sequences * found.tokens)
    report.add(what="ledger, of each token", value=us_a_token, unit="us")
    report.add(
        what="ledger, share of processor time", value=100 * median(shares), unit="%", target="2"
    )
    report.add(
        what="waves with it / without it (median of pairs)",
        value=100 * (median(ratios) - 1),
        unit="% more time",
        target="2",
    )


def say(text: str) -> None:
    print(text, file=sys.stderr)


def main(words: Sequence[str]) -> int:
    parser = parser_of("overhead", ABOUT)
    parser.add_argument("--only", default=",".join(PARTS), help="of hop,process,decode,recovery")
    parser.add_argument("--sequences", type=int, default=64, help="of a step")
    parser.add_argument("--tokens", type=int, default=96, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5, help="medians of so many")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    add_flags(parser, ("model", "scheduler", "cache", "worker"))
    found = parser.parse_args(list(words))
    parts = found.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: no part {', '.join(sorted(unknown))}")
    only: Callable[[str], bool] = parts.__contains__
    config = read_config(None, given_flags(vars(found)))
    report = Report("overhead", as_json=found.json, sequences=found.sequences, tokens=found.tokens)
    if only("hop"):
        add_hop(report, found)
    if only("process"):
        asyncio.run(add_process(report, found))
    if only("decode") or only("recovery"):
        add_decode(report, found, config, only)
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
