"""Goal: what clients have reported of schedulers of this kind does not happen here.

Method: the scheduler with the real cache and a shadow worker (`world.py`); each test holds back the
messages whose order matters. Cases are those of the public reports, by number.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from actors.runtime.testkit import Cell
from actors.scheduler.actor import Scheduler
from actors.scheduler.request import State
from actors.scheduler.schedule import Schedule
from messages.base import Address
from messages.cache import Acquire, Release, Reserve
from messages.config import CacheConfig, Paths, SchedulerConfig
from messages.detokenizer import Tokens
from messages.scheduler import Acquired, Cancel, StopMet
from messages.system import Cause, Undelivered
from messages.types import Fault, FinishReason, pack, unpack
from messages.worker import Step, StepDone, StepFailed
from tests.house.shadow import ShadowWorker, continuation
from tests.scheduler.make import make_submit
from tests.scheduler.world import GATEWAY, World

PATHS = Paths()
TO_WORKER = (PATHS.scheduler, PATHS.worker)
FROM_WORKER = (PATHS.worker, PATHS.scheduler)
FROM_CACHE = (PATHS.cache, PATHS.scheduler)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(64) for _ in range(length)]


def state_of(world: World, name: str) -> State:
    return world.scheduler_actor.schedule.live[name].state


def finish(world: World) -> None:
    world.settle()
    for name in world.clients:
        world.verify(name)
    world.verify_idle()


def test_a_vector_comes_with_the_end_and_for_those_alone_who_asked() -> None:
    world = World(prefill_budget=8)
    prompt = random_prompt(20)
    for name, wish in (("a", {"want_vector": True}), ("b", {}), ("c", {"label_ids": (9, 1)})):
        world.submit(name, prompt, max_tokens=1 if wish else 3, **wish)
    finish(world)
    vectors = {name: world.clients[name].tail.vector for name in "abc"}  # type: ignore[union-attr]
    assert [len(unpack(vectors[name])) for name in "abc"] == [4, 0, 2]
    assert world.clients["a"].finish is FinishReason.LENGTH


def test_a_request_that_lost_its_worker_gets_its_vector_from_the_next() -> None:
    world = World()
    world.submit("a", random_prompt(20), max_tokens=1, want_vector=True)
    world.settle_but(FROM_WORKER)
    world.restart_scheduler()
    finish(world)


def test_the_next_step_leaves_before_the_result_of_the_last() -> None:
    world = World()
    world.submit("a", random_prompt(10), max_tokens=6)
    world.settle_but(TO_WORKER)
    (_, first), (_, second) = world.links[TO_WORKER]
    assert isinstance(first, Step)
    assert isinstance(second, Step)
    assert [row.request for row in first.opened] == ["a"]
    assert second.opened == ()
    assert unpack(second.counts).tolist() == [1]
    finish(world)
    assert world.shadow.step == 6, "no step more than tokens: the last one was foreseen"


def test_one_step_at_a_time_where_no_more_is_granted() -> None:
    world = World(max_inflight=1)
    world.submit("a", random_prompt(10), max_tokens=6)
    world.settle_but(TO_WORKER)
    assert len(world.links[TO_WORKER]) == 1
    finish(world)
    assert world.max_inflight == 1


@pytest.mark.parametrize(("elapsed_us", "ahead"), [(7_000, 3), (15_000, 2)])
def test_a_third_step_is_ahead_where_steps_are_short(elapsed_us: int, ahead: int) -> None:
    """Each has waited for the other in flight: it took half of its time."""
    world = World(max_inflight=3)
    world.elapsed_us = elapsed_us
    world.submit("a", random_prompt(10), max_tokens=20)
    world.settle_but(TO_WORKER)
    assert len(world.links[TO_WORKER]) == 2, "nothing is known of how long a step takes"
    finish(world)
    assert world.max_inflight == ahead


def test_near_the_capacity_each_prompt_runs_or_is_refused_at_once() -> None:
    """B125."""
    capacity_len = 512
    for length in range(capacity_len - 32, capacity_len + 3):
        world = World(page_size=16, page_count=capacity_len // 16)
        world.submit("big", random_prompt(length), max_tokens=40)
        world.submit("tiny", random_prompt(3), max_tokens=2)
        world.settle()
        big, tiny = world.clients["big"], world.clients["tiny"]
        assert tiny.finish is FinishReason.LENGTH
        if length + 1 > capacity_len:
            assert big.finish is FinishReason.ERROR
            assert big.tail is not None and big.tail.problem is not None
            assert big.tail.problem.fault is Fault.INVALID
            assert "512" in big.tail.problem.message
        else:
            world.verify("big")
            assert len(big.output) == min(40, capacity_len - length)
        world.verify_idle()


def test_an_output_that_outgrows_the_pool_ends_with_length() -> None:
    """B127."""
    world = World(page_size=16, page_count=32, context_len=2048)
    world.submit("a", random_prompt(400), max_tokens=1000, ignore_eos=True)
    world.submit("b", random_prompt(1000), max_tokens=1)
    world.submit("c", random_prompt(5), max_tokens=4)
    world.settle()
    assert world.clients["a"].finish is FinishReason.LENGTH
    assert len(world.clients["a"].output) == 112
    problem = world.clients["b"].tail.problem  # type: ignore[union-attr]
    assert problem is not None and "KV capacity" in problem.message
    world.verify("a")
    world.verify("c")
    world.verify_idle()


def test_a_prompt_beyond_the_context_or_empty_is_refused() -> None:
    world = World(context_len=32)
    world.submit("long", random_prompt(32))
    world.submit("empty", [])
    world.settle()
    for name in ("long", "empty"):
        tail = world.clients[name].tail
        assert tail is not None and tail.problem is not None
        assert tail.problem.fault is Fault.INVALID
        assert tail.problem.param == "prompt"
    world.verify_idle()


def test_a_stream_gets_a_token_in_every_step_while_prompts_arrive() -> None:
    """B129."""
    world = World(page_count=1000, prefill_budget=8, running_max=8)
    world.submit("stream", random_prompt(4), max_tokens=100)
    while not world.clients["stream"].output:
        world.deliver()
    world.submit("long", random_prompt(400, seed=1), max_tokens=2)
    stream = world.clients["stream"]
    for index in range(60):
        before, step = len(stream.output), world.shadow.step
        if index % 4 == 0:
            world.submit(f"p{index}", random_prompt(8, seed=index + 2), max_tokens=1)
        while world.shadow.step == step:
            world.deliver()
        world.settle_but(TO_WORKER)
        assert len(stream.output) == before + 1
    finish(world)


def test_all_slots_fill_before_anybody_finishes() -> None:
    """B131."""
    world = World(page_count=400, running_max=4, prefill_budget=16)
    for index in range(4):
        world.submit(f"r{index}", random_prompt(48, seed=index), max_tokens=200)
    schedule = world.scheduler_actor.schedule
    while schedule.running_count < 4:
        assert world.deliver()
        assert not any(client.finish for client in world.clients.values())
    finish(world)


@pytest.mark.parametrize("moment", ["queued", "asked", "between chunks", "last chunk", "decoding"])
def test_an_abort_at_any_moment_ends_it_once_and_frees_its_pages(moment: str) -> None:
    """B133: no token after the abort, one terminal tail, all pages back."""
    world = World(page_count=100, prefill_budget=16, running_max=1)
    if moment == "queued":
        world.submit("before", random_prompt(20, seed=9), max_tokens=4)
        world.settle_but(TO_WORKER)
    client = world.submit("a", random_prompt(40), max_tokens=20)
    held = {"queued": TO_WORKER, "asked": FROM_CACHE}.get(moment, FROM_WORKER)
    world.settle_but(held)
    expected = {"queued": State.WAITING, "asked": State.ADMITTING}.get(moment, State.PREFILL)
    assert state_of(world, "a") is expected
    if moment == "last chunk":
        world.only(*FROM_WORKER)
        world.settle_but(FROM_WORKER)
        assert state_of(world, "a") is State.DECODE
    if moment == "decoding":
        while len(client.output) < 3:
            world.deliver()
    told = len(client.output)
    world.cancel("a")
    world.settle_but(FROM_WORKER, FROM_CACHE)
    if moment != "queued":
        assert client.finish is None, "acknowledged before its pages are free"
    world.settle()
    assert client.finish is FinishReason.ABORT
    assert len(client.output) == told
    world.verify_idle()


@pytest.mark.parametrize("name", ["r4", "r5"])
def test_an_abort_while_retracted_ends_it(name: str) -> None:
    world = tight_world()
    while world.scheduler.counters.get("histrio_retractions_total", 0) < 1:
        assert world.deliver()
    # Five need a page for the same step. The last to come gives back three and then needs none
    # itself, which leaves one of the others short: so the last but one goes with it.
    live = world.scheduler_actor.schedule.live.values()
    assert [r.id for r in live if r.was_retracted] == ["r4", "r5"]
    world.cancel(name)
    finish(world)
    assert world.clients[name].finish is FinishReason.ABORT


def test_a_cancel_of_an_unknown_request_or_an_older_attempt_is_ignored() -> None:
    world = World()
    world.submit("a", random_prompt(8), attempt=2)
    world.settle_but(FROM_WORKER)
    for cancel in (Cancel("a", 1), Cancel("b", 1)):
        world.put(PATHS.router, PATHS.scheduler, cancel)
    finish(world)
    assert world.clients["a"].finish is FinishReason.LENGTH


def test_identical_prompts_at_once_equal_the_prompt_alone() -> None:
    """B137, with a third request that allocates at the same time."""
    for round_index in range(20):
        world = World(page_count=60, running_max=3, seed=round_index)
        prompt = random_prompt(13, seed=round_index)
        world.submit("a", prompt, max_tokens=60)
        world.submit("b", prompt, max_tokens=60)
        world.submit("c", random_prompt(11, seed=100 + round_index), max_tokens=60)
        finish(world)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17])
def test_a_prompt_sent_again_gets_the_same_and_is_never_wholly_cached(length: int) -> None:
    """B139 and B141."""
    world = World(page_size=4)
    for turn in range(3):
        world.submit(f"r{turn}", random_prompt(length), max_tokens=5)
        finish(world)
    cached = [world.clients[f"r{turn}"].usage.cached_tokens for turn in range(3)]
    assert cached == [0, (length - 1) // 4 * 4, (length - 1) // 4 * 4]


def test_the_cache_changes_no_output() -> None:
    """B143: three orders, cache on and off."""
    prompts = [random_prompt(4 * (index % 6), seed=1) + [index] for index in range(20)]
    for prefix_cache in (True, False):
        for order_seed in range(3):
            world = World(page_count=80, prefix_cache=prefix_cache, seed=order_seed)
            order = list(enumerate(prompts))
            random.Random(order_seed).shuffle(order)
            for index, prompt in order:
                world.submit(f"r{index}", prompt, max_tokens=20)
            finish(world)
            hits = world.scheduler.counters.get("histrio_cached_tokens_total", 0)
            assert (hits > 0) == prefix_cache


def test_a_prefix_shared_by_many_who_come_together_is_computed_once() -> None:
    world = World(
        page_size=16, page_count=400, running_max=32, prefill_budget=512, context_len=4096
    )
    prefix = random_prompt(512)
    for index in range(32):
        world.submit(f"r{index}", [*prefix, index, 1, 2], max_tokens=1)
    finish(world)
    assert world.shadow.computed_count == 512 + 32 * 3
    assert world.scheduler.counters["histrio_cached_tokens_total"] == 31 * 512


def tight_world(seed: int = 0) -> World:
    """Six streams in a pool that holds about half of them."""
    world = World(page_size=4, page_count=24, running_max=6, seed=seed)
    for index in range(6):
        world.submit(
            f"r{index}",
            random_prompt(8, seed=index),
            max_tokens=30,
            seed=index % 2 * index,
            logprobs=0,
        )
    return world


def test_retraction_neither_repeats_nor_skips() -> None:
    """B145; B179: what a retracted request finds of its own is no hit."""
    world = tight_world()
    finish(world)
    assert world.scheduler.counters["histrio_retractions_total"] > 0
    assert world.scheduler.counters.get("histrio_cached_tokens_total", 0) == 0
    for client in world.clients.values():
        assert client.usage.completion_tokens == client.logprob_count == 30
        assert client.usage.cached_tokens == 0


def test_under_pressure_all_finish_with_little_computed_twice() -> None:
    """B147."""
    world = World(page_size=16, page_count=32, running_max=6, prefill_budget=128)
    world.submit("long", random_prompt(400), max_tokens=60)
    for index in range(5):
        world.submit(f"r{index}", random_prompt(10, seed=index + 1), max_tokens=120)
    finish(world)
    needed = 400 + 60 + 5 * (10 + 120)
    assert world.shadow.computed_count < 2 * needed
    assert world.scheduler.counters.get("histrio_retractions_total", 0) <= 12


def test_a_retracted_request_resumes_before_those_who_came_later() -> None:
    """B149."""
    world = World(page_size=4, page_count=12, running_max=3)
    world.submit("first", random_prompt(16), max_tokens=26)
    world.submit("a", random_prompt(16, seed=1), max_tokens=20)
    while not world.scheduler.counters.get("histrio_retractions_total"):
        assert world.deliver()
    assert world.scheduler_actor.schedule.live["a"].was_retracted
    world.submit("b", random_prompt(4, seed=2), max_tokens=2)
    world.submit("c", random_prompt(4, seed=3), max_tokens=2)
    world.cache_heard.clear()
    finish(world)
    asked = [message.request for message in world.cache_heard if isinstance(message, Acquire)]
    assert asked[0] == "a"


def test_beyond_the_queue_each_request_is_answered() -> None:
    """B155."""
    world = World(running_max=2, queued_max=4, page_count=200)
    for index in range(60):
        world.submit(f"r{index}", random_prompt(8, seed=index), max_tokens=4)
    world.settle()
    refused = []
    for name, client in world.clients.items():
        if client.finish is FinishReason.ERROR:
            assert client.tail is not None and client.tail.problem is not None
            assert client.tail.problem.fault is Fault.OVERLOADED
            assert client.tail.problem.retry_after_s is not None
            assert 1 <= client.tail.problem.retry_after_s <= 60
            refused.append(name)
        else:
            world.verify(name)
    assert 0 < len(refused) <= 54
    world.verify_idle()


def test_all_that_ran_may_come_back_after_a_restart() -> None:
    """The places of those who run count: a full house submitted at once is not refused."""
    world = World(running_max=3, queued_max=5, page_count=300)
    for index in range(8):
        world.submit(f"r{index}", random_prompt(8, seed=index), max_tokens=4)
    while world.only(PATHS.router, PATHS.scheduler):
        pass
    assert len(world.scheduler_actor.schedule.live) == 8
    finish(world)


def test_who_has_had_a_place_is_not_refused_one() -> None:
    """Of two gateways each has as many places as there are: calls that one has taken meanwhile do
    not turn away what the other brings back."""
    world = World(running_max=3, queued_max=5, page_count=300)
    for index in range(8):
        world.submit(f"new{index}", random_prompt(8, seed=index), max_tokens=4)
    for index in range(3):
        world.submit(f"old{index}", random_prompt(8, seed=20 + index), max_tokens=4, attempt=2)
    world.submit("late", random_prompt(8, seed=40), max_tokens=4)
    world.settle()
    ends = {name: client.finish for name, client in world.clients.items()}
    assert {name for name, end in ends.items() if end is FinishReason.ERROR} == {"late"}


def test_counters_are_the_sums_over_requests() -> None:
    """B177."""
    world = World(running_max=2, page_count=100, context_len=64)
    for index in range(5):
        world.submit(f"done{index}", random_prompt(8, seed=index), max_tokens=4)
    world.settle()
    for index in range(5):
        world.submit(f"cut{index}", random_prompt(8, seed=10 + index), max_tokens=40)
        while len(world.clients[f"cut{index}"].output) < 3:
            world.deliver()
        world.cancel(f"cut{index}")
        world.settle()
    world.submit("blocker", random_prompt(8, seed=90), max_tokens=30)
    world.submit("blocker2", random_prompt(8, seed=91), max_tokens=30)
    world.settle_but(FROM_WORKER)
    for index in range(5):
        world.submit(f"queued{index}", random_prompt(8, seed=20 + index), max_tokens=40)
    world.settle_but(FROM_WORKER)
    assert world.scheduler.gauges["histrio_requests_running"] == 2
    assert world.scheduler.gauges["histrio_requests_waiting"] == 5
    for index in range(5):
        world.cancel(f"queued{index}")
    for index in range(2):
        world.submit(f"bad{index}", random_prompt(70), max_tokens=4)
    world.settle()
    ends = [client.finish for client in world.clients.values()]
    assert ends.count(FinishReason.ABORT) == 10
    assert ends.count(FinishReason.ERROR) == 2
    assert ends.count(FinishReason.LENGTH) == 7
    counters = world.scheduler.counters
    outputs = sum(len(client.output) for client in world.clients.values())
    assert counters["histrio_generated_tokens_total"] == outputs
    assert counters["histrio_prompt_tokens_total"] == 12 * 8, "those admitted, once each"
    world.verify_idle()


def test_a_stop_string_ends_it_and_later_tokens_are_nobodys() -> None:
    world = World()
    prompt = random_prompt(10)
    output = continuation(prompt, 20)
    client = world.submit("a", prompt, max_tokens=20, stop_token=output[4])
    finish(world)
    assert client.stopped_at == output.index(output[4]) + 1
    assert client.finish is FinishReason.STOP
    assert client.usage.completion_tokens == client.stopped_at


def test_a_resumed_attempt_goes_on_where_the_client_is() -> None:
    prompt = random_prompt(10)
    output = continuation(prompt, 12)
    for count in range(13):
        world = World()
        client = world.submit("a", prompt, max_tokens=12, emitted=output[:count], attempt=2)
        finish(world)
        assert client.output == output
        assert client.open is not None and client.open.emitted == pack(output[:count])
        assert client.usage.completion_tokens == 12


def test_a_higher_attempt_replaces_the_one_that_runs() -> None:
    world = World(page_count=100)
    prompt = random_prompt(10)
    old = world.submit("a", prompt, max_tokens=30)
    while len(old.output) < 4:
        world.deliver()
    world.settle_but(FROM_WORKER)
    new = make_submit("a", prompt, emitted=old.output[:3], attempt=2, sampling=old.submit.sampling)
    ends: list[tuple[int, FinishReason]] = []
    joined = list(old.output[:3])

    def note(message: Tokens) -> None:
        for tail in message.rows:
            if tail.attempt == 2:
                joined.extend(unpack(tail.tokens))
            if tail.finish is not None:
                ends.append((tail.attempt, tail.finish))

    world.read = note  # type: ignore[method-assign]
    world.put(PATHS.router, PATHS.scheduler, new)
    world.put(PATHS.router, PATHS.scheduler, old.submit)  # late: older than what runs
    world.settle()
    assert sorted(ends) == [(1, FinishReason.ABORT), (2, FinishReason.LENGTH)]
    assert joined == continuation(prompt, 30)
    world.verify_idle()


def test_results_of_an_earlier_life_are_dropped() -> None:
    world = World()
    client = world.submit("a", random_prompt(6), max_tokens=5)
    world.settle_but(FROM_WORKER)
    world.scheduler.tell(StepDone(99, 1, pack([0]), pack([7])))
    world.scheduler.tell(StepFailed(99, 1, pack([0]), "late"))
    world.collect()
    finish(world)
    assert client.finish is FinishReason.LENGTH


def test_a_step_that_fails_ends_those_at_fault_and_no_others() -> None:
    world = World(page_count=200, running_max=3)
    for index in range(3):
        world.submit(f"r{index}", random_prompt(10, seed=index), max_tokens=12)
    world.failures = lambda step: [unpack(step.slots)[0]] if step.step == 7 else []
    finish(world)
    ends = [client.finish for client in world.clients.values()]
    assert ends.count(FinishReason.ERROR) == 1
    (guilty,) = world.guilty
    tail = world.clients[guilty].tail
    assert tail is not None and tail.problem is not None
    assert tail.problem.fault is Fault.OVERLOADED and tail.problem.code == "out_of_memory"


def test_a_row_for_which_there_is_no_memory_ends_its_request_alone() -> None:
    world = World(page_count=200, running_max=3)
    for index in range(3):
        world.submit(f"r{index}", random_prompt(10, seed=index), max_tokens=12)
    world.spoiled = lambda step: [unpack(step.slots)[0]] if step.step == 7 else []
    work = world.work

    def starving(step: Step) -> StepDone | StepFailed:
        answer = work(step)
        if isinstance(answer, StepDone):
            answer = msgspec.structs.replace(answer, starved=answer.failed)
        return answer

    world.work = starving  # type: ignore[method-assign]
    finish(world)
    ends = [client.finish for client in world.clients.values()]
    assert ends.count(FinishReason.ERROR) == 1 and ends.count(FinishReason.LENGTH) == 2
    (guilty,) = world.guilty
    tail = world.clients[guilty].tail
    assert tail is not None and tail.problem is not None
    assert tail.problem.code == "out_of_memory" and tail.problem.retry_after_s


def test_a_row_that_is_no_number_ends_its_request_alone() -> None:
    world = World(page_count=200, running_max=3)
    for index in range(3):
        world.submit(f"r{index}", random_prompt(10, seed=index), max_tokens=12)
    world.spoiled = lambda step: [unpack(step.slots)[0]] if step.step == 7 else []
    finish(world)
    assert [c.finish for c in world.clients.values()].count(FinishReason.ERROR) == 1


def test_a_prompt_whose_last_chunk_is_no_number_shares_nothing_of_it() -> None:
    world = World(page_size=4, prefill_budget=8, max_inflight=1)
    prompt = random_prompt(16)
    world.submit("a", prompt, max_tokens=4)
    world.spoiled = lambda step: list(unpack(step.slots)) if step.step == 2 else []
    finish(world)
    assert world.clients["a"].finish is FinishReason.ERROR
    assert world.cache_actor.ledger.counts().cached == 2, "the first chunk was good"
    world.submit("b", prompt, max_tokens=4)
    finish(world)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_what_a_failed_step_was_to_compute_is_not_shared(is_cancelled: bool) -> None:
    """By another's fault. Whether it goes on or ends, its pages hold less than was planned."""
    world = World(page_size=1, prefill_budget=32, max_inflight=1)
    prompt = random_prompt(12)
    world.submit("first", random_prompt(3, seed=2), max_tokens=4)
    world.settle_but(TO_WORKER)
    world.submit("a", prompt, max_tokens=4)
    world.submit("b", random_prompt(4, seed=1), max_tokens=4)
    world.settle_but(TO_WORKER)
    world.only(*TO_WORKER)
    world.settle_but(TO_WORKER)  # the second step has rows of all three
    if is_cancelled:
        world.cancel("a")
        world.settle_but(TO_WORKER)
    slot = world.scheduler_actor.schedule.live["b"].slot
    assert slot is not None
    world.failures = lambda step: [slot] if step.step == 2 else []
    finish(world)
    assert world.guilty == {"b"}
    world.submit("c", prompt, max_tokens=4)
    finish(world)


