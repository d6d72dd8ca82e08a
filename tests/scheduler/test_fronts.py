"""Several front ends: each reads its own requests' tokens, and takes none with it when it dies."""

from __future__ import annotations

import msgspec

from actors.runtime.testkit import Cell
from actors.scheduler.actor import Scheduler
from actors.tree import paths_of
from messages.base import Address
from messages.config import CacheConfig, SchedulerConfig
from messages.detokenizer import Tokens
from messages.scheduler import Acquired, Submit
from messages.types import FinishReason, pack
from messages.worker import Facts, Step, StepDone
from tests.scheduler.make import make_submit

PATHS, OTHER = paths_of(2)
FACTS = Facts("m", 100, 64, 16, 64, (2,), "float32", "cpu")
FIRST = Address("test", PATHS.gateway, 1)
SECOND = Address("test", OTHER.gateway, 1)


def start() -> Cell:
    notes = {PATHS.worker: msgspec.msgpack.encode(FACTS)}
    config = SchedulerConfig(policy="fcfs", running_max=4, prefill_budget=64)
    actor = Scheduler(config, CacheConfig(), PATHS)
    cell = Cell(actor, path=PATHS.scheduler, notes=notes)
    cell.start()
    return cell


def submit(name: str, gateway: Address) -> Submit:
    return msgspec.structs.replace(make_submit(name), reply_to=gateway)


def mails(cell: Cell) -> list[tuple[str, Tokens]]:
    return [(path, message) for path, message in cell.sent if isinstance(message, Tokens)]


def answer_steps(cell: Cell, count: int) -> None:
    """Token 7 for every row of the next `count` steps, as if each prompt took one."""
    for _ in range(count):
        steps = [message for _, message in cell.sent if isinstance(message, Step)]
        assert isinstance(cell.actor, Scheduler)
        due = cell.actor.schedule.flights.done_step + 1
        step = next(step for step in steps if step.step == due)
        row_count = len(step.slots) // 4
        cell.tell(StepDone(step.epoch, due, step.slots, pack([7] * row_count)))


def test_a_step_brings_each_front_end_one_message() -> None:
    cell = start()
    for page, (name, gateway) in enumerate((("a", FIRST), ("b", SECOND), ("c", FIRST))):
        cell.tell(submit(name, gateway))
        cell.tell(Acquired(name, 1, 0, pack([page])))
    answer_steps(cell, 2)
    before = len(mails(cell))
    answer_steps(cell, 1)
    found = {path: [row.request for row in m.rows] for path, m in mails(cell)[before:]}
    assert len(mails(cell)) == before + 2
    assert found == {PATHS.detokenizer: ["a", "c"], OTHER.detokenizer: ["b"]}
    opened = [(path, o.request) for path, message in mails(cell) for o in message.opened]
    here, there = PATHS.detokenizer, OTHER.detokenizer
    assert sorted(opened) == sorted([(here, "a"), (there, "b"), (here, "c")])


def test_the_requests_of_a_dead_front_end_end_and_no_others() -> None:
    cell = start()
    cell.tell(submit("a", FIRST))
    cell.tell(submit("b", SECOND))
    cell.down(PATHS.gateway)
    actor = cell.actor
    assert isinstance(actor, Scheduler)
    assert set(actor.schedule.live) == {"b"}


def test_what_was_on_its_way_when_its_gateway_died_is_not_run() -> None:
    cell = start()
    cell.down(PATHS.gateway)
    cell.tell(submit("late", FIRST))
    actor = cell.actor
    assert isinstance(actor, Scheduler)
    assert not actor.schedule.live
    cell.tell(submit("again", msgspec.structs.replace(FIRST, incarnation=2)))
    assert set(actor.schedule.live) == {"again"}


def test_refusals_go_to_the_front_end_that_asked() -> None:
    cell = start()
    long = msgspec.structs.replace(submit("long", SECOND), prompt=pack(range(64)))
    cell.tell(long)
    ((path, message),) = mails(cell)
    assert path == OTHER.detokenizer
    assert message.rows[0].finish is FinishReason.ERROR
