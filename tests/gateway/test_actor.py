"""The gateway without HTTP: calls, streams, and what becomes of them when parts are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from actors.gateway.actor import Gateway
from actors.gateway.call import Call, Prompt, Row
from actors.gateway.errors import Refused
from actors.gateway.record import CANCEL_WAIT_S, LOSSES_MAX, POLL_S
from actors.gateway.stream import Stream
from actors.runtime.testkit import Cell
from messages.base import Address
from messages.config import GatewayConfig, ModelConfig, Paths
from messages.gateway import Delta, Deltas, Encoded, Failed, Unknown
from messages.scheduler import Poll
from messages.system import Cause, Undelivered
from messages.tokenizer import Cancel, Encode
from messages.types import Fault, FinishReason, Problem, Usage, pack, unpack
from messages.worker import Facts

PATHS = Paths()
FACTS = Facts(
    model="M",
    vocab_size=100,
    context_len=512,
    page_size=16,
    page_count=64,
    eos_ids=(2,),
    dtype="float32",
    device="cpu",
)
NOTES = {PATHS.worker: msgspec.msgpack.encode(FACTS)}
ONE = Call(prompts=(Prompt(text="hi"),))


def started(**settings: Any) -> Cell:
    config = GatewayConfig(http=False, **settings)
    cell = Cell(Gateway(ModelConfig(), config, PATHS), path="gateway", notes=NOTES)
    cell.start()
    return cell


def gateway_of(cell: Cell) -> Gateway:
    assert isinstance(cell.actor, Gateway)
    return cell.actor


def opened(cell: Cell, call: Call = ONE) -> tuple[Stream, list[Encode]]:
    """A stream, and the encodes that went out for it."""
    cell.take()
    stream = gateway_of(cell).open(call)
    return stream, encodes(cell)


def encodes(cell: Cell) -> list[Encode]:
    return [message for _, message in cell.take() if isinstance(message, Encode)]


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Drives a read that has what it needs."""
    try:
        coro.send(None)
    except StopIteration as end:
        return end.value
    coro.close()
    raise AssertionError("the stream has nothing to read")


def read(stream: Stream) -> list[Row]:
    rows: list[Row] = run(stream.read())
    return rows


def failure(stream: Stream) -> Problem:
    with pytest.raises(Refused) as caught:
        read(stream)
    refused: Refused = caught.value
    return refused.problem


def delta(
    encode: Encode,
    index: int,
    text: str = "x",
    finish: FinishReason | None = None,
    problem: Problem | None = None,
) -> Delta:
    return Delta(
        request=encode.request,
        attempt=encode.attempt,
        index=index,
        token_count=1,
        text=text,
        token_ids=pack([40 + index]),
        finish=finish,
        usage=Usage(3, index + 1) if finish is not None else None,
        problem=problem,
    )


def outcomes(cell: Cell) -> dict[str, float]:
    return {
        dict(labels)["outcome"]: value
        for (name, labels), value in cell.context.tally.counters.items()
        if name == "histrio_requests_total"
    }


def test_a_call_is_encoded_delivered_and_over() -> None:
    cell = started()
    stream, (encode,) = opened(cell)
    assert encode.reply_to == cell.address and encode.text == "hi"
    assert encode.stop.want_token_ids
    cell.tell(Encoded(encode.request, 1, 3))
    cell.tell(Deltas((delta(encode, 0, "He"),)))
    cell.tell(Deltas((delta(encode, 1, "llo"), delta(encode, 2, "!", FinishReason.STOP))))
    assert [row.delta.text for row in read(stream)] == ["He", "llo", "!"]
    assert stream.is_done
    assert read(stream) == []
    assert outcomes(cell) == {"stop": 1}
    assert cell.timer_count == 0  # nothing is open, nothing ticks


def test_the_readers_wait_ends_with_the_first_row() -> None:
    async def scenario() -> list[Row]:
        cell = started()
        stream, (encode,) = opened(cell)
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        assert not reading.done()
        cell.tell(Deltas((delta(encode, 0),)))
        return await reading

    assert len(asyncio.run(scenario())) == 1


