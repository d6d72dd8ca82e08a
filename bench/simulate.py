"""This file runs simulated worlds by the hundred, and says what failed and how to see it again.

It needs no GPU and no torch: msgspec, anyio, starlette, structlog, uvicorn, pyzmq, jinja2,
tokenizers, llguidance and numpy. What a world is, `bench/sim/` knows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.sim.draws import draw
from bench.sim.sights import COUNTED, SOMETIMES
from bench.sim.text import make_model
from bench.sim.world import Broken, Result, run_world

ABOUT = """\
Runs simulated worlds by the hundred, and says what failed and how to see it again.

  python -m app simulate --seeds 200 --hours 20
  python -m app simulate --first-seed 17 --seeds 1 --hours 0.1 --chains

Each seed is one world: a deployment, clients and faults drawn from it (`bench/sim/`). `--hours` are
simulated ones, divided among the seeds. A seed that fails is printed with the command that replays
it and its last events; the exit status is then 1. The summary counts each kind of fault and each
thing that must be seen sometimes, and names what never was; with `--complete` that is a failure as
well, since such a run does not test it. `--json` adds the summary as one line.
"""
EVENTS_SHOWN = 40
PYTHON = "{}.{}".format(*sys.version_info)  # whose callbacks are shuffled, by number
WHAT_CHARS_MAX = 3000


class Failure(NamedTuple):
    seed: int
    what: str
    events: list[str]


def run_seed(seed: int, seconds: float, shuffles: bool, model: str) -> Result | Failure:
    """One world, in whatever process."""
    begin_s = time.process_time()
    try:
        result = run_world(draw(seed, seconds, shuffles=shuffles), Path(model))
        return result._replace(cpu_s=time.process_time() - begin_s)
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
        model = str(make_model(Path(folder)))
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
    summary = summarise(results, failures, time.monotonic() - begin_s, jobs)
    show_summary(summary)
    if arguments.json:
        print(json.dumps(summary._asdict()))
    is_incomplete = arguments.complete and bool(summary.never_fired or summary.never_seen)
    return 1 if failures or is_incomplete else 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m app simulate",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=positive, default=200, metavar="N", help="how many worlds")
    parser.add_argument("--first-seed", type=int, default=0, metavar="S", help="where seeds begin")
    parser.add_argument(
        "--hours",
        type=float,
        default=20.0,
        metavar="H",
        help="simulated, in all worlds together; a world whose root gives up ends early",
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
    parser.add_argument(
        "--complete", action="store_true", help="fail where something has never been seen"
    )
    parser.add_argument("--stop", action="store_true", help="at the first seed that fails")
    parser.add_argument("--json", action="store_true", help="the summary as one line, the last")
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
    shuffle = f" --shuffle   # with Python {PYTHON}" if arguments.shuffle else ""
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


class Summary(NamedTuple):
    """What came of all worlds together. Written as JSON with `--json`."""

    worlds: int
    failed: list[int]
    simulated_h: float
    elapsed_s: float
    jobs: int
    simulated_h_per_core_minute: float
    requests: int
    requests_per_hour: float  # simulated
    faults_per_hour: float  # what somebody did; not the frames that a wire lost
    streams_whole: int
    checks: int
    steps: int
    deaths: int
    refused: dict[str, int]  # ends other than the right one, by code
    fired: dict[str, int]  # faults by kind
    never_fired: list[str]
    seen: dict[str, int]
    never_seen: list[str]


def summarise(
    results: list[Result], failures: list[Failure], elapsed_s: float, jobs: int
) -> Summary:
    hours = sum(result.simulated_s for result in results) / 3600
    cpu_s = sum(result.cpu_s for result in results)
    refused: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for result in results:
        refused += result.refused
        fired += result.fired
        seen += result.seen
    requests = sum(result.request_count for result in results)
    done = sum(count for kind, count in fired.items() if not kind.startswith("frame "))
    return Summary(
        worlds=len(results) + len(failures),
        failed=sorted(failure.seed for failure in failures),
        simulated_h=round(hours, 3),
        elapsed_s=round(elapsed_s, 1),
        jobs=jobs,
        simulated_h_per_core_minute=round(60 * hours / max(cpu_s, 1e-9), 3),
        requests=requests,
        requests_per_hour=round(requests / max(hours, 1e-9), 1),
        faults_per_hour=round(done / max(hours, 1e-9), 1),
        streams_whole=sum(result.whole_count for result in results),
        checks=sum(result.check_count for result in results),
        steps=sum(result.step_count for result in results),
        deaths=sum(result.death_count for result in results),
        refused=dict(refused.most_common()),
        fired=dict(fired.most_common()),
        never_fired=[kind for kind in COUNTED if not fired[kind]],
        seen=dict(seen.most_common()),
        never_seen=[what for what in SOMETIMES if not seen[what]],
    )


def show_summary(found: Summary) -> None:
    speed = found.simulated_h * 3600 / max(found.elapsed_s, 1e-9)
    print(f"\nworlds            {found.worlds}, {len(found.failed)} failed")
    print(
        f"simulated         {found.simulated_h:.2f} h in {found.elapsed_s:.0f} s by {found.jobs} "
        f"processes: {speed:.0f} times real time, "
        f"{found.simulated_h_per_core_minute:.2f} h a core-minute"
    )
    print(
        f"requests          {found.requests}, {found.requests_per_hour:.0f} an hour; "
        f"{found.streams_whole} answers read to their right end"
    )
    print(f"checks            {found.checks} of the whole house")
    print(f"steps             {found.steps} of the loop")
    print(f"deaths of actors  {found.deaths}")
    print(f"faults            {found.faults_per_hour:.0f} an hour, beside lost frames")
    for title, counts, never in (
        ("ends other than the right one, by code", found.refused, []),
        ("faults", found.fired, found.never_fired),
        ("seen sometimes", found.seen, found.never_seen),
    ):
        print(title)
        for name, count in counts.items():
            print(f"  {name:44} {count}")
        for name in never:
            print(f"  {name:44} NEVER")
    if found.failed:
        print(f"FAILED seeds: {' '.join(map(str, found.failed))}")
