"""This file makes a drawn deployment real: its settings, small mailboxes, its clock and secrets.

It does not know clients, faults or laws.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from actors.detokenizer.actor import Detokenizer
from actors.gateway import held
from actors.gateway.batches.store import RUNNABLE, BatchStore
from actors.router.actor import Router
from actors.runtime import live
from actors.runtime.actor import MailboxSpec
from actors.runtime.clock import rng_for
from actors.runtime.mailbox import Full
from actors.runtime.simloop import SimLoop
from actors.tokenizer.actor import Tokenizer
from bench.sim.rooms import Pace
from bench.sim.scenario import CONTEXT_LEN, Leap, Scenario, Shape
from messages.config import (
    CacheConfig,
    Config,
    GatewayConfig,
    ModelConfig,
    RuntimeConfig,
    SchedulerConfig,
    TokenizerConfig,
)
from messages.gateway import Delta

EPOCH_S = 1_800_000_000.0
STALL_S = 5.0  # how long a gateway here lets a stream lie unread
RECOVER_S = 30.0  # how long it lets a request wait for a lost part
HAND_OVER_S = 1e-6  # from one job of a thread to the next
WORK_S = (
    0.5  # how long a thread works at most: less than a house that was stopped is looked at after
)


def config_of(scenario: Scenario, model: Path) -> Config:
    shape = scenario.shape
    return Config(
        model=ModelConfig(path=str(model), name="tiny", context_len=CONTEXT_LEN),
        gateway=GatewayConfig(
            http=False,
            stream_stall_s=STALL_S,
            recover_s=RECOVER_S,
            resume_s=shape.resume_s,
            resume_streams_max=shape.resume_streams_max,
            tool_parser=shape.form or "auto",
            batch_dir=str(batch_dir(model, scenario.seed)) if shape.batches else "",
        ),
        tokenizer=TokenizerConfig(),
        scheduler=SchedulerConfig(
            running_max=shape.running_max,
            queued_max=shape.queued_max,
            prefill_budget=shape.prefill_budget,
            policy=shape.policy,
            grammar_timeout_s=shape.grammar_timeout_s,
        ),
        cache=CacheConfig(
            page_size=shape.page_size,
            kv_tokens=shape.kv_tokens,
            prefix_cache=shape.prefix_cache,
        ),
        runtime=RuntimeConfig(placement="inline"),
    )


def batch_dir(model: Path, seed: int) -> Path:
    """Where a world's files are: below what its journal does not tell apart."""
    return model / f"batches-{seed}"


@contextlib.contextmanager
def files_for(scenario: Scenario, model: Path, pace: Pace) -> Iterator[None]:
    """An empty folder for files and batches, and none left open or lying about."""
    if not scenario.shape.batches:
        yield
        return
    folder = batch_dir(model, scenario.seed)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    finally:
        for site in pace.sites:
            if site.app.batches.store is not None:
                site.app.batches.store.close()
        shutil.rmtree(folder)


def owners_of(scenario: Scenario, model: Path) -> set[str]:
    """The gateways whose batches have not ended, by what is on the disk."""
    store = BatchStore(batch_dir(model, scenario.seed))
    marks = ", ".join("?" * len(RUNNABLE))
    rows = store.base.execute(f"SELECT owner FROM batches WHERE status IN ({marks})", RUNNABLE)
    found = {row[0] for row in rows}
    store.close()
    return found


@contextlib.contextmanager
def small_mailboxes(shape: Shape) -> Iterator[None]:
    """Rooms of the front with room for a few messages only, where the world has such."""
    count, waits = shape.mailbox_max, shape.waits
    front: tuple[Any, ...] = (Tokenizer, Router, *((Detokenizer,) if waits else ()))
    kept = [room.mailbox for room in front]
    full = Full.WAIT if waits else Full.REJECT
    try:
        if count:
            for room in front:
                room.mailbox = MailboxSpec(count_max=count, full=full)
        yield
    finally:
        for room, mailbox in zip(front, kept, strict=True):
            room.mailbox = mailbox


@contextlib.contextmanager
def threads_take_time(loop: SimLoop, mean_s: float, is_gone: Callable[[], bool]) -> Iterator[None]:
    """What a room gives to a thread is done later, while messages go on to arrive; and not at all
    where its process was killed before. What one thread does keeps its order."""
    rng = rng_for(loop.seed, "threads")
    run_inline = live._run_inline
    free_s: dict[object, float] = {}  # by line: when its thread is done with all before

    def run(work: Callable[[], Any], done: Callable[[Any], None], line: object) -> None:
        if not is_gone():
            run_inline(work, done, line)

    def run_later(work: Callable[[], Any], done: Callable[[Any], None], line: object) -> None:
        at_s = loop.time() + min(rng.expovariate(1.0 / mean_s), WORK_S)
        if line is not None:
            at_s = max(at_s, free_s.get(line, 0.0) + HAND_OVER_S)
            free_s[line] = at_s
        loop.call_at(at_s, run, work, done, line)

    try:
        live._run_inline = run_later if mean_s else run
        yield
    finally:
        live._run_inline = run_inline


def wall_s(now_s: float, leaps: Sequence[Leap]) -> float:
    """The time of day, as who sets the clock has it."""
    return EPOCH_S + now_s + sum(leap.by_s for leap in leaps if leap.at_s <= now_s)


@contextlib.contextmanager
def pieces_are_seen(seen: Counter[str]) -> Iterator[None]:
    """Counts answers that were made again in other pieces than their client had got."""
    cut = held.cut

    def counted(delta: Delta, chars: int, tokens: int) -> tuple[Delta, Delta]:
        seen["came back to other pieces than it had"] += 1
        return cut(delta, chars, tokens)

    held.cut = counted
    try:
        yield
    finally:
        held.cut = cut


@contextlib.contextmanager
def nothing_from_outside(loop: SimLoop, leaps: Sequence[Leap] = ()) -> Iterator[None]:
    """The time of day and secrets are the seed's too: rooms put both into what they send."""
    secret = rng_for(loop.seed, "secrets")
    kept = time.time, secrets.token_hex
    time.time = lambda: wall_s(loop.time(), leaps)
    secrets.token_hex = lambda count=32: (
        f"{secret.getrandbits(8 * (count or 32)):0{2 * (count or 32)}x}"
    )
    try:
        yield
    finally:
        time.time, secrets.token_hex = kept
