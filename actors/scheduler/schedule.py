"""This file is the scheduler's core: all requests of one replica, from submission to their end.

It does not know actors, clocks or the wire: messages come in as values with the time as an
argument, and what is to be sent is collected in an `Output`. After any event its owner calls
`pump`, which sends what can be sent.

    submit ─▶ admission ─▶ asking ─▶ prefilling ─▶ decoding ─▶ (leave) ─▶ retiring ─▶ settled
                  ▲                                    │
                  └────────────── retracted ───────────┘

Who has a slot is kept by `running.py`, whose pages are where by `leases.py`, who waits by
`admission.py`. Law: a request ends in exactly one terminal tail.
"""

from __future__ import annotations

import math
from array import array

from msgspec import structs

from actors.scheduler import finish, jump
from actors.scheduler.admission import Admission, Pace
from actors.scheduler.flights import Flights, rows_of, sampled
from actors.scheduler.leases import Leases
from actors.scheduler.output import News, Output
from actors.scheduler.planner import Plan, choose_victims, plan
from actors.scheduler.queue import POLICIES
from actors.scheduler.request import Event, Request, State
from actors.scheduler.reserve import Reserve
from actors.scheduler.running import Running
from messages.base import Address
from messages.config import SchedulerConfig
from messages.detokenizer import Tail
from messages.scheduler import Acquired, Cancel, Deferred, Granted, Probed, StopMet, Submit
from messages.types import FinishReason, Problem, pack, unpack
from messages.worker import Facts, StepDone, StepFailed

AHEAD = 2  # steps in flight, whatever they take: one computes, the next one is there
SHORT_STEP_S = 0.004


