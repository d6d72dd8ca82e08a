"""This file runs simulated worlds by the hundred, and says what failed and how to see it again.

    python -m app simulate --seeds 200 --hours 20

Each seed is one world: a deployment, clients and faults drawn from it (`bench/sim/`). `--hours` are
simulated ones, divided among the seeds. A seed that fails is printed with the command that replays
it and its last events; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.sim.scenario import draw
from bench.sim.text import make_tokenizer
from bench.sim.world import Broken, Result, run_world

EVENTS_SHOWN = 40
WHAT_CHARS_MAX = 3000


class Failure(NamedTuple):
    seed: int
    what: str
    events: list[str]


def run_seed(seed: int, seconds: float, shuffles: bool, model: str) -> Result | Failure:
    """One world, in whatever process."""
    try:
        return run_world(draw(seed, seconds, shuffles=shuffles), Path(model))
    except Broken as broken:
        return Failure(seed, str(broken), broken.events)


def run_all(
    seeds: range, seconds: float, shuffles: bool, jobs: int, model: str
) -> Iterator[Result | Failure]:
    """As they come."""
    if jobs == 1:
        for seed in seeds:
            yield run_seed(seed, seconds, shuffles, model)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {pool.submit(run_seed, seed, seconds, shuffles, model) for seed in seeds}
        for done in concurrent.futures.as_completed(waiting):
            yield done.result()


def main(words: list[str]) -> int:
    arguments = parse(words)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    seconds = arguments.hours * 3600 / arguments.seeds
    jobs = min(arguments.jobs or len(os.sched_getaffinity(0)), len(seeds))
    begin_s = time.monotonic()
    results: list[Result] = []
    failures: list[Failure] = []
    with tempfile.TemporaryDirectory(prefix="simulated-") as folder:
        model = str(make_tokenizer(Path(folder)))
        for found in run_all(seeds, seconds, arguments.shuffle, jobs, model):
            if isinstance(found, Result):
                results.append(found)
                if arguments.chains:
                    print(f"seed {found.seed} chain {found.chain}", flush=True)
            else:
                failures.append(found)
                show_failure(found, arguments)
                if arguments.stop:
                    break
            show_progress(results, failures, len(seeds), begin_s)
    show_summary(results, failures, time.monotonic() - begin_s)
    return 1 if failures else 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="app simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=positive, default=200, metavar="N", help="how many worlds")
    parser.add_argument("--first-seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--hours", type=float, default=20.0, metavar="H", help="simulated, in all worlds together"
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="J", help="processes; 0: cores")
    parser.add_argument(
        "--shuffle",
        action="store_true",
        help="the order of callbacks within a process is the seed's as well, not only that of "
        "messages between them",
    )
    parser.add_argument(
        "--chains", action="store_true", help="print each world's hash over all its events"
    )
    parser.add_argument("--stop", action="store_true", help="at the first seed that fails")
    arguments = parser.parse_args(words)
    if not arguments.hours > 0:
        parser.error("--hours must be positive")
    return arguments


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def show_failure(failure: Failure, arguments: argparse.Namespace) -> None:
    hours = arguments.hours / arguments.seeds
    shuffle = " --shuffle" if arguments.shuffle else ""
    print(f"\nseed {failure.seed} FAILED: {failure.what[:WHAT_CHARS_MAX]}")
    print("last events:")
    for event in failure.events[-EVENTS_SHOWN:]:
        print(f"  {event}")
    print(
        f"again: python -m app simulate --seeds 1 --first-seed {failure.seed} --hours {hours!r}"
        f"{shuffle}",
        flush=True,
    )


def show_progress(
    results: list[Result], failures: list[Failure], count: int, begin_s: float
) -> None:
    if not sys.stderr.isatty():
        return
    done = len(results) + len(failures)
    hours = sum(result.simulated_s for result in results) / 3600
    elapsed_s = time.monotonic() - begin_s
    line = f"{done}/{count} worlds, {hours:.1f} h simulated, {len(failures)} failed"
    print(f"\r{line}, {elapsed_s:.0f} s", end="\n" if done == count else "", file=sys.stderr)


def show_summary(results: list[Result], failures: list[Failure], elapsed_s: float) -> None:
    simulated_s = sum(result.simulated_s for result in results)
    fired: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for result in results:
        fired += result.fired
        refused += result.refused
    requests = sum(result.request_count for result in results)
    whole = sum(result.whole_count for result in results)
    print(f"\nworlds            {len(results) + len(failures)}, {len(failures)} failed")
    print(
        f"simulated         {simulated_s / 3600:.2f} h in {elapsed_s:.0f} s, "
        f"{simulated_s / max(elapsed_s, 1e-9):.0f} times real time"
    )
    print(f"requests          {requests}, {whole} streams read to their right end")
    print(f"checks            {sum(r.check_count for r in results)} of the whole house")
    print(f"steps             {sum(r.step_count for r in results)} of the loop")
    print(f"deaths of actors  {sum(r.death_count for r in results)}")
    print(f"roots that gave up  {sum(r.gave_up for r in results)}")
    print("ends other than the right one, by code")
    for code, count in refused.most_common():
        print(f"  {code:24} {count}")
    print("faults")
    for kind, count in fired.most_common():
        print(f"  {kind:24} {count}")
    if failures:
        print(f"FAILED seeds: {' '.join(str(failure.seed) for failure in failures)}")
