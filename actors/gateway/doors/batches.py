"""This file is the door of /v1/files and /v1/batches.

It does not know how they are kept or run. Without a folder in the settings they are off, and say
so. Laws: a file is on the disk before its upload is answered; all that is listed comes in pages.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from actors.gateway.batches.multipart import boundary_of, split_form
from actors.gateway.batches.store import BatchStore
from actors.gateway.doors.batch_runner import BatchRunner, dialects
from actors.gateway.errors import CLOSING, Refused, invalid
from actors.gateway.exchange import Exchange, json_response
from actors.gateway.inputs import decode
from actors.gateway.sse import encode
from messages.batches import (
    BatchBody,
    BatchList,
    BatchObject,
    ExpiresAfter,
    FileDeleted,
    FileList,
    FileObject,
)
from messages.types import Fault, Problem

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway

FILES = "/v1/files"
BATCHES = "/v1/batches"
FILES_MAX = 10_000
STORED_BYTES_MAX = 16 << 30  # of all files
OPEN_MAX = 1000  # batches that have not ended
CHUNK_BYTES = 256 << 10
METADATA_MAX = 16
UPLOADS_MAX = 4  # each is in memory while it comes in
ID_BYTES = 12
OPEN_TRIES, OPEN_WAIT_S = 50, 0.1
T = TypeVar("T")


class Batches:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.store: BatchStore | None = None
        self.is_closed = False
        self.runner: BatchRunner | None = None

    def routes(self) -> list[Route]:
        file, batch = FILES + "/{file_id}", BATCHES + "/{batch_id}"
        return [
            Route(FILES, Upload(self), methods=["POST"]),
            Route(FILES, self.list_files, methods=["GET"]),
            Route(file, self.get_file, methods=["GET"]),
            Route(file, self.delete_file, methods=["DELETE"]),
            Route(file + "/content", Content(self), methods=["GET"]),
            Route(BATCHES, CreateBatch(self), methods=["POST"]),
            Route(BATCHES, self.list_batches, methods=["GET"]),
            Route(batch, self.get_batch, methods=["GET"]),
            Route(batch + "/cancel", self.cancel_batch, methods=["POST"]),
        ]

    async def open(self) -> None:
        """From now on there are files, and batches run. Raises OSError, sqlite3.Error."""
        folder = self.gateway.config.batch_dir
        if not folder:
            return
        context = self.gateway.context
        for _ in range(OPEN_TRIES):
            try:
                opened = await context.in_thread(lambda: BatchStore(Path(folder)), lane="batches")
                break
            except sqlite3.OperationalError:  # another gateway makes it at the same moment
                await asyncio.sleep(OPEN_WAIT_S)
        else:
            opened = await context.in_thread(lambda: BatchStore(Path(folder)), lane="batches")
        self.store = opened
        self.runner = BatchRunner(self.gateway, self.store)
        self.runner.start()

    async def close(self) -> None:
        """What runs goes on in the next life."""
        self.is_closed = True
        if self.runner is not None:
            await self.runner.stop()
        if self.store is not None:
            await self.gateway.context.in_thread(self.store.close, lane="batches")
            self.store = None

    def cut(self) -> None:
        if self.runner is not None and self.runner.task is not None:
            self.runner.task.cancel()

    async def keep(self, work: Callable[[BatchStore], T]) -> T:
        """Something of the store, in a thread. Raises Refused where there is none, or none any
        more: this life is ending, and the next one has it."""
        if self.is_closed:
            raise Refused(CLOSING)
        store = self.store
        if store is None:
            message = "Files and batches are off: the server has no folder for them."
            raise Refused(Problem(fault=Fault.NOT_FOUND, message=message, code="not_enabled"))
        return await self.gateway.context.in_thread(lambda: work(store), lane="batches")

    # Files

    async def add_file(self, body: bytes, content_type: str) -> FileObject:
        """Raises Refused."""
        form = {part.name: part for part in split_form(body, boundary_of(content_type))}
        file = form.get("file")
        if file is None:
            raise invalid("The required field `file` is missing.", "file")
        purpose = form["purpose"].content.decode("utf-8", "replace") if "purpose" in form else ""
        if purpose != "batch":
            raise invalid("`purpose` must be batch.", "purpose")
        now_s = int(time.time())
        fields = {
            name: form[f"expires_after[{name}]"].content.decode("utf-8", "replace")
            for name in ("anchor", "seconds")
            if f"expires_after[{name}]" in form
        }
        expires_at = None
        if fields:
            try:
                after = msgspec.convert(fields, ExpiresAfter, strict=False)
            except msgspec.ValidationError:
                message = (
                    "`expires_after` needs `anchor: created_at` and 3600 to 2592000 `seconds`."
                )
                raise invalid(message, "expires_after") from None
            expires_at = now_s + after.seconds
        file_id = f"file-{new_id()}"
        name = (file.filename or "file")[:255]

        def add(store: BatchStore) -> FileObject:
            count, total = store.usage()
            if count >= FILES_MAX or total + len(file.content) > STORED_BYTES_MAX:
                message = "There is no room for another file; delete one."
                raise Refused(Problem(fault=Fault.TOO_LARGE, message=message, param="file"))
            return store.add_file(
                file_id,
                (file.content,),
                filename=name,
                purpose="batch",
                now_s=now_s,
                expires_at=expires_at,
            )

        return await self.keep(add)

    async def find_file(self, file_id: str) -> FileObject:
        found = await self.keep(lambda store: store.file(file_id, int(time.time())))
        if found is None:
            raise no_file(file_id)
        return found

    async def get_file(self, request: Request) -> Response:
        return json_response(await self.find_file(request.path_params["file_id"]))

    async def delete_file(self, request: Request) -> Response:
        found = await self.find_file(request.path_params["file_id"])
        await self.keep(lambda store: store.delete_file(found.id))
        return json_response(FileDeleted(id=found.id))

    async def list_files(self, request: Request) -> Response:
        query = request.query_params
        limit = read_limit(query.get("limit"), 10_000, 10_000)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("`order` must be asc or desc.", "order")
        files = await self.keep(
            lambda store: store.files(
                int(time.time()),
                after=query.get("after"),
                limit=limit,
                purpose=query.get("purpose"),
                newest_first=order == "desc",
            )
        )
        return json_response(FileList(**page(files, limit)))

    # Batches

    async def add_batch(self, body: bytes) -> BatchObject:
        """Raises Refused."""
        found = decode(body, _decoder)
        endpoints = dialects()
        if found.endpoint not in endpoints:
            message = f"`endpoint` must be one of {', '.join(endpoints)}."
            raise invalid(message, "endpoint")
        if len(found.metadata or ()) > METADATA_MAX:
            raise invalid(f"`metadata` may have at most {METADATA_MAX} entries.", "metadata")
        file = await self.keep(lambda store: store.file(found.input_file_id, int(time.time())))
        if file is None or file.purpose != "batch":
            raise invalid("`input_file_id` is no file for batches.", "input_file_id")
        batch_id = f"batch_{new_id()}"
        assert self.runner is not None
        owner = self.runner.owner

        def add(store: BatchStore) -> BatchObject:
            if store.open_count() >= OPEN_MAX:
                message = "Too many batches are open; try again later."
                raise Refused(Problem(fault=Fault.OVERLOADED, message=message))
            return store.add_batch(batch_id, found, owner, int(time.time()))

        batch = await self.keep(add)
        self.runner.notify()
        return batch

    async def find_batch(self, request: Request) -> BatchObject:
        batch_id = request.path_params["batch_id"]
        found = await self.keep(lambda store: store.batch(batch_id))
        if found is None:
            message = f"There is no batch `{batch_id[:100]}`."
            raise Refused(Problem(fault=Fault.NOT_FOUND, message=message, param="batch_id"))
        return found

    async def get_batch(self, request: Request) -> Response:
        return json_response(await self.find_batch(request))

    async def list_batches(self, request: Request) -> Response:
        query = request.query_params
        limit = read_limit(query.get("limit"), 20, 100)
        batches = await self.keep(
            lambda store: store.batches(after=query.get("after"), limit=limit)
        )
        return json_response(BatchList(**page(batches, limit)))

    async def cancel_batch(self, request: Request) -> Response:
        batch = await self.find_batch(request)
        before = ("validating", "in_progress")
        moved = await self.keep(
            lambda store: store.move(batch.id, before, "cancelling", int(time.time()))
        )
        found = await self.find_batch(request)
        if not moved and found.status not in ("cancelling", "cancelled"):
            message = f"A batch that is {found.status} cannot be cancelled."
            raise invalid(message, "batch_id")
        assert self.runner is not None
        self.runner.interrupt(batch.id)
        return json_response(found)


def new_id() -> str:
    """Of what outlives this run: the gateway's own ids come again in a run of the same seed."""
    return secrets.token_hex(ID_BYTES)