class Schedule:
    """The state of one scheduler. `epoch`: which life of it this is."""

    def __init__(self, config: SchedulerConfig, facts: Facts, *, epoch: int) -> None:
        assert config.running_max and config.prefill_budget, "not settled: nobody would ever run"
        self.config = config
        self.facts = facts
        self.page_size = facts.page_size
        self.capacity_len = facts.page_count * facts.page_size
        self.depth = max(1, min(config.max_inflight, facts.credits))
        self._step_s = math.inf  # what the last step took
        self.output = Output()
        self.live: dict[str, Request] = {}  # all that are not done
        self.admission = Admission(POLICIES.get(config.policy)())
        self.flights = Flights(epoch, self.depth)
        self.reserve = Reserve(facts.page_size)
        self.running = Running(config.running_max, facts.page_size)
        self.leases = Leases(
            self.output, self.admission, self.flights, self.reserve, facts.page_size
        )
        self._eos_ids = frozenset(facts.eos_ids)
        self.is_paused = False
        self._retracts = False  # while paused: whoever comes to run goes back
        self._arrival = 0
        self._pace = Pace()

    # What arrives

    def submit(self, message: Submit, now_s: float) -> None:
        if not self.supersede(message):
            return  # a repetition, or older than what runs
        problem = self._refusal(message)
        if problem is not None:
            self.output.refuse(message, problem)
            return
        self._arrival += 1
        request = Request(
            message,
            mail=self.output.mail(message.reply_to.path),
            arrival=self._arrival,
            now_s=now_s,
            limit_len=min(self.facts.context_len, self.capacity_len),
            eos_ids=self._eos_ids,
        )
        self.live[request.id] = request
        self.admission.wait(request)
        over = finish.finish_of(request)
        if over is not None:
            # Nothing is left to do: a resumed attempt whose end alone was lost, or no output asked.
            self._close(request)
            self.output.end(request, over[0], matched=over[1])

    def supersede(self, message: Submit) -> bool:
        """Ends an older attempt of the request. False: what is known of it is not older."""
        known = self.live.get(message.request)
        if known is not None:
            if known.attempt >= message.attempt:
                return False
            self._abort(known)
        return True

    def cancel(self, message: Cancel) -> None:
        """Unknown requests have had their terminal message already."""
        request = self.live.get(message.request)
        if request is not None and request.attempt == message.attempt:
            self._abort(request)

    def unknown(self, rows: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        """Those (request, attempt) that nothing more will come of."""

        def is_known(name: str, attempt: int) -> bool:
            request = self.live.get(name)
            return request is not None and request.attempt == attempt

        return tuple(row for row in rows if not is_known(*row))

    def stop_met(self, message: StopMet) -> None:
        """The text is complete; tokens past `token_count` were computed for nothing."""
        request = self.live.get(message.request)
        if request is not None and request.attempt == message.attempt:
            self._close(request)
            self.output.end(request, FinishReason.STOP, completion_tokens=message.token_count)

    def acquired(self, message: Acquired, now_s: float) -> None:
        request = self.admission.acquired(message.request, message.attempt)
        if request.state is State.DONE:
            self.leases.let_go(request, b"")
            return
        self.running.enter(request, message.pages, message.cached_len)
        facts = {
            "slot": request.slot,
            "cached": message.cached_len,
            "pages": request.page_count,
        }
        self.output.news.append(News("admitted", request.id, facts))
        if not request.admitted_once:
            request.admitted_once = True
            if request.resumed_len == 0:
                # A resumed attempt reads its own prefix again: no hit, and no new prompt.
                request.cached_tokens = message.cached_len
                self.output.prompt_tokens += request.prompt_len
                self.output.cached_tokens += request.cached_tokens
            self.output.queue_s.append(now_s - request.arrived_s)

    def deferred(self, message: Deferred) -> None:
        request = self.admission.deferred(message)
        if request.state is State.DONE:
            self.leases.acknowledge(request)
        else:
            self.admission.wait_again(request, message.behind)

    def granted(self, message: Granted) -> None:
        self.reserve.add(list(unpack(message.pages)))

    def freed(self) -> None:
        self.reserve.hint()
        self.admission.freed()

    def pause(self, *, retract: bool) -> None:
        """No step is launched and nobody let in until `resume`. With `retract` those who run go
        back to waiting, and their pages to the cache."""
        self.is_paused = True
        self._retracts = retract

    def resume(self) -> None:
        self.is_paused = self._retracts = False

    def probed(self, message: Probed) -> None:
        self.admission.probed(message.cached_lens)

    def step_done(self, message: StepDone, now_s: float) -> None:
        if not self.flights.is_current(message):
            return
        # It has waited for those before it, of which as many were sent as are behind it now.
        self._step_s = message.elapsed_us / 1e6 / len(self.flights)
        flight = self.flights.land(message)
        self.output.landed.append((message.elapsed_us / 1e6, len(flight.rows)))
        if message.failed:
            refused, starved = set(unpack(message.refused)), set(unpack(message.starved))
            slots = unpack(message.failed)
            for slot, request in zip(slots, rows_of(flight, message.failed), strict=True):
                if request is None:
                    continue
                if slot in starved:
                    self._fail(request, finish.starved())
                else:
                    self._fail(request, finish.unbounded(request) if slot in refused else None)
        self.leases.commit(flight)
        for part in message.prompts:
            (request,) = rows_of(flight, pack([part.slot]))
            if request is not None and request.state is not State.DONE:
                self.output.tell_prompt(request, part)
        count = 0
        done = State.DONE  # read once: a member's name is looked up by a call (Python 3.11)
        for request, token, packed, logprob, vector in sampled(flight, message):
            if request.state is done:
                continue
            count += 1
            tokens = request.tokens
            tokens.append(token)
            if not request.is_announced:
                self.output.announce(request)
            index = len(tokens) - request.prompt_len - 1
            logprobs = () if logprob is None else (logprob,)
            if len(tokens) < request.limit_len and token not in request.stop_ids:
                request.mail.rows.append(Tail(request.id, request.attempt, index, packed, logprobs))
                continue
            over = finish.finish_of(request)
            if over is None:
                request.mail.rows.append(Tail(request.id, request.attempt, index, packed, logprobs))
                continue
            reason, matched = over
            usage = finish.usage_of(request)
            request.mail.rows.append(
                Tail(
                    request.id,
                    request.attempt,
                    index,
                    packed,
                    logprobs,
                    reason,
                    matched,
                    usage,
                    vector=vector,  # who asks for one ends with its first token
                )
            )
            self._pace.ended(now_s)
            self._close(request)
        for request, forced in jump.jumped(flight, message):
            if request.state is not State.DONE:
                count += self._jump(request, forced, now_s)
        self.output.generated_tokens += count
        self.leases.settle_retiring()

    def _jump(self, request: Request, forced: array[int], now_s: float) -> int:
        """Takes in tokens that a grammar forces; returns how many."""
        tail, over = jump.take(request, forced)
        count = len(tail.tokens) // 4
        if over is not None:
            usage = finish.usage_of(request)
            tail = structs.replace(tail, finish=over[0], matched=over[1], usage=usage)
            self._pace.ended(now_s)
            self._close(request)
        elif request.state is State.DECODE and request.planned_len < len(request.tokens) - 1:
            self.running.jumped(request)
        request.mail.rows.append(tail)
        return count

    def step_failed(self, message: StepFailed) -> None:
        """The rows at fault end with an error; the others of the step are computed again."""
        if not self.flights.is_current(message):
            return
        flight = self.flights.land(message)
        guilty = {id(request) for request in rows_of(flight, message.slots)}
        for request in list(flight.rows):
            if request is None:
                continue
            self.flights.give_up(request, flight)
            if id(request) in guilty:
                self._fail(request, finish.starved())
            elif request.is_running:
                self._retract(request)
        self.leases.settle_retiring()

    def lose(self, gateway: Address) -> None:
        """Nobody is left to read what these requests make."""
        for request in list(self.live.values()):
            if request.reply_to == gateway:
                self._abort(request)

    # What follows

    def pump(self, now_s: float) -> None:
        """Sends the steps, and asks for the pages, that the present state allows."""
        if self._retracts:
            for request in self.running.all():
                self.output.retraction_count += 1
                self._retract(request)
        self.leases.replenish(len(self.running))
        if self.is_paused:
            return
        while self.flights.may_send and self._may_be_ahead():
            planned = self._plan()
            if planned.is_empty:
                break
            self._launch(planned, now_s)
        self.leases.replenish(len(self.running))
        while self._may_admit():
            question = self.admission.next()
            if question is None:
                break
            self.output.to_cache.append(question)

    @property
    def running_count(self) -> int:
        return len(self.running)

    @property
    def used_len(self) -> int:
        """Tokens that the pages of those who run have room for."""
        return self.running.used_len

    @property
    def waiting_len(self) -> int:
        """Tokens of those who have no slot."""
        return sum(len(request.tokens) for request in self.live.values() if request.slot is None)

    def _may_be_ahead(self) -> bool:
        """Whether one more step may be in flight than computes and waits. Where steps are shorter
        than the way of an answer and of the next order, the device would wait; where they are
        longer, only who comes new would."""
        return len(self.flights) < AHEAD or self._step_s < SHORT_STEP_S

    def _plan(self) -> Plan:
        planned = self._plan_once()
        if planned.stalled and self.reserve.is_dry and not self.leases.retiring:
            running = self.running.all()
            for victim in choose_victims(running, planned.stalled, self.page_size):
                self.output.retraction_count += 1
                facts = {"generated": victim.output_len}
                self.output.news.append(News("retracted", victim.id, facts))
                self._retract(victim)
            planned = self._plan_once()
        return planned

    def _plan_once(self) -> Plan:
        return plan(
            self.running.decoding.values(),
            self.running.prefilling.values(),
            self.running.jumping.values(),
            budget=self.config.prefill_budget,
            page_size=self.page_size,
            spare_count=len(self.reserve),
        )

    def _launch(self, planned: Plan, now_s: float) -> None:
        grown = [self.running.grow(request, self.reserve.spend()) for request in planned.grown]
        closed = self.running.take_closed()
        self.output.steps.append(self.flights.send(planned, grown, closed, now_s))
        self.running.planned(planned.prefills)

    def _may_admit(self) -> bool:
        """Whether one more request would have a slot, and soon a step to run in."""
        asking = self.admission.asking
        if len(asking) >= len(self.running.free_slots) or self.reserve.is_short:
            return False
        if len(self.admission.queue) == 0:
            return False
        # Pages leased long before they are computed would be taken from those who decode.
        backlog = self.running.backlog_len + sum(len(r.tokens) for r in asking.values())
        return backlog < self.depth * self.config.prefill_budget

    def _refusal(self, message: Submit) -> Problem | None:
        prompt_len = len(message.prompt) // 4
        if prompt_len == 0:
            return finish.empty_prompt()
        if prompt_len + 1 > self.facts.context_len:
            return finish.beyond_context(prompt_len, self.facts.context_len)
        if prompt_len + 1 > self.capacity_len:
            return finish.too_long(prompt_len, self.capacity_len)
        # Slots count as places too. Who was let in before and lost with a part has had its place:
        # gateways have no more of them than there are, each.
        places = self.config.queued_max + self.config.running_max
        if len(self.live) >= places and message.attempt == 1:
            waiting_count = len(self.live) - len(self.running)
            return finish.overloaded(waiting_count, self._pace.retry_after_s(waiting_count))
        return None

    # Ends and ways out

    def _abort(self, request: Request) -> None:
        """Its terminal tail follows when its pages are free."""
        request.is_acknowledged = False
        self._close(request)
        if not request.is_retiring and (request.id, request.attempt) not in self.admission.asking:
            self.leases.acknowledge(request)

    def _fail(self, request: Request, problem: Problem | None = None) -> None:
        """What it has computed is void, also when it has ended meanwhile for another reason."""
        request.is_poisoned = True
        if request.state is not State.DONE:
            self._close(request)
            problem = problem or finish.not_computed()
            self.output.end(request, FinishReason.ERROR, problem=problem)

    def _close(self, request: Request) -> None:
        """The request is done. Whoever calls this sees to its one terminal tail."""
        was = request.state
        request.advance(Event.END)
        del self.live[request.id]
        if was is State.PREFILL or was is State.DECODE:
            self._leave(request)
        elif was is State.WAITING and not request.is_retiring:
            self.admission.remove(request)

    def _retract(self, request: Request) -> None:
        """Back to waiting, in its old place; what steps in flight bring of it still counts."""
        request.advance(Event.RETRACT)
        request.was_retracted = True
        request.overtaken_count = 0
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Gives up the slot now, and the pages as soon as no step in flight touches them."""
        self.running.leave(request)
        self.leases.retire(request)

    def check(self) -> None:
        """Asserts the laws. O(requests)."""
        self.admission.check()
        self.flights.check()
        self.reserve.check()
        self.running.check()
        self.leases.check()
        waiting = {id(request) for request in self.admission.waiting()}
        asking = {id(request) for request in self.admission.asking.values()}
        retiring = {id(request) for request in self.leases.retiring}
        for name, request in self.live.items():
            assert request.id == name
            assert request.state is not State.DONE, f"{name} is done and alive"
            request.check(self.page_size)
            is_waiting = request.state is State.WAITING
            assert (id(request) in waiting) == (is_waiting and not request.is_retiring), name
            assert (id(request) in asking) == (request.state is State.ADMITTING), name
            if request.is_retiring:
                assert is_waiting, f"{name} runs while its pages are taken from it"
        assert waiting <= {id(request) for request in self.live.values()}, "one who is done waits"
        for request in self.running.all():
            assert self.live.get(request.id) is request, f"{request.id} runs and is not alive"
            assert id(request) not in retiring, f"{request.id} runs and leaves"
