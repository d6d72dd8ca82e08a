"""This file runs batches: the oldest first, its lines side by side, behind all other traffic.

It does not know HTTP, nor how anything is kept (`actors/gateway/batches/store.py`). Lines go the
way of every call, with the least priority and a bounded number of them open.
Laws: a line is done when its result is on the disk, so that a batch goes on where it was after any
crash (a line may run twice, its result is kept once); what fails for want of room is tried again,
what fails by itself is the line's result; nothing runs while there is nothing to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from actors.gateway.batches.lines import answered, not_run, read_lines
from actors.gateway.batches.store import BatchStore, Line
from actors.gateway.dialect import Dialect, Head, Ready, time_from
from actors.gateway.doors.generate import DIALECTS
from actors.gateway.errors import Refused, answer, invalid
from actors.gateway.responses.alone import RESPONSES
from messages.batches import BatchError, BatchObject
from messages.types import Fault, Problem

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway
    from actors.gateway.stream import Stream

# Behind every priority that a client is likely to give; among themselves batches go by age.
BATCH_PRIORITY = -(1 << 30)
RETRY_S = (0.5, 30.0)  # the first wait, and the longest
# These have been tried again already, as often as is good.
FINAL_CODES = frozenset({"interrupted", "aborted", "stream_cut"})
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
T = TypeVar("T")


class Done(NamedTuple):
    status: int
    body: bytes


def dialects() -> dict[str, Dialect]:
    """What a batch may ask for, by path."""
    known = (*DIALECTS, RESPONSES)
    return {dialect.path: dialect for dialect in known if dialect.path in ENDPOINTS}


class BatchRunner:
    def __init__(self, gateway: Gateway, store: BatchStore) -> None:
        self.gateway = gateway
        self.store = store
        self.owner = gateway.context.address.path
        self.wake = asyncio.Event()
        self.stopped = asyncio.Event()  # of the batch that runs: cancelled, or out of time
        self.running: str | None = None
        self.streams: dict[Stream, None] = {}  # ordered, unlike a set of objects
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.run(), name="batches")

    def notify(self) -> None:
        """There may be something to do."""
        self.wake.set()

    def interrupt(self, batch_id: str) -> None:
        """It is cancelled: what runs of it ends now."""
        if batch_id == self.running:
            self.stopped.set()
            for stream in list(self.streams):
                stream.close()
        self.wake.set()

    async def stop(self) -> None:
        if self.task is None:
            return
        self.task.cancel()
        await asyncio.wait([self.task])
        self.task = None

    async def run(self) -> None:
        owners = self.gateway.paths.gateways
        if self.owner == owners[0]:
            await self.keep(lambda: self.store.adopt(self.owner, owners))
        while True:
            self.wake.clear()
            batch = await self.keep(lambda: self.store.next_batch(self.owner))
            if batch is None or not self.gateway.is_open:
                await self.wake.wait()
                continue
            try:
                await self.run_batch(batch)
            except MemoryError:
                raise
            except Exception:  # the gateway has clients: a batch that cannot be run waits
                self.gateway.context.log.exception("batch failed", batch=batch.id)
                await asyncio.sleep(RETRY_S[1])

    async def keep(self, work: Callable[[], T]) -> T:
        """Something of the store, in a thread."""
        return await self.gateway.context.in_thread(work, lane="batches")

    async def run_batch(self, batch: BatchObject) -> None:
        self.running = batch.id
        self.stopped.clear()
        store, log = self.store, self.gateway.context.log
        try:
            if batch.status == "validating":
                await self.keep(lambda: self.validate(batch))
            found = await self.keep(lambda: store.known(batch.id))
            if found.status == "in_progress":
                log.info("batch runs", batch=batch.id, requests=found.request_counts.total)
                await self.run_lines(found)
            ended = await self.keep(lambda: self.end(batch.id))
            log.info("batch", batch=batch.id, status=ended.status)
        finally:
            self.running = None
            for stream in list(self.streams):
                stream.close()

    def validate(self, batch: BatchObject) -> None:
        now_s = int(time.time())
        file = self.store.file(batch.input_file_id, now_s)
        if file is None:
            message = "The input file is not there any more."
            error = BatchError(code="file_not_found", message=message, param="input_file_id")
            self.store.fail(batch.id, [error], now_s)
            return
        content = self.store.path_of(file.id).read_bytes()
        lines, errors = read_lines(content, batch.endpoint)
        if errors:
            self.store.fail(batch.id, errors, now_s)
        else:
            self.store.start(batch.id, lines, now_s)

    async def run_lines(self, batch: BatchObject) -> None:
        """Until all have a result, or the batch is stopped."""
        taken = -1
        turn = asyncio.Lock()

        async def work() -> None:
            nonlocal taken
            while not self.stopped.is_set():
                async with turn:
                    line = await self.keep(partial(self.store.take_line, batch.id, taken))
                    if line is None:
                        return
                    taken = line.number
                await self.run_line(batch, line)

        left_s = max(0.0, batch.expires_at - time.time())
        try:
            async with asyncio.timeout(left_s), asyncio.TaskGroup() as group:
                for _ in range(self.gateway.config.batch_running_max):
                    group.create_task(work())
        except TimeoutError:
            return  # `end` will find it expired

    async def run_line(self, batch: BatchObject, line: Line) -> None:
        wait_s = RETRY_S[0]
        while not self.stopped.is_set():
            call_id = self.gateway.new_id()
            try:
                done = await self.answer(batch.endpoint, line.body, call_id)
            except Refused as refused:
                if self.stopped.is_set():
                    return
                if is_for_now(refused.problem):
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, RETRY_S[1])
                    continue
                refusal = answer(refused.problem)
                done = Done(refusal.status, refusal.body)
            except MemoryError:
                raise
            except Exception:  # one line fails, not its batch
                self.gateway.context.log.exception("batch request failed", request=call_id)
                message = "The server failed on this request."
                refusal = answer(Problem(fault=Fault.INTERNAL, message=message))
                done = Done(refusal.status, refusal.body)
            line_id = f"batch_req_{batch.id.removeprefix('batch_')}_{line.number}"
            result = answered(line_id, line.custom_id, done.status, call_id, done.body)
            is_failed = done.status != 200
            put = partial(self.store.put_result, batch.id, line.number, result)
            await self.keep(partial(put, is_failed=is_failed))
            self.gateway.context.count("histrio_batch_requests_total", status=str(done.status))
            return

    async def answer(self, endpoint: str, body: bytes, call_id: str) -> Done:
        """One line, like a request that is not streamed. Raises Refused."""
        gateway, dialect = self.gateway, dialects()[endpoint]
        created_s = time.time()
        now_s = time_from(created_s, gateway.context.now_s)
        try:
            asked = dialect.read(body, gateway.limits, gateway.draw_seed, created_s)
        except Ready as ready:
            return Done(200, ready.body)
        if asked.stream:
            raise invalid("A request of a batch cannot be streamed.", "stream")
        call = msgspec.structs.replace(asked.call, priority=BATCH_PRIORITY)
        stream = gateway.open(call, call_id)
        self.streams[stream] = None
        try:
            head = Head(
                dialect.prefix + call_id, int(created_s), gateway.limits.model, created_s, now_s
            )
            rows = await stream.read()
            writer = dialect.plain(asked, head, stream.checked)
            while rows:
                writer.add(rows)
                rows = await stream.read()
            return Done(200, writer.body(stream.checked))
        finally:
            self.streams.pop(stream, None)
            stream.close()

    def end(self, batch_id: str) -> BatchObject:
        """Whatever has brought the batch to its end."""
        store, now_s = self.store, int(time.time())
        batch = store.known(batch_id)
        if batch.status == "failed":
            return batch
        status = "completed"
        if batch.status == "cancelling":
            status = "cancelled"
        elif undone := store.undone(batch_id):
            if now_s < batch.expires_at:
                return batch  # interrupted; it goes on later
            status = "expired"
            message = "The request could not be run before the batch expired."
            for line in undone:
                line_id = f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}"
                result = not_run(line_id, line.custom_id, "batch_expired", message)
                store.put_result(batch_id, line.number, result, is_failed=True)
        if status == "completed":
            store.move(batch_id, ("in_progress",), "finalizing", now_s)
        stem = "file-" + batch_id.removeprefix("batch_")
        return store.finish(batch_id, status, stem + "o", stem + "e", now_s)


def is_for_now(problem: Problem) -> bool:
    """It would go with more room, or once a part is back."""
    if problem.code in FINAL_CODES:
        return False
    return problem.fault in (Fault.OVERLOADED, Fault.UNAVAILABLE)
