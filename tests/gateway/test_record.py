"""The record of open requests: what is taken, dropped, interrupted and sent again."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.gateway.call import Call, Prompt, check_encodes, run_encodes
from actors.gateway.record import (
    CANCEL_WAIT_S,
    LOSSES_MAX,
    RETRY_MAX_S,
    Ledger,
    Record,
    Stage,
    Verdict,
)
from messages.base import Address
from messages.gateway import Delta, Encoded, Failed
from messages.tokenizer import Cancel, Encode
from messages.types import Fault, FinishReason, Problem, pack, unpack

HERE = Address("test", "gateway", 1)


def opened(ledger: Ledger, name: str = "c", *, is_check: bool = False) -> Record:
    call = Call(prompts=(Prompt(text="x"),))
    encode = (check_encodes if is_check else run_encodes)(call, name, HERE)[0]
    record = Record(encode, name, 0, 0.0)
    ledger.add(record)
    ledger.send(record, 0.0)
    return record


def delta(
    record: Record,
    index: int,
    *ids: int,
    attempt: int | None = None,
    finish: FinishReason | None = None,
) -> Delta:
    return Delta(
        request=record.request,
        attempt=record.attempt if attempt is None else attempt,
        index=index,
        token_count=len(ids),
        text="t" * len(ids),
        token_ids=pack(ids),
        finish=finish,
    )


def test_tokens_are_taken_once_and_in_order() -> None:
    ledger = Ledger()
    record = opened(ledger)
    assert ledger.take(delta(record, 0, 7, 8), 1.0)[0] is Verdict.TAKEN
    assert ledger.take(delta(record, 0, 7, 8), 1.0)[0] is Verdict.DROPPED
    assert ledger.take(delta(record, 1, 8), 1.0)[0] is Verdict.DROPPED
    assert ledger.take(delta(record, 2, 9), 1.0)[0] is Verdict.TAKEN
    assert list(unpack(bytes(record.emitted))) == [7, 8, 9]


def test_a_gap_is_reported_and_takes_nothing() -> None:
    ledger = Ledger()
    record = opened(ledger)
    assert ledger.take(delta(record, 1, 8), 1.0)[0] is Verdict.LOST
    assert ledger.take(delta(record, 5, finish=FinishReason.STOP), 1.0)[0] is Verdict.LOST
    assert record.token_count == 0 and len(ledger) == 1


def test_a_request_ends_once() -> None:
    ledger = Ledger()
    record = opened(ledger)
    assert ledger.take(delta(record, 0, finish=FinishReason.STOP), 1.0)[0] is Verdict.TAKEN
    assert ledger.take(delta(record, 0, finish=FinishReason.STOP), 1.0) == (Verdict.DROPPED, None)
    problem = Problem(fault=Fault.INTERNAL, message="x")
    assert ledger.failed(Failed(record.request, 1, problem)) is None
    assert len(ledger) == 0 and ledger.dropped_count == 2


def test_a_resumed_request_is_cancelled_and_sent_with_what_was_taken() -> None:
    ledger = Ledger()
    record = opened(ledger)
    ledger.take(delta(record, 0, 7, 8), 1.0)
    assert ledger.interrupt(ledger, 2.0, blames=True).parked == [record]
    # What the lost attempt had sent before is still good, until the next attempt leaves.
    assert ledger.take(delta(record, 2, 9), 2.5)[0] is Verdict.TAKEN
    cancel, encode = ledger.send(record, 3.0)
    assert cancel == Cancel(record.request, 1)
    assert isinstance(encode, Encode)
    assert (encode.attempt, list(unpack(encode.emitted))) == (2, [7, 8, 9])
    assert encode.sampling == record.encode.sampling
    assert ledger.take(delta(record, 3, 1, attempt=1), 4.0) == (Verdict.DROPPED, None)
    assert ledger.take(delta(record, 3, 1), 4.0)[0] is Verdict.TAKEN


def test_a_request_that_is_alone_at_two_deaths_is_given_up() -> None:
    ledger = Ledger()
    record = opened(ledger)
    assert ledger.interrupt(ledger, 1.0, blames=True).parked == [record]
    ledger.send(record, 1.0)
    assert ledger.interrupt(ledger, 1.0, blames=True).given_up == [record]
    assert len(ledger) == 0


def test_what_nobody_died_of_is_tried_again_after_a_growing_while() -> None:
    ledger = Ledger()
    record = opened(ledger)
    now_s, waits_s = 1.0, []
    for _ in range(8):
        assert not ledger.interrupt(ledger, now_s, blames=False).given_up
        assert not ledger.ready(now_s)
        waits_s.append(record.ready_s - now_s)
        now_s = record.ready_s
        assert ledger.ready(now_s) == [record]
        ledger.send(record, now_s)
    assert waits_s == sorted(waits_s) and waits_s[-1] == RETRY_MAX_S
    assert record.losses == 0


@pytest.mark.parametrize("count", [2, 3, 17, 60])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("more", [0, 3])
def test_the_request_that_parts_die_of_is_found_and_no_other_blamed(
    count: int, place: int, more: int
) -> None:
    """`more` come in each round, and run beside whoever is tried."""
    ledger = Ledger()
    records = [opened(ledger, f"c{i}") for i in range(count)]
    guilty = records[place]
    given_up: list[Record] = []
    deaths = rounds = 0
    now_s = 1.0
    while guilty.request in ledger.records or ledger.has_suspects:
        rounds += 1
        assert rounds < 100
        flying = [r for r in records if r.stage is not Stage.PARKED]
        if guilty in flying and guilty.request in ledger.records:
            deaths += 1
            given_up += ledger.interrupt(ledger, now_s, blames=True).given_up
        else:
            for record in flying:
                if record.request in ledger.records:
                    ledger.take(delta(record, record.token_count, 5), now_s)
        for record in ledger.ready(now_s):
            ledger.send(record, now_s)
        records += [opened(ledger, f"n{rounds}-{i}") for i in range(more if deaths < 4 else 0)]
        ledger.check()
        now_s += 1.0
        assert not ledger.expire(now_s, 5.0).given_up  # those that wait their turn are not late
    assert given_up == [guilty]
    assert deaths <= 4
    assert len(ledger) == len(records) - 1


def test_the_suspects_of_two_accidents_are_cleared_by_their_next_token() -> None:
    ledger = Ledger()
    records = [opened(ledger, f"c{i}") for i in range(9)]
    for _ in range(2):
        ledger.interrupt(ledger, 1.0, blames=True)
        tried = ledger.ready(1.0)
        for record in tried:
            ledger.send(record, 1.0)
    assert [record.is_suspect for record in records] == [True] * 9
    assert tried == records[:3]  # a group
    assert not ledger.ready(1.0)
    for record in tried:
        ledger.take(delta(record, 0, 5), 1.0)
    assert not any(record.is_suspect for record in tried)
    new = opened(ledger, "new")
    assert new.stage is not Stage.PARKED
    assert ledger.ready(1.0) == records[3:6]


def test_progress_forgives_losses() -> None:
    ledger = Ledger()
    record = opened(ledger)
    for token in range(LOSSES_MAX + 3):
        ledger.take(delta(record, token, token), 1.0)
        assert ledger.interrupt(ledger, 1.0, blames=True).parked == [record]
        ledger.send(record, 1.0)


def test_several_parts_lost_at_once_are_one_loss() -> None:
    ledger = Ledger()
    record = opened(ledger)
    for _ in range(5):
        ledger.interrupt(ledger, 1.0, blames=True)
    assert record.losses == 1


def test_an_end_by_abort_that_nobody_asked_for_is_a_loss() -> None:
    """A part behind believed that this gateway was dead: what it ended goes on."""
    ledger = Ledger()
    record = opened(ledger)
    ledger.take(delta(record, 0, 5), 1.0)
    end = delta(record, 1, finish=FinishReason.ABORT)
    assert ledger.take(end, 1.0)[0] is Verdict.LOST
    assert record.request in ledger.records and record.token_count == 1
    assert ledger.interrupt(ledger, 1.0, blames=False).parked == [record]
    assert record.losses == 0


def test_a_cancelled_request_stays_until_its_terminal_message() -> None:
    ledger = Ledger()
    record = opened(ledger)
    assert ledger.cancel(record, 1.0) == Cancel(record.request, 1)
    assert ledger.cancel(record, 1.0) is None
    assert ledger.take(delta(record, 0, 5), 1.0)[0] is Verdict.DROPPED
    assert len(ledger) == 1
    assert ledger.take(delta(record, 9, finish=FinishReason.ABORT), 1.0)[0] is Verdict.TAKEN
    assert len(ledger) == 0


def test_a_cancelled_request_is_forgotten_with_its_part_or_after_a_time() -> None:
    ledger = Ledger()
    record = opened(ledger)
    ledger.cancel(record, 1.0)
    assert ledger.interrupt(ledger, 2.0, blames=True).forgotten == [record]
    record = opened(ledger)
    ledger.cancel(record, 1.0)
    assert not ledger.expire(CANCEL_WAIT_S, 5.0).forgotten
    assert ledger.expire(1.0 + CANCEL_WAIT_S, 5.0).forgotten == [record]
    assert len(ledger) == 0


def test_cancelling_a_parked_request_ends_it_at_once() -> None:
    ledger = Ledger()
    call = Call(prompts=(Prompt(text="x"),))
    record = Record(run_encodes(call, "c", HERE)[0], "c", 0, 0.0)
    ledger.add(record)
    assert ledger.cancel(record, 0.0) is None  # it was never sent
    record = opened(ledger)
    ledger.interrupt(ledger, 1.0, blames=True)
    assert ledger.cancel(record, 1.0) == Cancel(record.request, 1)  # what is left of attempt 1
    assert len(ledger) == 0


def test_a_parked_request_is_given_up_after_a_time() -> None:
    ledger = Ledger()
    record = opened(ledger)
    ledger.interrupt(ledger, 2.0, blames=True)
    assert not ledger.expire(6.9, 5.0).given_up
    assert ledger.expire(7.0, 5.0).given_up == [record]


def test_a_checked_prompt_ends_with_its_encoding() -> None:
    ledger = Ledger()
    record = opened(ledger, is_check=True)
    assert ledger.encoded(Encoded(record.request, 1, 5), 1.0) is record
    assert ledger.encoded(Encoded(record.request, 1, 5), 1.0) is None
    assert len(ledger) == 0


def test_nothing_is_taken_for_a_request_that_was_not_sent() -> None:
    ledger = Ledger()
    record = Record(run_encodes(Call(prompts=(Prompt(text="x"),)), "c", HERE)[0], "c", 0, 0.0)
    ledger.add(record)
    assert ledger.take(delta(record, 0, 5), 1.0) == (Verdict.DROPPED, None)


def test_a_delta_may_overtake_encoded() -> None:
    ledger = Ledger()
    record = opened(ledger)
    ledger.take(delta(record, 0, 1), 1.0)
    assert record.stage is Stage.RUNNING
    assert ledger.encoded(Encoded(record.request, 1, 5), 1.0) is record


def test_tokens_without_their_ids_are_our_bug() -> None:
    ledger = Ledger()
    record = opened(ledger)
    with pytest.raises(AssertionError):
        ledger.take(Delta(record.request, 1, 0, 1, text="x"), 1.0)


class LedgerAgainstModel(RuleBasedStateMachine):
    """The dull model: each request's output is 0, 1, 2…; whatever is lost, repeated or late, what
    was taken is a prefix of it, and each request leaves once."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now_s = 0.0
        self.count = 0
        self.taken: dict[str, list[int]] = {}
        self.gone: set[str] = set()
        self.seen: dict[str, Record] = {}

    def pick(self, data: st.DataObject) -> Record | None:
        return data.draw(st.sampled_from(list(self.seen.values()))) if self.seen else None

    def left(self, record: Record) -> None:
        assert record.request not in self.gone, "left twice"
        assert record.request not in self.ledger.records
        self.gone.add(record.request)

    @rule(is_parked=st.booleans())
    def open(self, is_parked: bool) -> None:
        self.count += 1
        name = f"r{self.count}"
        record = Record(
            run_encodes(Call(prompts=(Prompt(text="x"),)), name, HERE)[0], name, 0, self.now_s
        )
        self.ledger.add(record)
        self.seen[record.request] = record
        self.taken[record.request] = []
        if not is_parked:
            self.ledger.send(record, self.now_s)

    @rule(
        data=st.data(),
        index=st.integers(0, 6),
        size=st.integers(0, 3),
        age=st.integers(0, 1),
        is_end=st.booleans(),
    )
    def delta(self, data: st.DataObject, index: int, size: int, age: int, is_end: bool) -> None:
        record = self.pick(data)
        if record is None:
            return
        ids = range(index, index + size)
        finish = FinishReason.STOP if is_end else None
        message = delta(record, index, *ids, attempt=max(0, record.attempt - age), finish=finish)
        was_cancelled = record.stage is Stage.CANCELLED
        verdict, _ = self.ledger.take(message, self.now_s)
        if verdict is not Verdict.TAKEN:
            return
        assert message.attempt == record.attempt
        if not was_cancelled:
            self.taken[record.request].extend(ids)
        if is_end:
            self.left(record)

    @rule(data=st.data())
    def encoded(self, data: st.DataObject) -> None:
        record = self.pick(data)
        if record is not None:
            self.ledger.encoded(Encoded(record.request, record.attempt, 3), self.now_s)

    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        record = self.pick(data)
        if record is None:
            return
        problem = Problem(fault=Fault.INVALID, message="x")
        if self.ledger.failed(Failed(record.request, record.attempt, problem)) is not None:
            self.left(record)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        record = self.pick(data)
        if record is None:
            return
        was_open = record.request in self.ledger.records
        self.ledger.cancel(record, self.now_s)
        if was_open and record.request not in self.ledger.records:
            self.left(record)

    @rule(is_all=st.booleans(), blames=st.booleans())
    def lose(self, is_all: bool, blames: bool) -> None:
        records = [r for r in self.ledger if is_all or r.stage is Stage.ENCODING]
        result = self.ledger.interrupt(records, self.now_s, blames=blames)
        for record in [*result.given_up, *result.forgotten]:
            self.left(record)

    @rule()
    def resume(self) -> None:
        for record in self.ledger.ready(self.now_s):
            encode = self.ledger.send(record, self.now_s)[-1]
            assert isinstance(encode, Encode)
            assert list(unpack(encode.emitted)) == self.taken[record.request]

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        result = self.ledger.expire(self.now_s, 30.0)
        for record in [*result.given_up, *result.forgotten]:
            self.left(record)

    @invariant()
    def laws(self) -> None:
        self.ledger.check()
        for request, tokens in self.taken.items():
            assert tokens == list(range(len(tokens))), f"{request} has {tokens}"
            if request in self.ledger.records:
                emitted = array("i", bytes(self.ledger.records[request].emitted)).tolist()
                assert emitted == tokens
            else:
                assert request in self.gone


TestLedger = LedgerAgainstModel.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40)