def test_iterating_a_stream_gives_its_rows_and_closes_it_when_left_early() -> None:
    async def scenario() -> None:
        cell = started()
        stream, (encode,) = opened(cell)
        cell.tell(Deltas((delta(encode, 0), delta(encode, 1))))
        rows = aiter(stream)
        assert (await anext(rows)).delta.index == 0
        await rows.aclose()  # type: ignore[attr-defined]
        assert cell.take() == [("tokenizer", Cancel(encode.request, 1))]

    asyncio.run(scenario())


# B065, B075
def test_several_prompts_are_all_checked_before_any_runs() -> None:
    cell = started()
    call = Call(prompts=(Prompt(text="a"), Prompt(text="b")), choice_count=2)
    stream, checks = opened(cell, call)
    assert [check.forward for check in checks] == [False, False]
    cell.tell(Encoded(checks[1].request, 1, 2, pack([5, 6])))
    assert encodes(cell) == []
    cell.tell(Encoded(checks[0].request, 1, 1, pack([4])))
    runs = encodes(cell)
    assert [list(unpack(run.ids or b"")) for run in runs] == [[4], [4], [5, 6], [5, 6]]
    assert [run.sampling.choice for run in runs] == [0, 1, 0, 1]
    assert all(run.forward and run.text is None for run in runs)
    assert [checked.token_count for checked in stream.checked] == [1, 2]
    cell.tell(Deltas(tuple(delta(run, 0, str(i)) for i, run in enumerate(runs))))
    assert [(row.choice, row.delta.text) for row in read(stream)] == [
        (0, "0"),
        (1, "1"),
        (2, "2"),
        (3, "3"),
    ]


def test_one_bad_prompt_refuses_the_whole_call_and_runs_nothing() -> None:
    cell = started()
    call = Call(prompts=tuple(Prompt(text=t) for t in "abc"))
    stream, checks = opened(cell, call)
    cell.tell(Encoded(checks[0].request, 1, 1, pack([4])))
    problem = Problem(fault=Fault.INVALID, message="too long", param="prompt")
    cell.tell(Failed(checks[2].request, 1, problem))
    assert failure(stream) == problem
    assert cell.take() == [("tokenizer", Cancel(checks[1].request, 1))]
    cell.tell(Encoded(checks[1].request, 1, 1, pack([4])))
    assert cell.take() == [] and outcomes(cell) == {"refused": 1}
    assert len(gateway_of(cell).recovery.ledger) == 0


# B031
def test_a_prompt_alone_is_checked_and_not_run() -> None:
    cell = started()
    stream, (check,) = opened(cell, Call(prompts=(Prompt(text="a b"),), prompt_only=True))
    assert not check.forward
    cell.tell(Encoded(check.request, 1, 2, pack([4, 5])))
    assert cell.take() == [] and read(stream) == []
    assert stream.checked[0].token_count == 2


# B023, B025
@pytest.mark.parametrize("stage", ["sent", "encoded", "running"])
def test_closing_a_stream_cancels_its_request_in_any_stage(stage: str) -> None:
    cell = started()
    stream, (encode,) = opened(cell)
    if stage != "sent":
        cell.tell(Encoded(encode.request, 1, 3))
    if stage == "running":
        cell.tell(Deltas((delta(encode, 0),)))
    stream.close()
    stream.close()
    assert cell.take() == [("tokenizer", Cancel(encode.request, 1))]
    assert (
        len(gateway_of(cell).recovery.ledger) == 1
    )  # until the scheduler has said that it is over
    cell.tell(Deltas((delta(encode, 1, "", FinishReason.ABORT),)))
    assert len(gateway_of(cell).recovery.ledger) == 0
    assert outcomes(cell) == {"abort": 1} and cell.timer_count == 0


def test_a_request_that_ends_by_itself_after_its_cancel_is_an_abort() -> None:
    cell = started()
    stream, (encode,) = opened(cell)
    stream.close()
    cell.tell(Deltas((delta(encode, 0, "x", FinishReason.STOP),)))
    assert outcomes(cell) == {"abort": 1}


