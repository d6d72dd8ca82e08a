"""This file keeps the calls: which of their requests are open, and what comes of them for readers.

It does not know protocols, nor how requests are sent: `recovery.py` does that. Of a call with many
requests only some are open at a time, as many as keep the house busy: behind them other calls' find
a place. The next is opened when one has ended, of each such call in turn.
Laws: every call ends once, by its last row or by one problem; a stream holds at most
`stream_bytes_max` unread bytes, and one that is left unread is cut and its generation cancelled; a
request is cancelled as soon as nobody reads it, and known until its terminal message has come.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable

import msgspec

from actors.gateway.call import Call, Checked, Row, check_encodes, run_encodes
from actors.gateway.errors import STATUS, Refused, unavailable
from actors.gateway.record import CANCELLED, DROPPED, LOST, Record
from actors.gateway.recovery import Lost, Recovery, overloaded
from actors.gateway.stream import Owner, Stream
from actors.runtime.context import Context
from messages.config import GatewayConfig
from messages.gateway import Delta, Encoded
from messages.tokenizer import Encode
from messages.types import Fault, FinishReason, Problem, Usage

TTFT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
E2E_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


FULL = overloaded("Too many requests are open; try again later.")
FAILED = Problem(fault=Fault.INTERNAL, message="The request failed.")  # and nobody said why


class OpenCall:
    """A call that has not ended: its stream, and which of its requests are open."""

    __slots__ = ("checked", "requests", "stream", "waiting")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.requests: dict[str, Record] = {}
        self.waiting: deque[tuple[int, Encode]] = deque()  # not opened yet, with its index
        self.checked: dict[int, Checked] = {}  # by prompt, while the prompts are checked

    @property
    def is_checking(self) -> bool:
        if self.requests:
            return next(iter(self.requests.values())).is_check
        return not self.waiting[0][1].forward


class Calls:
    """`open` are those that have not ended, `streams` those whose end has not been read; both by
    the call's id."""

    context: Context  # the gateway's; `start` sets it

    def __init__(self, config: GatewayConfig, recovery: Recovery) -> None:
        self.config = config
        # More could only be refused further in, when work had been done for them.
        self.open_max = min(config.open_max, config.places or config.open_max)
        # Of one call: as many as can run. More would only stand before others in the queue.
        self.width = min(self.open_max, config.slots or self.open_max)
        self.recovery = recovery
        self.ledger = recovery.ledger
        self.open: dict[str, OpenCall] = {}
        self.streams: dict[str, Stream] = {}
        self.waiting_count = 0  # requests of open calls that are not opened yet
        self._narrow: OrderedDict[str, OpenCall] = OrderedDict()  # that may open one more, in turn

    def start(self, context: Context) -> None:
        self.context = context
        context.gauge("histrio_streams_open", 0)  # what a life before this one had is gone

    @property
    def is_idle(self) -> bool:
        return not (self.open or self.streams or len(self.ledger))

    # For readers

    def begin(self, call: Call, call_id: str, owner: Owner) -> Stream:
        """Raises Refused when the house is full."""
        problem = self._open_problem(call)
        if problem is not None:
            raise Refused(problem)
        stream = Stream(owner, call_id, call)
        open_call = OpenCall(stream)
        self.open[call_id] = open_call
        self.streams[call_id] = stream
        self.context.gauge("histrio_streams_open", len(self.open))
        encodes = check_encodes if call.checked_first else run_encodes
        self._add(open_call, encodes(call, call_id, self.context.address))
        return stream

    def _open_problem(self, call: Call) -> Problem | None:
        count, open_max = call.request_count, self.config.open_max
        if count > open_max:
            message = f"A call may have at most {open_max} sequences; this one has {count}."
            param = call.count_param if call.choice_count > 1 else call.param or "prompt"
            return Problem(fault=Fault.INVALID, message=message, param=param)
        is_full = len(self.ledger) + min(count, self.width) > self.open_max
        if is_full or len(self.ledger) + self.waiting_count + count > open_max:
            return FULL
        return None

    @property
    def is_full(self) -> bool:
        """Not one more request is taken."""
        return len(self.ledger) >= self.open_max

    def close(self, stream: Stream) -> None:
        """The reader has gone: cancels what still runs of its call."""
        open_call = self.open.get(stream.call_id)
        if open_call is not None:
            stream.is_closed = True
            message = "The stream was closed by its reader."
            self._fail(open_call, Problem(fault=Fault.INTERNAL, message=message))
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """Its end has been read, or nobody will read it."""
        self.streams.pop(stream.call_id, None)

    # What comes of the requests

    def take(self, deltas: Iterable[Delta]) -> None:
        now_s = self.context.now_s()
        gaps: Counter[float] = Counter()  # what a step brings has mostly waited equally long
        for delta in deltas:
            verdict, record = self.ledger.take(delta, now_s)
            if record is None or verdict is DROPPED:
                continue
            if verdict is LOST:
                self.lose(self.recovery.interrupt(record))
            else:
                self._deliver(record, record.as_first_told(delta), now_s, gaps)
        for gap_s, times in gaps.items():
            name = "histrio_inter_token_seconds"
            self.context.observe(name, gap_s, bounds=TOKEN_BOUNDS, times=times)

    def encoded(self, message: Encoded) -> None:
        record = self.ledger.encoded(message, self.context.now_s())
        if record is None or not record.is_check or record.stage is CANCELLED:
            return
        open_call = self.open[record.call_id]
        del open_call.requests[record.request]
        open_call.checked[record.choice] = Checked(
            token_count=message.prompt_tokens, ids=message.prompt_ids, text=message.prompt_text
        )
        if not (open_call.requests or open_call.waiting):
            self._run_checked(open_call)
        elif open_call.waiting:
            self._narrow[record.call_id] = open_call

    def feed(self) -> None:
        """Opens what waits and has a place now, one of each call in turn."""
        narrow = self._narrow
        while narrow and len(self.ledger) < self.open_max:
            call_id, open_call = narrow.popitem(last=False)
            self._open_next(open_call)
            if open_call.waiting and len(open_call.requests) < self.width:
                narrow[call_id] = open_call

    def lose(self, lost: Iterable[Lost]) -> None:
        """Each has left the ledger, and its failure is its call's."""
        for record, problem in lost:
            if problem is None or record.stage is CANCELLED:
                self._count_abort(record)
                continue
            is_refusal = STATUS[problem.fault] < 500 or problem.fault is Fault.OVERLOADED
            self._count("refused" if is_refusal else "error")
            open_call = self.open.get(record.call_id)
            if open_call is not None:
                open_call.requests.pop(record.request, None)
                self._fail(open_call, problem)

    def abort(self, prefix: str) -> int:
        """Ends the requests of those calls, or of those prompts of a call, that have a name which
        begins so; all of them for an empty one. Returns how many."""
        count = 0
        for open_call in list(self.open.values()):
            stream = open_call.stream
            is_whole = not prefix or any(name.startswith(prefix) for name in stream.names)
            named: Collection[int] = stream.named(prefix)
            if is_whole:
                named = range(stream.call.request_count)
            if not named:
                continue
            if open_call.is_checking:
                count += 1
                message = "The request was aborted by the operator of the server."
                self._fail(open_call, unavailable(message, code="aborted"))
                continue
            self._withdraw(open_call, named)
            for record in list(open_call.requests.values()):
                if record.choice in named:
                    count += 1
                    self._abort_one(open_call, record)
        return count

    def cut_unread(self, stood_s: float) -> None:
        """Gives up the readers who have left their stream unread for too long. While this process
        stood still, for the last `stood_s`, they could not read."""
        now_s = self.context.now_s()
        for stream in list(self.streams.values()):
            since_s = stream.outbox.unread_since_s
            if since_s is None:
                continue
            if stood_s > 0.0:
                stream.outbox.unread_since_s = since_s = min(since_s + stood_s, now_s)
            if now_s - since_s > self.config.stream_stall_s:
                self._cut(stream, "the client left it unread for too long")

    def fail_all(self, problem: Problem) -> None:
        for open_call in list(self.open.values()):
            self._fail(open_call, problem)

    def wake_all(self, problem: Problem) -> None:
        """No reader is left waiting. Tells nobody, and is the last."""
        for open_call in self.open.values():
            open_call.stream.outbox.end(problem)
            open_call.stream.ready.set()
        self.open.clear()
        self._narrow.clear()

    def check(self) -> None:
        """Asserts the laws."""
        self.ledger.check()
        for call_id, open_call in self.open.items():
            is_waiting = call_id in self._narrow
            assert open_call.requests or is_waiting, f"{call_id} is open without a request"
            assert len(open_call.requests) <= self.width, f"{call_id} is too wide"
            for request in open_call.requests:
                assert request in self.ledger.records, f"{request} has no record"
        waiting_count = sum(len(open_call.waiting) for open_call in self.open.values())
        assert waiting_count == self.waiting_count, f"{self.waiting_count} of {waiting_count} wait"
        assert self._narrow.keys() <= self.open.keys(), "a call waits that is not open"

    # The way of a call

    def _add(self, open_call: OpenCall, encodes: list[Encode]) -> None:
        open_call.waiting.extend(enumerate(encodes))
        self.waiting_count += len(encodes)
        for _ in range(min(len(encodes), self.width, self.open_max - len(self.ledger))):
            self._open_next(open_call)
        if open_call.waiting and len(open_call.requests) < self.width:
            self._narrow[open_call.stream.call_id] = open_call

    def _open_next(self, open_call: OpenCall) -> None:
        self.waiting_count -= 1
        index, encode = open_call.waiting.popleft()
        record = Record(encode, open_call.stream.call_id, index, self.context.now_s())
        open_call.requests[record.request] = record
        self.recovery.add(record)

    def _withdraw(self, open_call: OpenCall, named: Collection[int]) -> None:
        """Those of its requests which still wait are to be ended like the open ones: nothing has
        been sent for them."""
        kept: deque[tuple[int, Encode]] = deque()
        for index, encode in open_call.waiting:
            if index in named:
                record = Record(encode, open_call.stream.call_id, index, self.context.now_s())
                open_call.requests[record.request] = record
            else:
                kept.append((index, encode))
        self.waiting_count -= len(open_call.waiting) - len(kept)
        open_call.waiting = kept

    def _run_checked(self, open_call: OpenCall) -> None:
        """All prompts are valid: now the choices run."""
        stream = open_call.stream
        stream.checked = [open_call.checked[i] for i in range(len(stream.call.prompts))]
        if stream.call.prompt_only:
            for _ in range(0 if stream.call.measure else stream.call.request_count):
                self._count(FinishReason.LENGTH.value)
            self._end(open_call)
            return
        encodes = run_encodes(stream.call, stream.call_id, self.context.address, stream.checked)
        self._add(open_call, encodes)

    def _deliver(self, record: Record, delta: Delta, now_s: float, gaps: Counter[float]) -> None:
        if record.stage is CANCELLED:
            self._count_abort(record)
            return
        is_end = delta.finish is not None
        if delta.finish is FinishReason.ERROR:
            self.lose([Lost(record, delta.problem or FAILED)])
            return
        if not delta.prompt_logprobs:
            self._observe(record, delta, now_s, gaps)
        open_call = self.open[record.call_id]
        stream = open_call.stream
        unread = stream.outbox.push(Row(record.choice, delta), now_s)
        stream.wake()
        if is_end:
            del open_call.requests[record.request]
            if open_call.waiting:
                self._narrow[record.call_id] = open_call
            elif not open_call.requests:
                self._end(open_call)
                return
        if unread > self.config.stream_bytes_max:
            self._cut(stream, "the client is too slow for it")

    def _observe(self, record: Record, delta: Delta, now_s: float, gaps: Counter[float]) -> None:
        context = self.context
        if record.last_s is None:
            waited_s = now_s - record.opened_s
            context.observe("histrio_ttft_seconds", waited_s, bounds=TTFT_BOUNDS)
        elif delta.token_count:
            gaps[(now_s - record.last_s) / delta.token_count] += 1
        record.last_s = now_s
        if delta.finish is not None:
            self._count(delta.finish.value)
            e2e_s = now_s - record.opened_s
            context.observe("histrio_e2e_seconds", e2e_s, bounds=E2E_BOUNDS)

    def _fail(self, open_call: OpenCall, problem: Problem) -> None:
        self._withdraw(open_call, range(open_call.stream.call.request_count))
        for record in open_call.requests.values():
            if self.recovery.cancel(record):
                self._count_abort(record)
        open_call.requests.clear()
        self._end(open_call, problem)

    def _cut(self, stream: Stream, why: str) -> None:
        """Gives its reader up: what waits for it is freed, what still runs for it cancelled."""
        problem = unavailable(f"The stream was cut: {why}.", code="stream_cut")
        self.context.count("histrio_streams_cut_total")
        stream.outbox.take()
        open_call = self.open.get(stream.call_id)
        if open_call is not None:
            self._fail(open_call, problem)
        else:
            stream.outbox.problem = problem
        self.forget(stream)
        if stream.on_cut is not None:
            stream.on_cut()

    def _abort_one(self, open_call: OpenCall, record: Record) -> None:
        """Its reader gets what has come of it, and that it was aborted."""
        if self.recovery.cancel(record):
            self._count_abort(record)
        del open_call.requests[record.request]
        end = Delta(
            request=record.request,
            attempt=record.attempt,
            index=record.token_count,
            token_count=0,
            finish=FinishReason.ABORT,
            usage=msgspec.structs.replace(
                record.usage or Usage(), completion_tokens=record.token_count
            ),
        )
        open_call.stream.outbox.push(Row(record.choice, end), self.context.now_s())
        open_call.stream.ready.set()
        if open_call.waiting:
            self._narrow[record.call_id] = open_call
        elif not open_call.requests:
            self._end(open_call)

    def _end(self, open_call: OpenCall, problem: Problem | None = None) -> None:
        """The call is over; cancelled requests of it may still be in the ledger."""
        call_id = open_call.stream.call_id
        del self.open[call_id]
        self._narrow.pop(call_id, None)
        open_call.stream.outbox.end(problem)
        open_call.stream.wake()
        self.context.gauge("histrio_streams_open", len(self.open))

    def _count(self, outcome: str) -> None:
        self.context.count("histrio_requests_total", outcome=outcome)

    def _count_abort(self, record: Record) -> None:
        if not record.is_check:
            self._count(FinishReason.ABORT.value)
