"""This file sends requests, and again those that the loss of a part has interrupted.

It does not know calls or their readers. What a loss means for a request, `record.py` decides; this
file knows which parts are down, sends and keeps time. Each method that may end requests returns
them, gone from the ledger, with why: their calls are the caller's business.
Law: nothing is sent while a needed part is known to be down.
"""

from __future__ import annotations

from typing import NamedTuple

from actors.gateway.errors import unavailable
from actors.gateway.record import Interrupted, Ledger, Record, Stage
from actors.runtime.context import Context, Ref
from messages import router, tokenizer
from messages.config import Paths
from messages.gateway import Unknown
from messages.scheduler import Poll
from messages.system import Cause, Down, Undelivered, Up
from messages.types import Fault, Problem

RESUME_S = 0.1  # how often interrupted requests are looked at, when no part is known to be down


class Resume(NamedTuple):
    """Send the interrupted requests again, if all parts are there."""


class Lost(NamedTuple):
    """A request that has left the ledger without an end of its own."""

    record: Record
    problem: Problem | None  # None: it was cancelled, and its terminal message will not come


def overloaded(message: str) -> Problem:
    return Problem(fault=Fault.OVERLOADED, message=message, retry_after_s=1.0)


class Recovery:
    context: Context  # the gateway's; `start` sets these three
    tokenizer: Ref[tokenizer.In]
    router: Ref[router.In]

    def __init__(self, paths: Paths, recover_s: float) -> None:
        self.paths = paths
        self.recover_s = recover_s
        self.ledger = Ledger()
        self.down: set[str] = set()  # needed parts that are not in service
        # The parts without which nothing can be generated.
        self.needed = (
            paths.tokenizer,
            paths.router,
            paths.scheduler,
            paths.cache,
            paths.worker,
            paths.detokenizer,
        )

    def start(self, context: Context) -> None:
        self.context = context
        self.tokenizer = context.peer(self.paths.tokenizer)
        self.router = context.peer(self.paths.router)
        for path in self.needed:
            context.watch(path)

    def add(self, record: Record) -> None:
        """A new request: sent now, or as soon as all parts are there."""
        self.ledger.add(record)
        if not self.down:
            self._send(record)

    def cancel(self, record: Record) -> bool:
        """Nobody reads it any more. True: it has left the ledger at once; otherwise it leaves with
        its terminal message."""
        message = self.ledger.cancel(record, self.context.now_s())
        if message is not None:
            self.tokenizer.tell(message, request=record.request)
        return record.request not in self.ledger.records

    def resume(self) -> None:
        """Sends what may be sent again, if all parts are there."""
        if self.down:
            return
        for record in self.ledger.ready(self.context.now_s()):
            self._send(record)
        if self.ledger.parked():
            self.context.start_timer("resume", Resume(), after_s=RESUME_S)
        else:
            self.context.cancel_timer("resume")

    def up(self, up: Up) -> None:
        path = up.address.path
        if path in self.down and path in (self.paths.tokenizer, self.paths.router):
            # Cancels may have been lost with it, or what they were to end; again does no harm.
            cancels = self.ledger.cancels()
            for cancel in cancels:
                self.tokenizer.tell(cancel, request=cancel.request)
            if cancels:
                rows = tuple((cancel.request, cancel.attempt) for cancel in cancels)
                self.router.tell(Poll(rows, self.context.address))
        self.down.discard(path)
        self.resume()

    def lose_part(self, down: Down) -> list[Lost]:
        path = down.address.path
        if path not in self.needed:
            return []
        self.down.add(path)
        blames = down.reason.cause is not Cause.STOPPED
        records = [record for record in self.ledger if not record.is_check]
        if path == self.paths.tokenizer:
            records = [record for record in self.ledger if record.stage is Stage.ENCODING]
        elif path == self.paths.router:
            # Of a cancelled one the scheduler may go on, where it was the cancel that was lost.
            stages = (Stage.ENCODING, Stage.RUNNING)
            records = [r for r in records if not r.token_count and r.stage in stages]
        return self._interrupt(records, blames=blames)

    def interrupt(self, record: Record) -> list[Lost]:
        """It alone; nobody died of it."""
        return self._interrupt([record])

    def unknown(self, message: Unknown) -> list[Lost]:
        lost = []
        for request, attempt in message.rows:
            record = self.ledger.unknown(request, attempt)
            if record is not None:
                self.context.log.warning("request lost", request=request, attempt=attempt)
                lost += self.interrupt(record)
        return lost

    def undelivered(self, notice: Undelivered) -> list[Lost]:
        record = self.ledger.records.get(notice.request or "")
        if record is None or notice.kind != "Encode":
            return []
        if notice.cause is Cause.FULL:
            del self.ledger.records[record.request]
            return [Lost(record, overloaded("Too many requests are waiting; try again later."))]
        if self.tokenizer.address is None:
            self.down.add(self.paths.tokenizer)
        return self.interrupt(record)

    def sweep(self) -> list[Lost]:
        """Ends the waits that are over, and asks for the requests of which nothing is heard."""
        now_s = self.context.now_s()
        late = unavailable(
            "A part of the server was lost, and was not back in time.", code="interrupted"
        )
        lost = losses(self.ledger.expire(now_s, self.recover_s), late)
        silent = () if self.down else self.ledger.silent(now_s)
        if silent:
            rows = tuple((record.request, record.attempt) for record in silent)
            self.router.tell(Poll(rows, self.context.address))
        return lost

    def _send(self, record: Record) -> None:
        for message in self.ledger.send(record, self.context.now_s()):
            self.tokenizer.tell(message, request=record.request)

    def _interrupt(self, records: list[Record], *, blames: bool = False) -> list[Lost]:
        result = self.ledger.interrupt(records, self.context.now_s(), blames=blames)
        log = self.context.log
        for record in result.given_up:
            log.error("parts die of a request", request=record.request)
        if result.parked:
            self.context.count("histrio_interruptions_total", len(result.parked))
            log.warning("requests interrupted", count=len(result.parked))
            for record in result.parked:
                log.debug("interrupted", request=record.request)
            if not self.down:
                self.context.start_timer("resume", Resume(), after_s=RESUME_S)
        message = (
            "A part of the server failed each time that this request was running; it is not "
            "tried again."
        )
        return losses(
            result, Problem(fault=Fault.INTERNAL, message=message, code="repeatedly_interrupted")
        )


def losses(result: Interrupted, problem: Problem) -> list[Lost]:
    return [
        *(Lost(record, None) for record in result.forgotten),
        *(Lost(record, problem) for record in result.given_up),
    ]