def test_a_cancelled_request_whose_end_never_comes_is_forgotten() -> None:
    cell = started()
    stream, _ = opened(cell)
    stream.close()
    cell.advance(CANCEL_WAIT_S + 2)
    assert len(gateway_of(cell).recovery.ledger) == 0 and cell.timer_count == 0
    assert outcomes(cell) == {"abort": 1}


# B027
def test_a_stream_left_unread_is_cut_and_its_generation_cancelled() -> None:
    cell = started(stream_stall_s=10.0)
    stream, (encode,) = opened(cell)
    cut: list[bool] = []
    stream.on_cut = lambda: cut.append(True)
    cell.tell(Deltas((delta(encode, 0),)))
    cell.advance(9.0)
    assert not cut
    read(stream)
    cell.advance(30.0)  # nothing waits for the reader: that is no stall
    assert not cut
    cell.tell(Deltas((delta(encode, 1),)))
    cell.take()
    cell.advance(12.0)
    assert cut == [True]
    sent = [(path, message) for path, message in cell.take() if not isinstance(message, Poll)]
    assert sent == [("tokenizer", Cancel(encode.request, 1))]
    assert failure(stream).code == "stream_cut"


def test_a_finished_stream_left_unread_is_freed_too() -> None:
    cell = started(stream_stall_s=10.0)
    stream, (encode,) = opened(cell)
    cell.tell(Deltas((delta(encode, 0, "x", FinishReason.STOP),)))
    cell.advance(12.0)
    assert failure(stream).code == "stream_cut"
    assert not gateway_of(cell).calls.streams and cell.timer_count == 0
    assert outcomes(cell) == {"stop": 1}


def test_a_stream_holds_a_bounded_number_of_bytes() -> None:
    cell = started(stream_bytes_max=10_000)
    stream, (encode,) = opened(cell)
    for index in range(200):
        cell.tell(Deltas((delta(encode, index, "x" * 100),)))
        assert stream.outbox.bytes_len <= 10_000
    assert failure(stream).code == "stream_cut"
    assert ("tokenizer", Cancel(encode.request, 1)) in cell.take()


# B155
@pytest.mark.parametrize("limits", [{"open_max": 2}, {"places": 2}])
def test_more_calls_than_the_house_has_room_for_are_refused(limits: dict[str, int]) -> None:
    cell = started(**limits)
    opened(cell)
    opened(cell)
    with pytest.raises(Refused) as caught:
        gateway_of(cell).open(ONE)
    assert caught.value.problem.fault is Fault.OVERLOADED
    assert caught.value.problem.retry_after_s
    assert outcomes(cell) == {"refused": 1}


@pytest.mark.parametrize(
    ("prompt_count", "choice_count", "names", "param"),
    [
        (1, 3, {}, "n"),
        (3, 1, {}, "prompt"),
        (3, 1, {"param": "input"}, "input"),
        (2, 2, {"param": "text", "count_param": "sampling_params.n"}, "sampling_params.n"),
    ],
)
def test_a_call_that_would_never_have_room_is_refused_by_its_field(
    prompt_count: int, choice_count: int, names: dict[str, str], param: str
) -> None:
    cell = started(open_max=2)
    prompts = (Prompt(text="x"),) * prompt_count
    with pytest.raises(Refused) as caught:
        gateway_of(cell).open(Call(prompts=prompts, choice_count=choice_count, **names))  # type: ignore[arg-type]
    assert caught.value.problem.fault is Fault.INVALID
    assert caught.value.problem.param == param


def pass_checks(cell: Cell, checks: list[Encode]) -> list[Encode]:
    """Answers checks until there are none; returns the requests that run then."""
    while checks and not checks[0].forward:
        for check in checks:
            cell.tell(Encoded(check.request, 1, 1, pack([int(check.text or "0")])))
        checks = encodes(cell)
    return checks


def many(count: int) -> Call:
    return Call(prompts=tuple(Prompt(text=str(index)) for index in range(count)))


