"""What is left of a worker's life that has ended."""

from __future__ import annotations

import gc
import weakref

from actors.worker.actor import Worker
from messages.config import CacheConfig, ModelConfig, Paths, SchedulerConfig, WorkerConfig


class Model:
    """Stands for what takes the device's memory."""


def test_a_life_that_has_ended_holds_no_model() -> None:
    worker = Worker(ModelConfig(), CacheConfig(), SchedulerConfig(), WorkerConfig(), Paths())
    model = Model()
    worker.runner = model  # type: ignore[assignment]
    held = weakref.ref(model)
    del model
    worker.on_end()
    worker.on_end()
    gc.collect()
    assert held() is None