def test_a_deferral_that_crosses_what_it_waits_for_is_asked_again() -> None:
    world = World(page_size=4, prefill_budget=8, page_count=100)
    prompt = random_prompt(9)
    world.submit("a", prompt, max_tokens=40)
    world.settle_but(TO_WORKER)
    world.submit("b", prompt, max_tokens=2)
    world.settle_but(TO_WORKER, FROM_CACHE)
    assert state_of(world, "b") is State.ADMITTING
    world.only(*TO_WORKER)
    world.settle_but(TO_WORKER, FROM_CACHE)  # a has shared both pages, b does not know yet
    world.only(*FROM_CACHE)
    assert state_of(world, "b") is State.ADMITTING, "it waits for what has happened already"
    while world.clients["b"].finish is None:
        world.deliver()
    assert world.clients["a"].finish is None
    finish(world)


def test_requests_of_a_dead_gateway_are_ended() -> None:
    world = World(page_count=100, running_max=1)
    world.submit("a", random_prompt(10), max_tokens=50)
    world.submit("b", random_prompt(10, seed=1), max_tokens=50)
    for client in world.clients.values():
        client.is_cancelled = True
    world.settle_but(FROM_WORKER)
    schedule = world.scheduler_actor.schedule
    schedule.lose(Address("front", PATHS.gateway, 7))
    assert len(schedule.live) == 2, "another gateway's death is not theirs"
    schedule.lose(GATEWAY)
    world.scheduler_actor._go_on()
    world.collect()
    finish(world)
    assert all(c.finish is FinishReason.ABORT for c in world.clients.values())