def test_of_a_call_with_many_requests_some_are_open_at_a_time_and_all_are_answered() -> None:
    cell = started(slots=4, places=10)
    stream, checks = opened(cell, many(25))
    assert len(checks) == 4
    runs = pass_checks(cell, checks)
    most = 0
    while runs:
        most = max(most, len(runs))
        assert len(gateway_of(cell).recovery.ledger) <= 4
        cell.tell(Deltas(tuple(delta(run, 0, "x", FinishReason.STOP) for run in runs)))
        runs = encodes(cell)
    assert most == 4
    rows = read(stream)
    assert [row.choice for row in rows] == list(range(25)) and stream.is_done
    assert read(stream) == [] and cell.timer_count == 0
    assert outcomes(cell) == {"stop": 25}


def test_calls_with_many_requests_get_places_in_turn_and_others_find_one_behind_them() -> None:
    cell = started(slots=2, places=6)
    _, checks = opened(cell, many(9))
    first = pass_checks(cell, checks)
    _, checks = opened(cell, many(9))
    second = pass_checks(cell, checks)
    assert len(first) == len(second) == 2
    small, (encode,) = opened(cell)
    cell.tell(Deltas((delta(encode, 0, "x", FinishReason.STOP),)))
    assert small.is_done is False and [row.delta.text for row in read(small)] == ["x"]
    cell.tell(Deltas((delta(second[0], 0, "x", FinishReason.STOP),)))
    cell.tell(Deltas((delta(first[0], 0, "x", FinishReason.STOP),)))
    calls = [encode.request.split(".")[0] for encode in encodes(cell)]
    assert calls == [second[0].request.split(".")[0], first[0].request.split(".")[0]]


def test_what_waits_of_a_call_goes_with_it() -> None:
    for end in ("close", "abort", "fail"):
        cell = started(slots=2, places=6)
        stream, checks = opened(cell, many(9))
        runs = pass_checks(cell, checks)
        if end == "close":
            stream.close()
        elif end == "abort":
            assert gateway_of(cell).abort("") == 9
            rows = read(stream)
            assert {row.delta.finish for row in rows} == {FinishReason.ABORT} and len(rows) == 9
        else:
            cell.tell(Failed(runs[0].request, 1, Problem(Fault.INVALID, "no")))
            assert failure(stream).message == "no"
        for run in runs:
            cell.tell(Deltas((delta(run, 0, "", FinishReason.ABORT),)))
        assert encodes(cell) == [] and gateway_of(cell).calls.waiting_count == 0
        assert len(gateway_of(cell).recovery.ledger) == 0
        expected = {"abort": 9} if end != "fail" else {"abort": 8, "refused": 1}
        assert outcomes(cell) == expected


def test_what_waits_of_a_call_is_sent_when_a_lost_part_is_back() -> None:
    cell = started(slots=2, places=6)
    stream, checks = opened(cell, many(5))
    runs = pass_checks(cell, checks)
    cell.down("replica/worker")
    cell.up("replica/worker")
    done = 0
    while runs := encodes(cell):
        done += len(runs)
        cell.tell(Deltas(tuple(delta(run, 0, "x", FinishReason.STOP) for run in runs)))
    assert done == 5 and sorted(row.choice for row in read(stream)) == list(range(5))


def test_a_full_tokenizer_is_an_overload() -> None:
    cell = started()
    stream, (encode,) = opened(cell)
    target = Address("test", "tokenizer", 1)
    cell.undelivered(Undelivered(target, "Encode", Cause.FULL, encode.request))
    assert failure(stream).fault is Fault.OVERLOADED


# DESIGN 5: any part may crash
@pytest.mark.parametrize("path", ["replica/worker", "replica/scheduler", "detokenizer"])
def test_a_lost_part_is_not_noticed_by_the_reader(path: str) -> None:
    cell = started()
    stream, (encode,) = opened(cell)
    cell.tell(Encoded(encode.request, 1, 3))
    cell.tell(Deltas((delta(encode, 0, "a"), delta(encode, 1, "b"))))
    cell.take()
    cell.down(path)
    cell.advance(5.0)
    assert cell.take() == []  # waits for the part
    cell.up(path)
    (_, cancel), (_, again) = cell.take()
    assert cancel == Cancel(encode.request, 1)
    assert isinstance(again, Encode) and again.attempt == 2
    assert list(unpack(again.emitted)) == [40, 41]
    cell.tell(Deltas((delta(encode, 2, "LATE"),)))  # of the lost attempt
    cell.tell(Deltas((delta(again, 2, "c"), delta(again, 3, "", FinishReason.STOP))))
    assert [row.delta.text for row in read(stream)] == ["a", "b", "c", ""]
    assert stream.is_done and outcomes(cell) == {"stop": 1}


