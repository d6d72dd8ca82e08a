"""A scheduler, a cache and a shadow worker, with messages delivered one at a time, by a seed.

Each pair of actors is a queue: in order within it, in any order between them. The clients, and the
detokenizer that watches for stop tokens, are played by the world, which checks every tail.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from actors.cache.actor import Cache
from actors.runtime.testkit import Cell
from actors.scheduler.actor import Scheduler
from bench.sim.vectors import vector_of
from messages.base import Address
from messages.config import CacheConfig, Paths, SchedulerConfig
from messages.detokenizer import Open, Tail, Tokens
from messages.scheduler import Cancel, StopMet, Submit
from messages.system import Cause, Down, Reason
from messages.types import FinishReason, Float32s, Sampling, StopRules, Usage, pack, unpack
from messages.worker import Step, StepDone, StepFailed
from tests.house.shadow import ShadowWorker, continuation, next_token

PATHS = Paths()
GATEWAY = Address("front", PATHS.gateway, 1)


class Client:
    """One request: what it asked for, and what it has been told."""

    def __init__(self, submit: Submit, stop_token: int | None) -> None:
        self.submit = submit
        self.attempt = submit.attempt
        self.stop_token = stop_token  # plays a stop string: found by the detokenizer alone
        self.open: Open | None = None
        self.output: list[int] = list(unpack(submit.emitted))
        self.logprob_count = 0
        self.finish: FinishReason | None = None  # of its terminal tail
        self.tail: Tail | None = None
        self.stopped_at: int | None = None  # the detokenizer has found the stop
        self.is_cancelled = False

    @property
    def usage(self) -> Usage:
        assert self.tail is not None and self.tail.usage is not None
        return self.tail.usage

    @property
    def is_stopped_by_text(self) -> bool:
        """Whether the scheduler ended it because the detokenizer said so."""
        tail = self.tail
        return tail is not None and tail.finish is FinishReason.STOP and not tail.tokens

    def take(self, tail: Tail) -> StopMet | None:
        """One tail, in order; what the detokenizer says to it."""
        if tail.attempt < self.attempt:
            return None  # of a life before the last
        assert self.open is not None, "a tail before its request was announced"
        assert self.finish is None, f"{tail} after the terminal one"
        assert tail.attempt == self.attempt
        assert tail.index == len(self.output), f"{tail.index} after {len(self.output)} tokens"
        tokens = unpack(tail.tokens)
        if tail.finish is FinishReason.ABORT:
            assert not tokens, "a token after the abort"
        self.output += tokens
        self.logprob_count += len(tail.logprobs)
        if tail.finish is not None:
            self.finish, self.tail = tail.finish, tail
            assert tail.usage is not None
        if self.stopped_at is None and self.stop_token in tokens:
            self.stopped_at = tail.index + tokens.index(self.stop_token) + 1
            if tail.finish is None:
                return StopMet(self.submit.request, self.attempt, self.stopped_at)
        return None


class JumpingWorker(ShadowWorker):
    """Behind some tokens the next ones are known at once, as if a grammar forced them: those that
    would have come anyhow."""

    def __init__(self, jump_len: Callable[[int], int], **facts: Any) -> None:
        super().__init__(**facts)
        self.jump_len = jump_len

    def execute(self, step: Step, spoiled: Collection[int] = ()) -> StepDone:
        done = super().execute(step, spoiled)
        jumped = [(slot, token) for slot in unpack(done.slots) for token in self.jump(slot)]
        return msgspec.structs.replace(
            done,
            jumped_slots=pack(slot for slot, _ in jumped),
            jumped_tokens=pack(token for _, token in jumped),
        )

    def jump(self, slot: int) -> list[int]:
        tenant, facts = self.tenants[slot], self.facts
        tokens = tenant.tokens
        room_len = min(len(tenant.pages) * facts.page_size, facts.context_len)
        count = min(self.jump_len(tokens[-1]), room_len - len(tokens))
        for _ in range(count):
            cells = [(token, at, tenant.namespace) for at, token in enumerate(tokens)]
            tokens.append(next_token(cells, tenant.seed, facts.vocab_size))
        return tokens[len(tokens) - max(count, 0) :]


class World:
    """`deliver` moves one message; `settle` all of them."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        page_count: int = 64,
        running_max: int = 4,
        queued_max: int = 1024,
        prefill_budget: int = 32,
        policy: str = "fcfs",
        max_inflight: int = 2,
        prefix_cache: bool = True,
        context_len: int = 4096,
        eos_ids: tuple[int, ...] = (),
        vocab_size: int = 64,
        seed: int = 0,
        jump_len: Callable[[int], int] = lambda token: 0,
    ) -> None:
        self.clients: dict[str, Client] = {}
        self.rng = random.Random(seed)
        self.vocab_size = vocab_size
        self.shadow = JumpingWorker(
            jump_len,
            page_count=page_count,
            page_size=page_size,
            vocab_size=vocab_size,
            context_len=context_len,
            eos_ids=eos_ids,
            namespace_of=lambda request: self.clients[request].submit.namespace,
        )
        facts = msgspec.structs.replace(self.shadow.facts, credits=max_inflight)
        notes = {PATHS.worker: msgspec.msgpack.encode(facts)}
        self.elapsed_us = 1  # what a step takes, as the worker says
        cache = CacheConfig(page_size=page_size, prefix_cache=prefix_cache)
        config = SchedulerConfig(
            running_max=running_max,
            queued_max=queued_max,
            prefill_budget=prefill_budget,
            policy=policy,
            max_inflight=max_inflight,
        )
        self.notes = notes
        self.configs = (config, cache)
        self.cache_actor = Cache(cache, PATHS)
        self.cache = Cell(self.cache_actor, path=PATHS.cache, notes=notes)
        self.cache.start()
        self.start_scheduler(1)
        # Queues of messages on their way, by (from, to). The two directions of one pair are two.
        self.links: dict[tuple[str, str], deque[Any]] = {}
        self.cache_heard: list[Any] = []
        self.max_inflight = 0
        # Slots at fault in a step that does not run; slots whose rows alone come to nothing.
        self.failures: Callable[[Any], list[int]] = lambda step: []
        self.spoiled: Callable[[Any], list[int]] = lambda step: []
        self.guilty: set[str] = set()  # requests that were at fault
        self.collect()

    def start_scheduler(self, incarnation: int) -> None:
        self.scheduler_actor = Scheduler(*self.configs, PATHS)
        self.scheduler = Cell(self.scheduler_actor, path=PATHS.scheduler, notes=self.notes)
        self.address = Address("engine", PATHS.scheduler, incarnation)
        self.scheduler.context.address = self.address
        self.scheduler.start()

    def restart_scheduler(self) -> None:
        """It dies, and the next one starts; what is open comes again from the gateway.

        What it had sent arrives all the same, and the cache hears of its death some time later.
        """
        dead = self.address
        for pair, queue in self.links.items():
            if pair[1] == PATHS.scheduler:
                queue.clear()  # nothing reaches a later life
        self.start_scheduler(dead.incarnation + 1)
        self.put("supervisor", PATHS.cache, Down(dead, Reason(Cause.CRASHED)))
        for name, client in self.clients.items():
            client.attempt += 1  # what is on its way to the client counts no more
            if client.finish is None and client.stopped_at is None:
                client.open = None
                emitted = pack(client.output)
                submit = msgspec.structs.replace(
                    client.submit, attempt=client.attempt, emitted=emitted
                )
                self.put(PATHS.router, PATHS.scheduler, submit)
                if client.is_cancelled:
                    self.cancel(name)
            elif client.finish is None:
                # The stop was found, so the client has its end already.
                client.finish = FinishReason.STOP
                client.tail = Tail(
                    name,
                    client.attempt,
                    0,
                    finish=FinishReason.STOP,
                    usage=Usage(len(client.submit.prompt) // 4, client.stopped_at or 0),
                )

    def put(self, source: str, target: str, message: Any) -> None:
        """On its way, from the present life of its sender."""
        self.links.setdefault((source, target), deque()).append((self.address, message))

    def submit(
        self,
        name: str,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        emitted: list[int] | None = None,
        stop_token: int | None = None,
        namespace: str = "",
        priority: int = 0,
        attempt: int = 1,
        seed: int = 0,
        **sampling: Any,
    ) -> Client:
        submit = Submit(
            name,
            attempt,
            GATEWAY,
            pack(prompt),
            Sampling(seed=seed, max_tokens=max_tokens, **sampling),
            StopRules(),
            pack(emitted or []),
            namespace,
            priority,
        )
        client = self.clients[name] = Client(submit, stop_token)
        self.put(PATHS.router, PATHS.scheduler, submit)
        return client

    def cancel(self, name: str) -> None:
        client = self.clients[name]
        client.is_cancelled = True
        cancel = Cancel(name, client.attempt)
        self.put(PATHS.router, PATHS.scheduler, cancel)

    def deliver(self) -> bool:
        """One message, of a pair chosen by the seed. False: there is none."""
        ready = [pair for pair, queue in self.links.items() if queue]
        if not ready:
            return False
        source, target = self.rng.choice(ready)
        self.arrive(source, target, self.links[source, target].popleft())
        return True

    def only(self, source: str, target: str) -> bool:
        """One message of this pair. False: there is none."""
        queue = self.links.get((source, target))
        if not queue:
            return False
        self.arrive(source, target, queue.popleft())
        return True

    def settle(self, limit: int = 100_000) -> None:
        """All messages, until nothing moves."""
        for _ in range(limit):
            if not self.deliver():
                return
        raise AssertionError("the system never comes to rest")

    def settle_but(self, *held: tuple[str, str]) -> None:
        """All messages but those of the pairs `held`."""
        while True:
            ready = [pair for pair, queue in self.links.items() if queue and pair not in held]
            if not ready:
                return
            self.arrive(*ready[0], self.links[ready[0]].popleft())

    def arrive(self, source: str, target: str, letter: tuple[Address, Any]) -> None:
        sender, message = letter
        if target == PATHS.scheduler:
            self.scheduler.tell(message)
        elif isinstance(message, Down):
            self.cache_actor.on_down(message)
        elif target == PATHS.cache:
            self.cache_heard.append(message)
            self.cache.tell(message, sender)
        elif target == PATHS.worker:
            answer = self.work(message)
            if sender == self.address:
                self.put(PATHS.worker, PATHS.scheduler, answer)
        elif target == PATHS.detokenizer:
            self.read(message)
        self.collect()

    def work(self, step: Step) -> StepDone | StepFailed:
        """What the worker says to a step."""
        failed, spoiled = self.failures(step), self.spoiled(step)
        answer: StepDone | StepFailed
        if failed:
            answer = self.shadow.fail(step, failed)
        else:
            answer = self.shadow.execute(step, spoiled)
            failed = list(unpack(answer.failed))
        for slot in failed:
            self.guilty.add(self.shadow.tenants[slot].request)
        if isinstance(answer, StepDone):
            answer = msgspec.structs.replace(answer, elapsed_us=self.elapsed_us)
        return answer

    def collect(self) -> None:
        for cell, source in ((self.scheduler, PATHS.scheduler), (self.cache, PATHS.cache)):
            for target, message in cell.take():
                if target in (str(self.address), PATHS.scheduler):
                    self.put(source, PATHS.scheduler, message)
                elif "#" not in target:  # else to a life that is over
                    self.put(source, target, message)
        flights = len(self.scheduler_actor.schedule.flights)
        self.max_inflight = max(self.max_inflight, flights)

    def read(self, message: Tokens) -> None:
        for opened in message.opened:
            client = self.clients[opened.request]
            if opened.attempt == client.attempt:
                assert client.open is None, f"{opened.request} is announced twice"
                client.open = opened
        for tail in message.rows:
            said = self.clients[tail.request].take(tail)
            if said is not None:
                self.put(PATHS.detokenizer, PATHS.scheduler, said)

    def expected(self, name: str) -> tuple[list[int], FinishReason]:
        """Output and end of a request that nobody cancels, by the plain rules."""
        client = self.clients[name]
        submit, sampling = client.submit, client.submit.sampling
        prompt = list(unpack(submit.prompt))
        facts = self.shadow.facts
        limit = min(facts.context_len, facts.page_count * facts.page_size) - len(prompt)
        count = min(sampling.max_tokens, limit)
        stops = set(sampling.stop_ids) | (set() if sampling.ignore_eos else set(facts.eos_ids))
        whole = continuation(
            prompt,
            count,
            namespace=submit.namespace,
            seed=sampling.seed,
            vocab_size=self.vocab_size,
        )
        for index, token in enumerate(whole):
            if token in stops and index >= sampling.min_tokens:
                return whole[: index + 1], FinishReason.STOP
            if token == client.stop_token:
                return whole[: index + 1], FinishReason.STOP
        return whole, FinishReason.LENGTH

    def expected_vector(self, name: str) -> Float32s:
        """What its prompt comes to; empty where it did not ask."""
        submit = self.clients[name].submit
        cells = [(token, at, submit.namespace) for at, token in enumerate(unpack(submit.prompt))]
        return vector_of(cells, submit.sampling)

    def verify(self, name: str) -> None:
        """One terminal tail, and the output is the plain function of the prompt."""
        client = self.clients[name]
        assert client.finish is not None, f"{name} never ends"
        output, finish = self.expected(name)
        told = client.output if client.stopped_at is None else client.output[: client.stopped_at]
        if client.finish is FinishReason.ERROR:
            assert name in self.guilty, f"{name} failed by the fault of another"
            assert client.tail is not None and client.tail.problem is not None
            assert told == output[: len(told)], name
            return
        if client.finish is FinishReason.ABORT:
            assert client.is_cancelled
            assert told == output[: len(told)], name
            return
        assert told == output, name
        assert client.tail is not None
        assert client.tail.vector == self.expected_vector(name), name
        if client.stopped_at is None:
            assert client.finish is finish, name
        usage = client.usage
        assert usage.prompt_tokens == len(client.submit.prompt) // 4
        if client.stopped_at is None or client.is_stopped_by_text:
            assert usage.completion_tokens == len(output), name
        else:
            # It had ended before the stop was found; the detokenizer knows what counts.
            assert usage.completion_tokens == len(client.output), name
        assert usage.cached_tokens < usage.prompt_tokens
        if client.submit.sampling.logprobs is not None:
            resumed = len(client.submit.emitted) // 4
            assert client.logprob_count == len(client.output) - resumed

    def verify_idle(self) -> None:
        """Nothing is left of anybody."""
        schedule = self.scheduler_actor.schedule
        assert not schedule.live
        assert not schedule.leases.retiring
        assert not schedule.admission.asking
        assert len(schedule.flights) == 0
        assert len(schedule.reserve) == 0
        counts = self.cache_actor.ledger.counts()
        assert counts.free + counts.cached == self.shadow.facts.page_count, f"{counts}"
        gauges = self.scheduler.context.tally.gauges
        assert gauges["histrio_requests_running", ()] == 0
        assert gauges["histrio_requests_waiting", ()] == 0