def test_a_lost_message_to_a_living_peer_is_a_crash_and_to_a_dead_one_is_not() -> None:
    world = World()
    address = Address("engine", PATHS.cache, 1)
    world.scheduler.undelivered(Undelivered(address, "Acquire", Cause.NOBODY))
    with pytest.raises(RuntimeError):
        world.scheduler.undelivered(Undelivered(address, "Acquire", Cause.FULL))


def test_pages_are_released_only_when_no_step_in_flight_touches_them() -> None:
    world = World(page_count=50)
    output = continuation(random_prompt(6), 20)
    world.submit("a", random_prompt(6), max_tokens=20, stop_ids=(output[2],))
    while not world.clients["a"].finish:
        world.only(*FROM_WORKER)
        world.settle_but(FROM_WORKER)
    schedule = world.scheduler_actor.schedule
    assert [request.id for request in schedule.leases.retiring] == ["a"], (
        "one wasted row is in flight"
    )
    assert world.cache_actor.ledger.counts().leased > 0
    finish(world)


def test_a_config_that_nobody_has_settled_is_our_bug() -> None:
    facts = ShadowWorker(page_count=8, page_size=16).facts
    with pytest.raises(AssertionError, match="not settled"):
        Schedule(SchedulerConfig(), facts, epoch=1)