def test_a_lost_tokenizer_concerns_only_what_it_had() -> None:
    cell = started()
    first, (early,) = opened(cell)
    cell.tell(Encoded(early.request, 1, 3))
    second, (late,) = opened(cell)
    cell.down("tokenizer")
    cell.up("tokenizer")
    again = encodes(cell)
    assert [(e.request, e.attempt) for e in again] == [(late.request, 2)]
    cell.tell(Deltas((delta(early, 0, "x", FinishReason.STOP),)))
    assert len(read(first)) == 1


@pytest.mark.parametrize("path", ["tokenizer", "router"])
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_cancel_lost_with_a_part_is_sent_again(path: str, has_tokens: bool) -> None:
    """And asked after, since what it was to end may be lost as well."""
    cell = started()
    stream, (encode,) = opened(cell)
    cell.tell(Encoded(encode.request, 1, 3))
    if has_tokens:
        cell.tell(Deltas((delta(encode, 0, "a"),)))
    stream.close()
    cell.take()
    cell.down(path)
    cell.up(path)
    (_, cancel), (_, poll) = cell.take()
    assert cancel == Cancel(encode.request, 1)
    assert isinstance(poll, Poll) and poll.rows == ((encode.request, 1),)
    if has_tokens:
        cell.tell(Deltas((delta(encode, 1, "", FinishReason.ABORT),)))
    else:
        cell.tell(Unknown(((encode.request, 1),)))
    assert len(gateway_of(cell).recovery.ledger) == 0
    assert outcomes(cell) == {"abort": 1}


def test_what_was_found_in_the_cache_is_told_as_at_first() -> None:
    cell = started()
    stream, (encode,) = opened(cell)
    first = delta(encode, 0, "a")
    cell.tell(Encoded(encode.request, 1, 40))
    cell.tell(Deltas((msgspec.structs.replace(first, usage=Usage(40, 1, 32)),)))
    cell.down("replica/worker")
    cell.up("replica/worker")
    (again,) = encodes(cell)
    last = delta(again, 1, "", FinishReason.STOP)
    cell.tell(Deltas((msgspec.structs.replace(last, usage=Usage(40, 2, 0)),)))
    assert read(stream)[-1].delta.usage == Usage(40, 2, 32)


def test_a_part_that_stays_lost_ends_the_call_with_a_clear_error() -> None:
    cell = started(recover_s=5.0)
    stream, _ = opened(cell)
    cell.down("replica/worker")
    cell.advance(7.0)
    problem = failure(stream)
    assert problem.fault is Fault.UNAVAILABLE and "worker" not in problem.message
    assert outcomes(cell) == {"error": 1}


def test_a_request_that_kills_its_worker_is_not_tried_for_ever() -> None:
    cell = started()
    stream, _ = opened(cell)
    for _ in range(LOSSES_MAX - 1):
        cell.down("replica/worker")
        cell.up("replica/worker")
        assert len(encodes(cell)) == 1
    cell.down("replica/worker")
    problem = failure(stream)
    assert problem.code == "repeatedly_interrupted"
    assert problem.fault is Fault.INTERNAL
    cell.up("replica/worker")
    assert encodes(cell) == []


def test_a_call_that_comes_while_a_part_is_down_waits_for_it() -> None:
    cell = started(recover_s=5.0)
    cell.down("replica/scheduler")
    stream, sent = opened(cell)
    assert sent == []
    cell.up("replica/scheduler")
    (encode,) = encodes(cell)
    assert encode.attempt == 1
    cell.down("replica/scheduler")
    cell.take()
    stream.close()
    assert cell.take() == [("tokenizer", Cancel(encode.request, 1))]
    assert len(gateway_of(cell).recovery.ledger) == 0


