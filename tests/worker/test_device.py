"""What a worker makes of a device without memory, and of one that is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actors.runtime.testkit import Cell
from actors.worker.actor import HANG_STEPS, LOST, MORE_MEMORY, Worker
from actors.worker.watch import LOOKS
from kernels.batch import StepInput, StepOutput
from kernels.health import DeviceLost, check_device
from kernels.runner import Landed, ModelFacts, Runner
from messages.base import Address
from messages.config import CacheConfig, ModelConfig, Paths, SchedulerConfig, WorkerConfig
from messages.types import pack, unpack
from messages.worker import Step, StepDone, StepFailed

SCHEDULER = Address("engine", "replica/scheduler", 1)


@dataclass
class Device:
    """A runner whose steps end as `fates` say, one after the other; then they go well."""

    fates: list[Exception] = field(default_factory=list)
    is_asynchronous: bool = False
    is_lost: bool = False
    constrainer: Any = None
    computed: int = 0  # what a step that is under way has done

    def reset(self, keep_kv: bool) -> None: ...

    def progress(self) -> int:
        return self.computed

    def launch(self, step: StepInput) -> Landed:
        if self.fates:
            raise self.fates.pop(0)
        return Landed(StepOutput(step.slots, np.full(len(step.slots), 7, np.int32)))

    def check_device(self, error: BaseException) -> None:
        if self.is_lost:
            raise DeviceLost("cuda:0 is lost to this process") from error


class Grammars:
    def make_ready(self, rows: object) -> None: ...


def worker_with(device: Device) -> tuple[Cell, Worker]:
    worker = Worker(ModelConfig(), CacheConfig(), SchedulerConfig(), WorkerConfig(), Paths())
    cell = Cell(worker)
    worker.runner = device  # type: ignore[assignment]
    worker.grammars = Grammars()  # type: ignore[assignment]
    return cell, worker


def step(number: int) -> Step:
    return Step(epoch=1, step=number, slots=pack([0, 1]), counts=pack([1, 1]))


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_step_without_memory_fails_and_the_next_one_runs(is_asynchronous: bool) -> None:
    cell, _ = worker_with(Device([MemoryError("no room")], is_asynchronous))
    cell.tell(step(1), SCHEDULER)
    cell.tell(step(2), SCHEDULER)
    failed, done = (message for _, message in cell.take())
    assert isinstance(failed, StepFailed) and isinstance(done, StepDone)
    assert unpack(failed.slots).tolist() == [0, 1] and "no room" in failed.detail
    assert unpack(done.tokens).tolist() == [7, 7] and done.step == 2
    assert cell.crashed is None and cell.broken is None


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_lost_device_is_the_end_of_the_process(is_asynchronous: bool) -> None:
    LOST.clear()
    device = Device([RuntimeError("an illegal memory access")], is_asynchronous, is_lost=True)
    cell, worker = worker_with(device)
    cell.tell(step(1), SCHEDULER)
    assert cell.broken == "cuda:0 is lost to this process"
    assert cell.crashed is None and not cell.take()
    worker.on_end()
    assert LOST == [device], "to free what a lost device holds would fail as well"
    LOST.clear()


def test_any_other_error_is_a_crash() -> None:
    cell, _ = worker_with(Device([RuntimeError("a bug")]))
    with pytest.raises(RuntimeError, match="a bug"):
        cell.tell(step(1), SCHEDULER)
    assert cell.broken is None


def test_a_device_that_answers_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("of our own")
    check_device(torch.device("cpu"), error)

    def fails(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nmore lines")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(
        DeviceLost, match="cuda:0 is lost to this process: CUDA error: device-s"
    ) as e:
        check_device(torch.device("cuda:0"), error)
    assert e.value.__cause__ is error and "more lines" not in str(e.value)


def test_a_prefill_that_goes_on_for_minutes_is_not_hung_and_one_that_stands_still_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    cell, worker = worker_with(device)
    monkeypatch.setattr(worker.context, "offload", lambda *job, lane, keeps: None)  # it never ends
    cell.tell(step(1), SCHEDULER)
    look_s = worker.watch.look_s
    for _ in range(int(300 / look_s)):
        device.computed += 1
        cell.advance(look_s)
    assert cell.hung is None
    cell.advance(WorkerConfig().hang_s)
    assert cell.hung is not None and cell.hung.startswith("a forward made no progress for ")


async def test_a_device_may_be_quiet_for_as_long_as_its_largest_steps_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = ModelFacts("m", 9, 9, (), 1, 9, "float32", "cuda", 9, 9, None, largest_step_s=2.0)
    loaded = SimpleNamespace(
        facts=facts,
        warm_up=lambda progress: None,
        when_computing=lambda call: None,
        graphs_left=0,
        graph_bytes=0,
        is_asynchronous=True,
    )
    monkeypatch.setattr(Runner, "load", lambda *arguments: loaded)
    cell, worker = worker_with(Device())
    await worker.on_start()
    assert worker.watch.look_s * LOOKS == 2.0 * HANG_STEPS > WorkerConfig().hang_s


async def test_a_model_without_room_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object) -> Runner:
        raise MemoryError("the weights need 15.0 GiB")

    monkeypatch.setattr(Runner, "load", load)
    cell, worker = worker_with(Device())
    with pytest.raises(MemoryError) as caught:
        await worker.on_start()
    assert str(caught.value) == f"the weights need 15.0 GiB; {MORE_MEMORY}"
    assert len(str(caught.value)) < 400, "all of it is shown at the start"