def no_file(file_id: str) -> Refused:
    message = f"There is no file `{file_id[:100]}`."
    return Refused(Problem(fault=Fault.NOT_FOUND, message=message, param="file_id"))


def read_limit(text: str | None, default: int, limit_max: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= limit_max):
        raise invalid(f"`limit` must be between 1 and {limit_max}.", "limit")
    return int(text)


def page(found: list[Any], limit: int) -> dict[str, Any]:
    data = found[:limit]
    return {
        "data": data,
        "first_id": data[0].id if data else None,
        "last_id": data[-1].id if data else None,
        "has_more": len(found) > limit,
    }


class Upload:
    """POST /v1/files: a form, whole in memory while it comes in."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.open_count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        await self.batches.keep(lambda store: None)  # refused before the body is read
        if self.open_count == UPLOADS_MAX:
            message = "Too many uploads at once; try again later."
            raise Refused(Problem(fault=Fault.OVERLOADED, message=message))
        self.open_count += 1
        try:
            made = await self.take(exchange)
        finally:
            self.open_count -= 1
        await exchange.respond(200, encode(made))

    async def take(self, exchange: Exchange) -> FileObject:
        config = self.batches.gateway.config
        body = await exchange.read_body(
            config.file_bytes_max, config.body_timeout_s, media="multipart/form-data"
        )
        return await self.batches.add_file(body, exchange.header(b"content-type") or "")


class Content:
    """GET /v1/files/{file_id}/content: in pieces, each within the client's time. Once begun it goes
    on while the site closes, for as long as that lets answers go out."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        found = await self.batches.find_file(scope["path_params"]["file_id"])
        try:
            source = await self.batches.keep(lambda store: store.path_of(found.id).open("rb"))
        except FileNotFoundError:  # deleted just now
            raise no_file(found.id) from None
        with source:
            length = str(found.bytes).encode()
            await exchange.start(
                200, ((b"content-type", b"application/jsonl"), (b"content-length", length))
            )
            in_thread = self.batches.gateway.context.in_thread
            while chunk := await in_thread(partial(source.read, CHUNK_BYTES), lane="batches"):
                await exchange.bounded(exchange.write(chunk))
            await exchange.write_last(b"")


class CreateBatch:
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        gateway = self.batches.gateway
        config = gateway.config
        if not gateway.is_open:
            raise Refused(CLOSING)
        body = await exchange.read_body(config.body_bytes_max, config.body_timeout_s)
        await exchange.respond(200, encode(await self.batches.add_batch(body)))


_decoder = msgspec.json.Decoder(BatchBody)
