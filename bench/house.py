"""This file runs requests through the cores of scheduler and cache and a `Runner`, in one thread.

It is what the actors do with their mailboxes left out: the same messages, in the same order, with
two steps in flight. It does not know HTTP or text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.cache.ledger import Ledger
from actors.scheduler.schedule import Schedule
from actors.worker import translate
from bench.gpu_workloads import Load
from kernels.runner import Flight, Runner
from messages import cache
from messages.base import Address
from messages.config import SchedulerConfig
from messages.scheduler import Acquired, Deferred, Granted, Probed, Submit
from messages.types import Sampling, StopRules, pack, unpack
from messages.worker import Facts, Step


@dataclass
class Run:
    """When each request's tokens came, in seconds after the first was submitted."""

    arrivals_s: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)  # what was generated
    end_s: float = 0.0
    step_count: int = 0
    prefill_step_count: int = 0
    host_s: float = 0.0  # spent in Python, waiting for the device left out

    def first_s(self, name: str) -> float:
        return self.arrivals_s[name][0]


class House:
    """One life of scheduler and cache over a loaded runner."""

    epoch = 0

    def __init__(
        self,
        runner: Runner,
        running_max: int,
        prefill_budget: int,
        policy: str = "lpm",
        prefix_cache: bool = True,
    ) -> None:
        House.epoch += 1
        facts = runner.facts
        self.runner = runner
        runner.reset(keep_kv=True)
        self.schedule = Schedule(
            SchedulerConfig(
                running_max=running_max,
                prefill_budget=prefill_budget,
                policy=policy,
                queued_max=4096,
            ),
            Facts(
                model=facts.name,
                vocab_size=facts.vocab_size,
                context_len=facts.context_len,
                page_size=facts.page_size,
                page_count=facts.page_count,
                eos_ids=facts.eos_ids,
                dtype=facts.dtype,
                device=facts.device,
            ),
            epoch=House.epoch,
        )
        self.ledger = Ledger(facts.page_count, facts.page_size, prefix_cache=prefix_cache)
        self.flying: deque[tuple[Step, Flight]] = deque()
        self.name_count = 0
        self.run_now = Run()
        self.begin_s = 0.0

    def run(
        self, load: Load, temperature: float = 0.0, sampling: Mapping[str, Any] | None = None
    ) -> Run:
        """Submits all of `load` at once and works until the last one has ended. `sampling`: further
        fields of each request's `Sampling`."""
        run = self.run_now = Run()
        more = {"temperature": temperature, **(sampling or {})}
        messages = [
            self.submit(prompt, length, nth, more)
            for nth, (prompt, length) in enumerate(zip(*load, strict=True))
        ]
        self.begin_s = time.perf_counter()
        for message in messages:
            run.arrivals_s[message.request] = []
            run.tokens[message.request] = []
            self.schedule.submit(message, self.now_s())
            self.go_on()
            for _ in range(len(self.flying)):  # as a mailbox would have it, and no more than that:
                if has_ended(self.flying[0][1]):  # steps may end as fast as they are launched
                    self.land()
        waited_s = 0.0
        while self.flying:
            waited_s += self.land()
        assert not self.schedule.live, f"{len(self.schedule.live)} requests were left"
        run.end_s = self.now_s()
        run.host_s = run.end_s - waited_s
        return run

    def land(self) -> float:
        """The oldest step's result, and all that follows. Returns the seconds waited for it."""
        step, flight = self.flying.popleft()
        begin_s = time.perf_counter()
        output = flight.result()
        waited_s = time.perf_counter() - begin_s
        self.schedule.step_done(translate.step_done(step, output, 0), self.now_s())
        self.go_on()
        return waited_s

    def submit(self, prompt: list[int], length: int, seed: int, more: Mapping[str, Any]) -> Submit:
        self.name_count += 1
        return Submit(
            f"request-{self.name_count:06d}",
            1,
            Address("front", "gateway", 1),
            pack(prompt),
            Sampling(max_tokens=length, seed=seed, ignore_eos=True, **more),
            StopRules(),
        )

    def now_s(self) -> float:
        return time.perf_counter() - self.begin_s

    def go_on(self) -> None:
        """After any event: all that follows from it."""
        schedule, output = self.schedule, self.schedule.output
        while True:
            schedule.pump(self.now_s())
            for step in output.steps:
                self.run_now.step_count += 1
                self.run_now.prefill_step_count += len(set(step.counts[0::4])) > 1
                self.flying.append((step, self.runner.launch(translate.step_input(step))))
            output.steps.clear()
            now_s = self.now_s()
            for mail in output.mails.values():
                for tail in mail.take().rows:
                    if tail.tokens:
                        self.run_now.arrivals_s[tail.request].append(now_s)
                        self.run_now.tokens[tail.request] += unpack(tail.tokens)
                    assert tail.problem is None, tail.problem
            output.landed.clear()
            output.queue_s.clear()
            questions = list(output.to_cache)
            output.to_cache.clear()
            if not questions:
                return
            for question in questions:
                self.ask(question)

    def ask(self, question: Any) -> None:
        schedule, ledger = self.schedule, self.ledger
        match question:
            case cache.Acquire(request, attempt, tokens, namespace):
                answer = ledger.acquire(request, attempt, tokens, namespace)
                if isinstance(answer, Acquired):
                    schedule.acquired(answer, self.now_s())
                else:
                    assert isinstance(answer, Deferred)
                    schedule.deferred(answer)
            case cache.Commit(request, attempt, computed_len):
                ledger.commit(request, attempt, computed_len)
            case cache.Release(request, attempt, tokens, pages):
                ledger.release(request, attempt, tokens, pages)
                self.tell_freed()
            case cache.Reserve(page_count):
                granted: Granted = ledger.reserve(page_count)
                schedule.granted(granted)
            case cache.Return(pages):
                ledger.take_back(pages)
                self.tell_freed()
            case cache.Probe(rows):
                schedule.probed(Probed(pack(ledger.probe(rows))))
            case _:
                raise AssertionError(question)

    def tell_freed(self) -> None:
        if self.ledger.take_freed() is not None:
            self.schedule.freed()


def has_ended(flight: Flight) -> bool:
    """Whether its result is there, without waiting."""
    event = getattr(flight, "event", None)
    return event is None or bool(event.query())
