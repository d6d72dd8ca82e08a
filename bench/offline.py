"""This file measures the same loads as `bench serve` through `Engine`: the tree without HTTP.

It does not know how the Engine works; the difference to `bench serve` is what HTTP costs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from actors.engine import Engine, Refusal
from actors.settings import add_flags, given_flags, read_config
from bench.client import Outcome
from bench.command import parser_of
from bench.report import Report
from bench.serve import add_load, loads_of, middle, summary
from bench.workload import Request, Workload

ABOUT = """\
The loads of `bench serve`, through Engine instead of HTTP.

  python -m app bench offline --preset all
  python -m app bench offline --concurrency 16 --input-len 64:512 --placement threads
"""


def main(words: Sequence[str]) -> int:
    parser = parser_of("offline", ABOUT)
    add_load(parser)
    parser.set_defaults(rate=None)
    # `--seed` is the load's here; the tree's stays 0.
    add_flags(parser, ("model", "scheduler", "cache", "worker"))
    parser.add_argument(
        "--placement",
        default="inline",
        dest="runtime.placement",
        metavar="inline|threads|processes",
        help="of the actors",
    )
    found = parser.parse_args(list(words))
    loads = loads_of(parser, found)
    config = read_config(None, given_flags(vars(found)))
    with Engine.of(config, show=lambda text: print(text, file=sys.stderr)) as engine:
        return engine.call(measure(engine, loads, found))


async def measure(engine: Engine, loads: Sequence[Workload], found: argparse.Namespace) -> int:
    report = Report("offline", as_json=found.json, model=engine.model, seed=found.seed)
    failed = 0
    for load in loads:
        waves = []
        for repeat in range(-found.warm_up, load.repeats):
            outcomes = await send_wave(engine, load, load.wave(found.seed, repeat, found.vocab))
            if repeat >= 0:
                waves.append(summary(load, outcomes))
        failed += sum(wave["errors"] for wave in waves)
        report.add(**middle(waves))
    report.close()
    return 1 if failed else 0


async def send_wave(engine: Engine, load: Workload, requests: Sequence[Request]) -> list[Outcome]:
    room = asyncio.Semaphore(load.concurrency)

    async def send(request: Request) -> Outcome:
        async with room:
            return await send_one(engine, request)

    return list(await asyncio.gather(*map(send, requests)))


async def send_one(engine: Engine, request: Request) -> Outcome:
    now = asyncio.get_running_loop().time
    sent_s, arrivals_s, usage, finish = now(), [], None, None
    error = None
    try:
        async for delta in engine.astream(
            list(request.ids), max_tokens=request.output_len, temperature=0, ignore_eos=True
        ):
            if delta.text:
                arrivals_s.append(now())
            usage, finish = delta.usage or usage, delta.finish_reason or finish
    except Refusal as refusal:
        error = str(refusal)
    return Outcome(
        sent_s,
        tuple(arrivals_s),
        now(),
        "",
        usage.prompt_tokens if usage else 0,
        usage.completion_tokens if usage else 0,
        finish,
        error,
    )