def test_an_unreachable_part_reported_by_another_is_tried_again() -> None:
    cell = started()
    stream, (encode,) = opened(cell)
    problem = Problem(fault=Fault.UNAVAILABLE, message="no scheduler")
    cell.tell(Failed(encode.request, 1, problem))
    cell.advance(1.0)
    (again,) = encodes(cell)
    assert again.attempt == 2
    cell.tell(Failed(encode.request, 1, problem))  # again the first attempt: old news
    assert encodes(cell) == []
    cell.tell(Deltas((delta(again, 0, "x", FinishReason.STOP),)))
    assert len(read(stream)) == 1


def test_a_gap_in_the_tokens_is_filled_by_another_attempt() -> None:
    cell = started()
    stream, (encode,) = opened(cell)
    cell.tell(Deltas((delta(encode, 0, "a"),)))
    cell.tell(Deltas((delta(encode, 2, "c"),)))
    cell.advance(1.0)
    (again,) = encodes(cell)
    assert list(unpack(again.emitted)) == [40]
    cell.tell(Deltas((delta(again, 1, "b"), delta(again, 2, "c"))))
    assert "".join(row.delta.text for row in read(stream)) == "abc"


def test_what_was_aborted_unasked_is_filled_by_another_attempt() -> None:
    """The parts behind took this gateway for dead, and it was not."""
    cell = started()
    stream, (encode,) = opened(cell)
    cell.tell(Deltas((delta(encode, 0, "a"),)))
    cell.tell(Deltas((delta(encode, 1, "", FinishReason.ABORT),)))
    assert not stream.outbox.is_over
    cell.advance(1.0)
    (again,) = encodes(cell)
    assert again.attempt == 2 and list(unpack(again.emitted)) == [40]
    cell.tell(Deltas((delta(again, 1, "b", FinishReason.STOP),)))
    assert "".join(row.delta.text for row in read(stream)) == "ab"
    assert outcomes(cell) == {"stop": 1}


def test_an_undelivered_prompt_waits_for_the_tokenizer() -> None:
    cell = started()
    stream, _ = opened(cell)
    cell.target("tokenizer").is_up = False
    second, sent = opened(cell)
    assert sent == []
    cell.advance(3.0)
    assert encodes(cell) == []
    cell.up("tokenizer")
    assert len(encodes(cell)) == 1
    assert not stream.outbox.is_over and not second.outbox.is_over


def test_an_error_of_one_choice_ends_the_call_and_cancels_the_others() -> None:
    cell = started()
    call = Call(prompts=(Prompt(text="a"),), choice_count=2)
    stream, (check,) = opened(cell, call)
    cell.tell(Encoded(check.request, 1, 1, pack([4])))
    first, second = encodes(cell)
    problem = Problem(fault=Fault.INTERNAL, message="the row failed")
    cell.tell(Deltas((delta(first, 0, "", FinishReason.ERROR, problem),)))
    assert failure(stream) == problem
    assert cell.take() == [("tokenizer", Cancel(second.request, 1))]
    cell.tell(Deltas((delta(second, 0, "", FinishReason.ABORT),)))
    assert outcomes(cell) == {"error": 1, "abort": 1}


# B171
def test_draining_takes_nothing_new_and_waits_for_what_runs() -> None:
    cell = started()
    stream, (encode,) = opened(cell)
    cell.drain()
    assert not cell.is_drained
    with pytest.raises(Refused) as caught:
        gateway_of(cell).open(ONE)
    assert caught.value.problem.fault is Fault.UNAVAILABLE
    cell.tell(Deltas((delta(encode, 0, "x", FinishReason.STOP),)))
    assert not cell.is_drained  # its reader has not got it yet
    read(stream)
    assert read(stream) == []
    assert cell.is_drained


def test_an_idle_gateway_is_drained_at_once() -> None:
    cell = started()
    cell.drain()
    assert cell.is_drained


def test_stopping_ends_every_open_stream_with_an_error() -> None:
    cell = started()
    stream, _ = opened(cell)
    cell.stop()
    assert failure(stream).fault is Fault.UNAVAILABLE


