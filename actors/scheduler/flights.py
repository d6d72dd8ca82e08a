"""This file keeps the steps that are with the worker, and puts a plan into the form of the wire.

It does not know why a plan is what it is, nor what becomes of the tokens. A `Step` is a delta: only
what the worker can't know is in it. A flight remembers whose row was whose, since by the time its
result is here, a slot may have another tenant.

Laws: results come back in the order of the steps; each step is answered once, and costs one of the
worker's credits, which its answer gives back, so that no more are in flight than it grants.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator

from actors.runtime.credit import Account
from actors.scheduler.planner import Plan
from actors.scheduler.request import Request
from messages.types import Float32s, Int32s, Logprob, pack, unpack
from messages.worker import Row, Step, StepDone, StepFailed

ONE = pack([1])


class Flight:
    """One step on its way. `rows` is aligned with its slots; None: the row has been given up."""

    __slots__ = ("counts", "prefills", "rows", "sent_s", "slots", "step")

    def __init__(
        self,
        step: int,
        rows: list[Request | None],
        prefills: list[tuple[Request, int, int]],
        slots: Int32s,
        counts: Int32s,
        sent_s: float,
    ) -> None:
        self.step = step
        self.rows = rows
        self.prefills = prefills  # and [begin, end) of what is computed
        self.slots = slots
        self.counts = counts
        self.sent_s = sent_s


# Whose it is, a token, the token again as it travels on, its log probability, a vector.
Sampled = tuple[Request, int, Int32s, Logprob | None, Float32s]


class Flights:
    """The steps in flight, oldest first."""

    def __init__(self, epoch: int, window: int) -> None:
        """`window`: how many steps may be in flight."""
        self.epoch = epoch
        self.credit = Account(window, epoch)  # a step's number is that of its credit
        self.done_step = 0  # the last one answered
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def may_send(self) -> bool:
        return self.credit.left > 0

    def is_touched(self, request: Request) -> bool:
        """Whether a step in flight reads or writes its pages."""
        return request.last_step is not None and request.last_step > self.done_step

    def send(self, plan: Plan, grown: list[tuple[int, int]], closed: Int32s, now_s: float) -> Step:
        """Makes the step of `plan`; `grown` are (slot, page). Advances the plan's requests."""
        step = self.credit.spend()
        opened: list[Row] = []
        rows: list[Request | None] = []
        slots = array("i")
        for request in plan.decodes:
            request.planned_len += 1
            request.last_step = step
            slots.append(request.slot)  # type: ignore[arg-type]
        rows.extend(plan.decodes)
        counts = ONE * len(rows)
        prefills: list[tuple[Request, int, int]] = []
        for request, count in plan.prefills:
            assert request.slot is not None
            if not request.is_opened:
                request.is_opened = True
                opened.append(_row(request))
            begin = request.planned_len
            request.planned_len += count
            request.last_step = step
            prefills.append((request, begin, request.planned_len))
            rows.append(request)
            slots.append(request.slot)
        counts += pack(count for _, count in plan.prefills)
        packed = slots.tobytes()
        self._flights.append(Flight(step, rows, prefills, packed, counts, now_s))
        return Step(
            epoch=self.epoch,
            step=step,
            slots=packed,
            counts=counts,
            opened=tuple(opened),
            closed=closed,
            grown_slots=pack(slot for slot, _ in grown),
            grown_pages=pack(page for _, page in grown),
        )

    def is_current(self, message: StepDone | StepFailed) -> bool:
        """False: the answer to a step of an earlier life of the scheduler."""
        return message.epoch == self.epoch

    def land(self, message: StepDone | StepFailed) -> Flight:
        """Takes out the step that `message` answers."""
        flight = self._flights.popleft()
        assert flight.step == message.step, f"{message.step} answered, {flight.step} was due"
        self.done_step = flight.step
        self.credit.grant(flight.step + self.credit.window, self.epoch)
        return flight

    def give_up(self, request: Request, failed: Flight) -> None:
        """The rows of `request` in `failed` and in all later steps count for nothing: what they
        would compute rests on a step that did not run."""
        for flight in (failed, *self._flights):
            for index, row in enumerate(flight.rows):
                if row is request:
                    flight.rows[index] = None
                    request.planned_len -= unpack(flight.counts)[index]
            flight.prefills = [entry for entry in flight.prefills if entry[0] is not request]

    def check(self) -> None:
        """Asserts the laws."""
        self.credit.check()
        steps = [flight.step for flight in self._flights]
        expected = list(range(self.done_step + 1, self.credit.spent + 1))
        assert steps == expected, f"{steps} in flight, not {expected}"
        assert len(steps) == self.credit.in_flight, (
            f"{steps} in flight, by its credits {self.credit.in_flight}"
        )


def rows_of(flight: Flight, slots: Int32s) -> list[Request | None]:
    """Whose the slots of a result are."""
    if slots == flight.slots:
        return flight.rows
    by_slot = dict(zip(unpack(flight.slots), flight.rows, strict=True))
    return [by_slot[slot] for slot in unpack(slots)]


def sampled(flight: Flight, message: StepDone) -> Iterator[Sampled]:
    """The tokens of a result, of those rows that have not been given up."""
    rows = rows_of(flight, message.slots)
    tokens = unpack(message.tokens)
    assert len(tokens) == len(rows), f"{len(tokens)} tokens for {len(rows)} rows"
    logprobs = message.logprobs or (None,) * len(rows)
    vectors = vectors_of(message) if message.vectors else (b"",) * len(rows)
    packed = message.tokens
    for index, (request, token, logprob, vector) in enumerate(
        zip(rows, tokens, logprobs, vectors, strict=True)
    ):
        if request is not None:
            yield request, token, packed[4 * index : 4 * index + 4], logprob, vector


def vectors_of(message: StepDone) -> list[Float32s]:
    """One for each of its slots; empty for those that did not ask."""
    by_slot = {vector.slot: vector.values for vector in message.vectors}
    return [by_slot.get(slot, b"") for slot in unpack(message.slots)]


def _row(request: Request) -> Row:
    assert request.slot is not None
    return Row(
        slot=request.slot,
        request=request.id,
        tokens=request.tokens.tobytes(),
        prompt_len=request.prompt_len,
        cached_len=request.cached_len,
        pages=request.pages,
        sampling=request.sampling,
        grammar=request.grammar,
    )