def test_what_an_earlier_gateway_sent_is_not_taken_by_a_later_scheduler() -> None:
    """It was on its way while both died: nobody would ever cancel it."""
    notes = {PATHS.worker: msgspec.msgpack.encode(ShadowWorker(page_count=8, page_size=16).facts)}
    config = SchedulerConfig(policy="fcfs", running_max=4, prefill_budget=64)
    actor = Scheduler(config, CacheConfig(), PATHS)
    cell = Cell(actor, path=PATHS.scheduler, notes=notes)
    cell.target(PATHS.gateway).incarnation = 5
    cell.start()
    old, present = (Address("front", PATHS.gateway, incarnation) for incarnation in (4, 5))
    cell.tell(msgspec.structs.replace(make_submit("a"), reply_to=old))
    assert not actor.schedule.live and not cell.take()
    cell.tell(msgspec.structs.replace(make_submit("b"), reply_to=present))
    assert list(actor.schedule.live) == ["b"]


def test_a_single_question_goes_to_the_cache_for_each_admission() -> None:
    """Decode asks for pages in advance, never a step at a time."""
    shadow = ShadowWorker(page_count=256, page_size=16)
    notes = {PATHS.worker: msgspec.msgpack.encode(shadow.facts)}
    config = SchedulerConfig(policy="fcfs", running_max=4, prefill_budget=64)
    cell = Cell(
        Scheduler(config, CacheConfig(), PATHS),
        path=PATHS.scheduler,
        notes=notes,
    )
    cell.start()
    cell.tell(make_submit("a", random_prompt(20)))
    ((target, asked),) = cell.take()
    assert (target, type(asked)) == (PATHS.cache, Acquire)
    cell.tell(Acquired("a", 1, 0, pack([5, 6])))
    sent = [message for _, message in cell.take()]
    assert [type(message) for message in sent] == [Reserve, Step, Step]
    steps = [message for message in sent if isinstance(message, Step)]
    done = 0
    while steps:
        step = steps.pop(0)
        cell.tell(shadow.execute(step))
        sent = [message for _, message in cell.take()]
        steps += [message for message in sent if isinstance(message, Step)]
        done += 1
        others = {type(m) for m in sent} - {Step, Tokens}
        if 1 < done < 8:
            assert others == set(), "the cache is asked within decode"
    assert done == 8
    cell.tell(StopMet("a", 1, 3))
    assert [type(m) for _, m in cell.take()] == []


def test_release_names_what_was_computed() -> None:
    world = World(page_size=4)
    prompt = random_prompt(6)
    client = world.submit("a", prompt, max_tokens=7)
    finish(world)
    (release,) = [message for message in world.cache_heard if isinstance(message, Release)]
    # The last token was never fed back, so its KV does not exist.
    assert list(unpack(release.tokens)) == (prompt + client.output)[:-1]