# B177
def test_every_request_is_counted_once_by_its_outcome() -> None:
    cell = started()
    for _ in range(5):
        stream, (encode,) = opened(cell)
        cell.tell(Deltas((delta(encode, 0, "x", FinishReason.LENGTH),)))
        read(stream)
    for is_running in (True, False):
        for _ in range(5):
            stream, (encode,) = opened(cell)
            if is_running:
                cell.tell(Deltas((delta(encode, 0),)))
            stream.close()
            cell.tell(Deltas((delta(encode, 1, "", FinishReason.ABORT),)))
    for _ in range(2):
        stream, (encode,) = opened(cell)
        problem = Problem(fault=Fault.INVALID, message="too long")
        cell.tell(Failed(encode.request, 1, problem))
        failure(stream)
    assert outcomes(cell) == {"length": 5, "abort": 10, "refused": 2}
    assert cell.gauges["histrio_streams_open"] == 0


def test_the_waits_between_tokens_are_counted_one_by_one() -> None:
    cell = started()
    (_, one), (_, other) = (opened(cell) for _ in range(2))
    encodes = [one[0], other[0]]
    cell.tell(Deltas(tuple(delta(encode, 0) for encode in encodes)))
    cell.advance(0.25)
    cell.tell(Deltas(tuple(delta(encode, 1) for encode in encodes)))  # both waited as long
    cell.advance(0.5)
    cell.tell(Deltas((delta(one[0], 2),)))
    cell.advance(0.25)
    cell.tell(Deltas((delta(one[0], 3), delta(other[0], 2))))
    (found,) = (
        value
        for (name, _), value in cell.context.tally.histograms.items()
        if name == "histrio_inter_token_seconds"
    )
    bounds, counts, total_s = found
    by_bound = dict(zip(bounds, counts, strict=False))
    assert (by_bound[0.25], by_bound[0.5], by_bound[1.0]) == (3, 1, 1) and sum(counts) == 5
    assert total_s == 3 * 0.25 + 0.5 + 0.75


def test_seeds_and_ids_are_drawn_from_the_actors_own_stream() -> None:
    first, second = gateway_of(started()), gateway_of(started())
    assert [first.draw_seed() for _ in range(3)] == [second.draw_seed() for _ in range(3)]
    assert 0 <= first.draw_seed() < 2**63
    assert first.new_id() != first.new_id()


def test_the_gateway_needs_no_http_library_without_a_door() -> None:
    import subprocess
    import sys

    code = (
        "import sys, actors.gateway.actor\n"
        "bad = {'starlette', 'uvicorn', 'torch', 'zmq'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)


def test_a_request_that_nobody_has_any_more_is_sent_again() -> None:
    cell = started()
    stream, (encode,) = opened(cell)
    cell.tell(Encoded(encode.request, 1, 3))
    cell.tell(Deltas((delta(encode, 0),)))
    cell.take()
    for _ in range(2):  # an answer may cross with the request's end, two can not
        cell.advance(POLL_S + 1.5)
        polls = [message for _, message in cell.take() if isinstance(message, Poll)]
        assert [poll.rows for poll in polls] == [((encode.request, 1),)]
        cell.tell(Unknown(((encode.request, 1),)))
    cell.advance(1.0)
    again = [message for _, message in cell.take() if isinstance(message, Encode)]
    assert [(e.attempt, len(e.emitted) // 4) for e in again] == [(2, 1)]
    stream.close()


def test_a_request_that_is_known_may_be_silent_for_long() -> None:
    cell = started()
    stream, (encode,) = opened(cell)
    cell.tell(Encoded(encode.request, 1, 3))
    cell.advance(600.0)
    assert not [m for _, m in cell.take() if isinstance(m, Encode)]
    cell.tell(Unknown(((encode.request, 1),)))
    cell.tell(Deltas((delta(encode, 0),)))  # it was on its way
    cell.tell(Unknown(((encode.request, 1),)))
    cell.advance(1.0)
    assert not [m for _, m in cell.take() if isinstance(m, Encode)]
    stream.close()
