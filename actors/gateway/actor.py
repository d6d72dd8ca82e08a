"""This file is the gateway: calls in, streams of rows out, and nobody notices a crash behind it.

It does not know protocols: `http.py` and `actors/engine.py` open calls and read their streams. What
a request has got, and what a loss means for it, `record.py` decides; this file sends, wakes readers
and keeps time.
Laws: every call ends once, by its last row or by one problem; a stream holds at most
`stream_bytes_max` unread bytes, and one that is left unread is cut and its generation cancelled; a
request is cancelled as soon as nobody reads it, and known until its terminal message has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from actors.gateway.call import Call, Checked, Row, check_encodes, run_encodes
from actors.gateway.errors import STATUS, Refused, unavailable
from actors.gateway.inputs import Limits
from actors.gateway.outbox import Outbox
from actors.gateway.reasoning.base import REASONING_PARSERS
from actors.gateway.record import Interrupted, Ledger, Record, Stage, Verdict
from actors.gateway.shape import Parsers
from actors.gateway.tools.base import TOOL_PARSERS
from actors.runtime.actor import Actor, MailboxSpec
from actors.runtime.context import Ref, Reply
from messages import cache, gateway, metrics, router, scheduler, tokenizer
from messages.cache import Cleared
from messages.config import GatewayConfig, ModelConfig, Paths
from messages.gateway import Abort, Delta, Deltas, Encoded, Failed, Recall, Recalled, Unknown
from messages.metrics import Page, Scrape
from messages.scheduler import Load, Poll
from messages.system import ActorRow, Cause, Down, Drain, Reason, State, Undelivered, Up
from messages.tokenizer import Defaults, Dialect
from messages.types import Fault, FinishReason, Problem, Usage
from messages.worker import Facts

if TYPE_CHECKING:
    from actors.gateway.site import Site

SWEEP_S = 1.0  # how often stalls and waits are looked at, while anything is open
RESUME_S = 0.1  # how often interrupted requests are looked at, when no part is known to be down
SCRAPE_TIMEOUT_S = 5.0
TTFT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
E2E_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Sweep(NamedTuple):
    """Look for streams that nobody reads and for waits that are over."""


class Resume(NamedTuple):
    """Send the interrupted requests again, if all parts are there."""


class Stream:
    """The reader's end of one call. Local: it never leaves the node.

    `read` gives all rows that wait, [] after the last; it raises `Refused` when the call failed,
    after the rows that came before. Whoever stops reading early calls `close`.
    """

    def __init__(self, owner: Gateway, call_id: str, call: Call) -> None:
        self.call_id = call_id
        self.call = call
        self.checked: list[Checked] = []  # the prompts, where the call was checked first
        self.on_cut: Callable[[], None] | None = None  # called when the reader is given up
        self.is_closed = False  # by its reader
        self.names: tuple[str, ...] = ()  # what a client may call it by, to abort it
        self.request_names: tuple[str, ...] = ()  # the same of each of its prompts
        self.outbox = Outbox()
        self.ready = asyncio.Event()
        # What is called when rows have come: wakes the reader, or does its work.
        self.wake: Callable[[], object] = self.ready.set
        self._owner = owner

    async def read(self) -> list[Row]:
        outbox = self.outbox
        while not outbox.rows and not outbox.is_over:
            self.ready.clear()
            await self.ready.wait()
        rows = outbox.take()
        if not rows:
            self._owner.forget(self)
            if outbox.problem is not None:
                raise Refused(outbox.problem)
        return rows

    @property
    def is_done(self) -> bool:
        """All rows have been read, and the call has not failed."""
        return self.outbox.is_over and not self.outbox.rows and self.outbox.problem is None

    async def __aiter__(self) -> AsyncIterator[Row]:
        try:
            while rows := await self.read():
                for row in rows:
                    yield row
        finally:
            self.close()

    def close(self) -> None:
        """Nobody reads any more: what still runs is cancelled. Harmless after the end."""
        self._owner.close(self)


class Open:
    """A call that has not ended: its stream, and which of its requests are open."""

    __slots__ = ("checked", "requests", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.requests: dict[str, Record] = {}
        self.checked: dict[int, Checked] = {}  # by prompt, while the prompts are checked


def parsers_of(config: GatewayConfig, dialect: Dialect) -> Parsers:
    """By name from the settings, or by what the tokenizer has seen in the model's template. Raises
    UnknownName for a setting that is none."""
    tool, reasoning = config.tool_parser, config.reasoning_parser
    if tool == "auto":
        tool = dialect.tool_parser
    elif tool != "none":
        TOOL_PARSERS.get(tool)
    if reasoning == "auto":
        reasoning = dialect.reasoning_parser
    if reasoning in ("none", ""):
        reasoning = ""
    else:
        REASONING_PARSERS.get(reasoning)
    return Parsers(tool, reasoning)


class Gateway(Actor):
    accepts = gateway.In
    private: ClassVar[Any] = Sweep | Resume
    answers = Page | Load | Cleared | Recalled
    offload_threads: Mapping[str, int] = {"batches": 1}
    mailbox = MailboxSpec(count_max=65_536, bytes_max=256 << 20)

    def __init__(self, model: ModelConfig, gateway: GatewayConfig, paths: Paths) -> None:
        self.model = model
        self.config = gateway
        # More could only be refused further in, when work had been done for them.
        self.open_max = min(gateway.open_max, gateway.places or gateway.open_max)
        self.paths = paths
        self.ledger = Ledger()
        self.calls: dict[str, Open] = {}  # those that have not ended
        self.streams: dict[str, Stream] = {}  # those whose end has not been read
        self.down: set[str] = set()  # needed parts that are not in service
        self.is_draining = False
        self.is_stopping = False
        self.site: Site | None = None

    async def on_start(self) -> bytes:
        context = self.context
        self.tokenizer: Ref[tokenizer.In] = context.peer(self.paths.tokenizer)
        self.router: Ref[router.In] = context.peer(self.paths.router)
        self.metrics: Ref[metrics.In] = context.peer(self.paths.metrics)
        self.scheduler: Ref[scheduler.In] = context.peer(self.paths.scheduler)
        self.cache: Ref[cache.In] = context.peer(self.paths.cache)
        self.facts = msgspec.msgpack.decode(context.notes[self.paths.worker], type=Facts)
        note = context.notes.get(self.paths.tokenizer, b"")
        dialect = msgspec.msgpack.decode(note, type=Dialect) if note else Dialect()
        self.limits = Limits(
            config=self.config,
            model=self.model.name or self.facts.model,
            vocab_size=self.facts.vocab_size,
            parsers=parsers_of(self.config, dialect),
            defaults=dialect.defaults if self.config.sampling_defaults == "model" else Defaults(),
            context_len=self.facts.context_len,
            hidden_len=self.facts.hidden_len,
            vector_lens=self.facts.vector_lens,
        )
        context.gauge("histrio_streams_open", 0)  # what a life before this one had is gone
        self.ids = context.rng("call ids")
        self.seeds = context.rng("seeds")
        for path in self.needed():
            context.watch(path)
        if not self.config.http:
            return b""
        # Only a gateway with a street door pays for the HTTP libraries.
        from actors.gateway.site import Site

        self.site = Site(self)
        host, port = await self.site.open()
        context.log.info("listening", host=host, port=port)
        return msgspec.msgpack.encode({"host": host, "port": port})

    async def on_stop(self, reason: Reason) -> None:
        self.is_stopping = True
        for open_call in list(self.calls.values()):
            self._fail(open_call, unavailable("The server is shutting down."))
        if self.site is not None:
            await self.site.close()

    def on_end(self) -> None:
        """After a crash `on_stop` has not run: no reader may be left waiting, no port taken."""
        for open_call in list(self.calls.values()):
            open_call.stream.outbox.end(unavailable("The gateway failed; try again."))
            open_call.stream.ready.set()
        self.calls.clear()
        if self.site is not None:
            self.site.cut()

    def on_drain(self, message: Drain) -> None:
        self.is_draining = True
        self._settle()

    # For readers: HTTP and the Engine, on this loop

    def open(self, call: Call, call_id: str | None = None) -> Stream:
        """Starts a call. Raises Refused when the house is full or closing."""
        problem = self._open_problem(call)
        if problem is not None:
            self.context.count("histrio_requests_total", outcome="refused")
            raise Refused(problem)
        if not self.streams:
            self.context.start_timer("sweep", Sweep(), every_s=SWEEP_S)
        stream = Stream(self, call_id or self.new_id(), call)
        open_call = Open(stream)
        self.calls[stream.call_id] = open_call
        self.streams[stream.call_id] = stream
        self.context.gauge("histrio_streams_open", len(self.calls))
        encodes = check_encodes if call.checked_first else run_encodes
        self._add(open_call, encodes(call, stream.call_id, self.context.address))
        return stream

    def _open_problem(self, call: Call) -> Problem | None:
        if not self.is_open:
            return unavailable("The server is shutting down.")
        if call.request_count > self.open_max:
            message = f"A call may have at most {self.open_max} sequences."
            return Problem(fault=Fault.INVALID, message=message, param="n")
        if len(self.ledger) + call.request_count > self.open_max:
            message = "Too many requests are open; try again later."
            return Problem(fault=Fault.OVERLOADED, message=message, retry_after_s=1.0)
        return None

    def close(self, stream: Stream) -> None:
        """The reader has gone: cancels what still runs of its call."""
        open_call = self.calls.get(stream.call_id)
        if open_call is not None:
            stream.is_closed = True
            self._cancel_requests(open_call)
            message = "The stream was closed by its reader."
            self._end(open_call, Problem(fault=Fault.INTERNAL, message=message))
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """Its end has been read, or nobody will read it."""
        self.streams.pop(stream.call_id, None)
        self._settle()

    def new_id(self) -> str:
        return f"{self.ids.getrandbits(96):024x}"

    def draw_seed(self) -> int:
        return self.seeds.getrandbits(63)

    def needed(self) -> tuple[str, ...]:
        """The parts without which nothing can be generated."""
        paths = self.paths
        return (
            paths.tokenizer,
            paths.router,
            paths.scheduler,
            paths.cache,
            paths.worker,
            paths.detokenizer,
        )

    def missing(self) -> list[str]:
        """The needed parts that do not run, by the tree's own directory."""
        states = {row.path: row.state for row in self.context.actors()}
        serving = (State.RUNNING, State.DRAINING)
        return [path for path in self.needed() if states.get(path) not in serving]

    def impaired(self) -> list[str]:
        """What does not run, though this gateway can do without: other front ends, metrics."""
        needed = {*self.needed(), self.context.address.path}
        serving = (State.RUNNING, State.DRAINING)
        rows = self.context.actors()
        return [row.path for row in rows if row.state not in serving and row.path not in needed]

    @property
    def is_open(self) -> bool:
        """New calls are taken, though they may have to wait for a part that is down."""
        return not (self.is_draining or self.is_stopping)

    def actor_rows(self) -> list[ActorRow]:
        return self.context.actors()

    def ask_restart(self, path: str) -> bool:
        """False: there is no such actor."""
        if all(row.path != path for row in self.context.actors()):
            return False
        self.context.ask_restart(path)
        return True

    async def scrape(self) -> str | None:
        """The metrics as text; None when the metrics actor does not answer."""
        outcome = await self.context.ask(self.metrics, Scrape(), timeout_s=SCRAPE_TIMEOUT_S)
        if isinstance(outcome, Reply) and isinstance(outcome.message, Page):
            return outcome.message.text
        return None

    def abort(self, prefix: str) -> int:
        """Ends the requests that a client, or we, call by a name that begins so; all of them for
        an empty one. Returns how many of this gateway's they were; the others are told."""
        for path in self.paths.gateways:
            if path != self.context.address.path:
                other: Ref[gateway.In] = self.context.peer(path)
                other.tell(Abort(prefix))
        return self._abort(prefix)

    # Messages

    def on_abort(self, message: Abort) -> None:
        self._abort(message.prefix)

    async def on_recall(self, message: Recall) -> None:
        if self.site is None:
            self.context.reply(Recalled(problem=unavailable("There is no such door here.")))
        else:
            self.context.reply(await self.site.app.responses.local(message))

    def on_deltas(self, message: Deltas) -> None:
        now_s = self.context.now_s()
        for delta in message.rows:
            verdict, record = self.ledger.take(delta, now_s)
            if record is None or verdict is Verdict.DROPPED:
                continue
            if verdict is Verdict.GAP:
                self._interrupt_one(record)
            else:
                self._deliver(record, delta, now_s)
        if self.ledger.has_suspects:
            self.on_resume(Resume())
        self._settle()

    def on_encoded(self, message: Encoded) -> None:
        record = self.ledger.encoded(message, self.context.now_s())
        if record is None or not record.is_check:
            return
        if record.stage is Stage.CANCELLED:
            self._settle()
            return
        open_call = self.calls[record.call_id]
        del open_call.requests[record.request]
        open_call.checked[record.choice] = Checked(
            token_count=message.prompt_tokens, ids=message.prompt_ids, text=message.prompt_text
        )
        if not open_call.requests:
            self._run_checked(open_call)

    def on_failed(self, message: Failed) -> None:
        if message.problem.fault is Fault.UNAVAILABLE and not self.is_stopping:
            record = self.ledger.records.get(message.request)
            if record is not None and record.attempt == message.attempt:
                self._interrupt_one(record)
            return
        failed = self.ledger.failed(message)
        if failed is not None:
            self._lose(failed, message.problem)
            self._settle()

    def on_unknown(self, message: Unknown) -> None:
        for request, attempt in message.rows:
            record = self.ledger.unknown(request, attempt)
            if record is not None:
                self.context.log.warning("request lost", request=request, attempt=attempt)
                self._interrupt_one(record)
        self._settle()

    def on_up(self, up: Up) -> None:
        path = up.address.path
        if path in self.down and path == self.paths.tokenizer:
            # Cancels may have been lost with it; a second one is harmless.
            for cancel in self.ledger.cancels():
                self.tokenizer.tell(cancel, request=cancel.request)
        self.down.discard(path)
        self.on_resume(Resume())

    def on_down(self, down: Down) -> None:
        path = down.address.path
        if path not in self.needed():
            return
        self.down.add(path)
        blames = down.reason.cause is not Cause.STOPPED
        if path == self.paths.tokenizer:
            self._interrupt(lambda record: record.stage is Stage.ENCODING, blames=blames)
        elif path == self.paths.router:
            self._interrupt(
                lambda record: not record.token_count and not record.is_check, blames=blames
            )
        else:
            self._interrupt(lambda record: not record.is_check, blames=blames)

    def on_undelivered(self, notice: Undelivered) -> None:
        record = self.ledger.records.get(notice.request or "")
        if record is None or notice.kind != "Encode":
            return
        if notice.cause is Cause.FULL:
            del self.ledger.records[record.request]
            message = "Too many requests are waiting; try again later."
            self._lose(record, Problem(fault=Fault.OVERLOADED, message=message, retry_after_s=1.0))
            return
        if self.tokenizer.address is None:
            self.down.add(self.paths.tokenizer)
        self._interrupt_one(record)

    def on_resume(self, message: Resume) -> None:
        if self.down:
            return
        for record in self.ledger.ready(self.context.now_s()):
            self._send(record)
        if self.ledger.parked():
            self.context.start_timer("resume", Resume(), after_s=RESUME_S)
        else:
            self.context.cancel_timer("resume")

    def on_sweep(self, message: Sweep) -> None:
        now_s = self.context.now_s()
        late = unavailable(
            "A part of the server was lost, and was not back in time.", code="interrupted"
        )
        self._drop(self.ledger.expire(now_s, self.config.recover_s), late)
        silent = () if self.down else self.ledger.silent(now_s)
        if silent:
            rows = tuple((record.request, record.attempt) for record in silent)
            self.router.tell(Poll(rows, self.context.address))
        for stream in list(self.streams.values()):
            since_s = stream.outbox.unread_since_s
            if since_s is not None and now_s - since_s > self.config.stream_stall_s:
                self._cut(stream, "the client left it unread for too long")
        self._settle()

    def check(self) -> None:
        self.ledger.check()
        for call_id, open_call in self.calls.items():
            assert open_call.requests, f"{call_id} is open without a request"
            for request in open_call.requests:
                assert request in self.ledger.records, f"{request} has no record"

    # The way of a call

    def _run_checked(self, open_call: Open) -> None:
        """All prompts are valid: now the choices run."""
        stream = open_call.stream
        stream.checked = [open_call.checked[i] for i in range(len(stream.call.prompts))]
        if stream.call.prompt_only:
            for _ in range(0 if stream.call.measure else stream.call.request_count):
                self.context.count("histrio_requests_total", outcome=FinishReason.LENGTH.value)
            self._end(open_call)
            return
        encodes = run_encodes(stream.call, stream.call_id, self.context.address, stream.checked)
        self._add(open_call, encodes)

    def _add(self, open_call: Open, encodes: list[tokenizer.Encode]) -> None:
        now_s = self.context.now_s()
        for index, encode in enumerate(encodes):
            record = Record(encode, open_call.stream.call_id, index, now_s)
            self.ledger.add(record)
            open_call.requests[record.request] = record
            if not self.down:
                self._send(record)

    def _send(self, record: Record) -> None:
        for message in self.ledger.send(record, self.context.now_s()):
            self.tokenizer.tell(message, request=record.request)

    def _deliver(self, record: Record, delta: Delta, now_s: float) -> None:
        if record.stage is Stage.CANCELLED:
            self._count_abort(record)
            return
        if delta.finish is FinishReason.ERROR or delta.finish is FinishReason.ABORT:
            problem = delta.problem
            if problem is None:
                problem = unavailable("The request was aborted by the server.", code="aborted")
            self._lose(record, problem)
            return
        if delta.prompt_logprobs:
            self._pass_on(record, delta, now_s)
            return
        if record.last_s is None:
            waited_s = now_s - record.opened_s
            self.context.observe("histrio_ttft_seconds", waited_s, bounds=TTFT_BOUNDS)
        elif delta.token_count:
            gap_s = (now_s - record.last_s) / delta.token_count
            self.context.observe("histrio_inter_token_seconds", gap_s, bounds=TOKEN_BOUNDS)
        record.last_s = now_s
        if delta.finish is not None:
            self.context.count("histrio_requests_total", outcome=delta.finish.value)
            e2e_s = now_s - record.opened_s
            self.context.observe("histrio_e2e_seconds", e2e_s, bounds=E2E_BOUNDS)
        self._pass_on(record, delta, now_s)

    def _pass_on(self, record: Record, delta: Delta, now_s: float) -> None:
        open_call = self.calls[record.call_id]
        stream = open_call.stream
        unread = stream.outbox.push(Row(record.choice, delta), now_s)
        stream.wake()
        if delta.finish is not None:
            del open_call.requests[record.request]
            if not open_call.requests:
                self._end(open_call)
                return
        if unread > self.config.stream_bytes_max:
            self._cut(stream, "the client is too slow for it")

    def _lose(self, record: Record, problem: Problem) -> None:
        """The record has left the ledger with a failure, which is its call's."""
        if record.stage is Stage.CANCELLED:
            self._count_abort(record)
            return
        is_refusal = STATUS[problem.fault] < 500 or problem.fault is Fault.OVERLOADED
        self.context.count("histrio_requests_total", outcome="refused" if is_refusal else "error")
        open_call = self.calls.get(record.call_id)
        if open_call is not None:
            open_call.requests.pop(record.request, None)
            self._fail(open_call, problem)

    def _fail(self, open_call: Open, problem: Problem) -> None:
        self._cancel_requests(open_call)
        self._end(open_call, problem)

    def _cut(self, stream: Stream, why: str) -> None:
        """Gives its reader up: what waits for it is freed, what still runs for it cancelled."""
        problem = unavailable(f"The stream was cut: {why}.", code="stream_cut")
        self.context.count("histrio_streams_cut_total")
        stream.outbox.take()
        open_call = self.calls.get(stream.call_id)
        if open_call is not None:
            self._cancel_requests(open_call)
            self._end(open_call, problem)
        else:
            stream.outbox.problem = problem
        self.forget(stream)
        if stream.on_cut is not None:
            stream.on_cut()

    def _abort(self, prefix: str) -> int:
        count = 0
        for open_call in list(self.calls.values()):
            stream = open_call.stream
            is_whole = not prefix or any(name.startswith(prefix) for name in stream.names)
            for record in list(open_call.requests.values()):
                names = stream.request_names
                name = names[record.choice // stream.call.choice_count] if names else ""
                if not is_whole and not (name and name.startswith(prefix)):
                    continue
                count += 1
                if record.is_check:
                    message = "The request was aborted by the operator of the server."
                    self._fail(open_call, unavailable(message, code="aborted"))
                    break
                self._abort_one(open_call, record)
        return count

    def _abort_one(self, open_call: Open, record: Record) -> None:
        """Its reader gets what has come of it, and that it was aborted."""
        now_s = self.context.now_s()
        cancel = self.ledger.cancel(record, now_s)
        if cancel is not None:
            self.tokenizer.tell(cancel, request=record.request)
        if record.request not in self.ledger.records:
            self._count_abort(record)
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
        open_call.stream.outbox.push(Row(record.choice, end), now_s)
        open_call.stream.ready.set()
        del open_call.requests[record.request]
        if not open_call.requests:
            self._end(open_call)

    def _cancel_requests(self, open_call: Open) -> None:
        now_s = self.context.now_s()
        for record in open_call.requests.values():
            message = self.ledger.cancel(record, now_s)
            if message is not None:
                self.tokenizer.tell(message, request=record.request)
            if record.request not in self.ledger.records:
                self._count_abort(record)
        open_call.requests.clear()

    def _end(self, open_call: Open, problem: Problem | None = None) -> None:
        """The call is over; cancelled requests of it may still be in the ledger."""
        del self.calls[open_call.stream.call_id]
        open_call.stream.outbox.end(problem)
        open_call.stream.ready.set()
        self.context.gauge("histrio_streams_open", len(self.calls))
        self._settle()

    def _settle(self) -> None:
        if self.calls or self.streams or len(self.ledger):
            return
        self.context.cancel_timer("sweep")
        if self.is_draining:
            self.context.drained()

    def _interrupt(self, which: Callable[[Record], bool], *, blames: bool = False) -> None:
        now_s = self.context.now_s()
        result = self.ledger.interrupt(which, now_s, blames=blames)
        for record in result.given_up:
            self.context.log.error("parts die of a request", request=record.request)
        message = (
            "A part of the server failed each time that this request was running; it is not "
            "tried again."
        )
        self._drop(
            result, Problem(fault=Fault.INTERNAL, message=message, code="repeatedly_interrupted")
        )
        if result.parked:
            self.context.count("histrio_interruptions_total", len(result.parked))
            self.context.log.warning("requests interrupted", count=len(result.parked))
            for record in result.parked:
                self.context.log.debug("interrupted", request=record.request)
            if not self.down:
                self.context.start_timer("resume", Resume(), after_s=RESUME_S)

    def _interrupt_one(self, record: Record) -> None:
        self._interrupt(lambda other: other is record)

    def _drop(self, result: Interrupted, problem: Problem) -> None:
        for record in result.forgotten:
            self._count_abort(record)
        for record in result.given_up:
            self._lose(record, problem)

    def _count_abort(self, record: Record) -> None:
        if not record.is_check:
            outcome = FinishReason.ABORT.value
            self.context.count("histrio_requests_total", outcome=outcome)
