"""This file is the door of the Responses API: create, get, cancel, delete, and what was asked.

It does not know the dialect (`actors/gateway/responses/`) nor how a call runs. What it keeps is in
this process's memory, as much as the settings say, and is gone with it. With several gateways on
one port an id ends with the number of the one that keeps it, and the others ask that one.
Laws: an answer is kept once it is whole, and from its begin if it is made in the background; a
client that leaves has its call closed, but for one that is made in the background; the stream of
that one can be come back to, behind any of its events, as long as it is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from actors.gateway.dialect import PING, Head
from actors.gateway.doors.asking import body_of, counting_refusals, watch
from actors.gateway.doors.tapes import Retrieve, Tapes
from actors.gateway.errors import Refused, invalid, unavailable
from actors.gateway.exchange import (
    SSE_HEADERS,
    Exchange,
    json_response,
    read_news,
    read_rows,
    uncollected,
)
from actors.gateway.openai import Ask
from actors.gateway.responses.reading import as_input, decode_responses, input_items, read_responses
from actors.gateway.responses.store import Kept, ResponseStore
from actors.gateway.responses.tape import Tape
from actors.gateway.responses.writing import ResponseWriter
from actors.gateway.sse import encode
from actors.runtime.context import Ref, Reply
from messages import gateway as gateway_messages
from messages.gateway import Recall, Recalled
from messages.responses import DeletedReply, InputItem, InputPart, ItemList, ResponsesBody
from messages.types import Fault, Problem

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway
    from actors.gateway.stream import Stream

PATH = "/v1/responses"
LIST_MAX = 100
RECALL_TIMEOUT_S = 5.0
Items = tuple[InputItem, ...]


class Asked:
    """A body, read: what is to be made of it, and what will be kept."""

    def __init__(
        self,
        body: ResponsesBody,
        ask: Ask,
        head: Head,
        history: tuple[InputItem, ...],
        fresh: tuple[InputItem, ...],
    ) -> None:
        self.body = body
        self.ask = ask
        self.history = history
        self.fresh = fresh
        self.writer = ResponseWriter(body, ask, head)
        self.tape: Tape | None = None


class Responses:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        config = gateway.config
        gateways, own = gateway.paths.gateways, gateway.context.address.path
        self.number = gateways.index(own) if own in gateways else 0
        self.tasks: dict[str, asyncio.Task[None]] = {}  # of the background
        self.tapes = Tapes(self)
        self.store = ResponseStore(config.responses_max, config.responses_bytes_max)

    def routes(self) -> list[Route]:
        one = PATH + "/{response_id}"
        return [
            Route(PATH, Create(self), methods=["POST"]),
            Route(one, Retrieve(self), methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(one + "/cancel", self.cancel, methods=["POST"]),
            Route(one + "/input_items", self.input_items, methods=["GET"]),
        ]

    async def read(self, body: bytes, call_id: str, created_s: float) -> Asked:
        """Raises Refused."""
        gateway = self.gateway
        with uncollected():
            found = decode_responses(body)
            fresh = input_items(found)
        history = (*await self.before(found.previous_response_id), *fresh)
        with uncollected():
            ask = read_responses(found, history, gateway.limits, gateway.draw_seed, created_s)
        head = Head(f"resp_{call_id}{self.number:02x}", int(created_s), gateway.limits.model)
        return Asked(found, ask, head, history, fresh)

    async def before(self, response_id: str | None) -> tuple[InputItem, ...]:
        """All that was said up to an answer, itself included."""
        if response_id is None:
            return ()
        try:
            return msgspec.json.decode(await self.recall(response_id, "history"), type=Items)
        except Refused as refused:
            problem = refused.problem
            if problem.fault is Fault.NOT_FOUND:
                code = "previous_response_not_found"
                raise invalid(problem.message, "previous_response_id", code) from None
            raise Refused(structs.replace(problem, param="previous_response_id")) from None

    async def recall(self, response_id: str, verb: str) -> bytes:
        """Something of a response, from whoever keeps it. Raises Refused."""
        return (await self.recalled(Recall(response_id, verb))).data

    async def recalled(self, message: Recall) -> Recalled:
        """Raises Refused."""
        response_id = message.response
        path = self.owner(response_id)
        context = self.gateway.context
        if path is None:
            found = await self.local(message)
        else:
            ref: Ref[gateway_messages.In] = context.peer(path)
            outcome = await context.ask(ref, message, timeout_s=RECALL_TIMEOUT_S)
            if isinstance(outcome, Reply) and isinstance(outcome.message, Recalled):
                found = outcome.message
            else:
                problem = unavailable("The part of the server that keeps this response is down.")
                raise Refused(problem)
        if found.problem is not None:
            raise Refused(found.problem)
        return found

    def owner(self, response_id: str) -> str | None:
        """The gateway that keeps it; None: this one, or nobody."""
        gateways = self.gateway.paths.gateways
        end = response_id[-2:]
        number = int(end, 16) if len(end) == 2 and set(end) <= set("0123456789abcdef") else None
        if number is None or number == self.number or number >= len(gateways):
            return None
        return gateways[number]

    async def local(self, message: Recall) -> Recalled:
        """Something of a response that is kept here."""
        try:
            if message.verb == "events":
                return self.tapes.local(self.find(message.response), message.after)
            return Recalled(await self.local_data(message.response, message.verb))
        except Refused as refused:
            return Recalled(problem=refused.problem)

    async def local_data(self, response_id: str, verb: str) -> bytes:
        """Raises Refused."""
        kept = self.find(response_id)
        match verb:
            case "history":
                if kept.reply.status not in ("completed", "incomplete"):
                    message = f"The response `{response_id[:100]}` is {kept.reply.status}."
                    raise invalid(message, "response_id")
                return encode((*kept.history, *map(as_input, kept.reply.output)))
            case "asked":
                return encode(kept.input)
            case "delete":
                self.store.remove(response_id)
                if kept.cancel is not None:
                    kept.cancel()
                return encode(DeletedReply(id=response_id, object="response"))
            case "cancel":
                return encode((await self.cancelled(kept)).reply)
            case _:
                return encode(kept.reply)

    async def cancelled(self, kept: Kept) -> Kept:
        if not kept.reply.background:
            raise invalid("Only a response with `background` can be cancelled.", "response_id")
        if kept.cancel is not None:
            kept.cancel()
            if kept.reply.id in self.tasks:
                await asyncio.wait([self.tasks[kept.reply.id]])
            return self.find(kept.reply.id)
        return kept

    def find(self, response_id: str) -> Kept:
        kept = self.store.get(response_id)
        if kept is None:
            message = f"There is no response `{response_id[:100]}` here (any more)."
            raise Refused(Problem(fault=Fault.NOT_FOUND, message=message, param="response_id"))
        return kept

    def keep(self, asked: Asked, cancel: Callable[[], None] | None = None) -> None:
        reply = asked.writer.reply
        if reply.store:
            self.store.put(Kept(reply, asked.history, asked.fresh, cancel, asked.tape))

    def begin(self, asked: Asked, call_id: str) -> None:
        """Makes an answer in the background, on a tape if it is to be streamed. Raises Refused."""
        if not self.store.count_max:
            raise invalid("`background` needs a server that keeps responses.", "background")
        stream = self.gateway.open(asked.ask.call, call_id)
        response_id = asked.writer.reply.id
        stream.names = (response_id, call_id)
        first = asked.writer.begin()
        if asked.body.stream:
            asked.tape = self.tapes.begin(response_id, first)
        self.keep(asked, stream.close)
        task = asyncio.create_task(self.make(asked, stream), name=f"response {call_id}")
        self.tasks[response_id] = task
        task.add_done_callback(lambda _: self.tasks.pop(response_id, None))

    async def make(self, asked: Asked, stream: Stream) -> None:
        writer = asked.writer
        response_id = writer.reply.id
        try:
            rows = await stream.read()
            self.tapes.record(response_id, asked.tape, writer.start())
            if self.store.get(response_id) is not None:
                self.keep(asked, stream.close)
            while rows:
                self.tapes.record(response_id, asked.tape, writer.write(rows))
                rows = await stream.read()
            self.tapes.record(response_id, asked.tape, writer.end(int(time.time())))
        except Refused as refused:
            if stream.is_closed:
                writer.cancel()
            else:
                self.tapes.record(response_id, asked.tape, writer.fail(refused.problem))
        except MemoryError:
            raise
        except Exception:  # one answer fails, not the gateway with all that it has open
            self.gateway.context.log.exception("response failed", request=stream.call_id)
            message = "The server failed on this request."
            self.tapes.record(
                response_id, asked.tape, writer.fail(Problem(fault=Fault.INTERNAL, message=message))
            )
        finally:
            stream.close()
            self.tapes.end(response_id, asked.tape)
        if self.store.get(response_id) is not None:
            self.keep(asked)

    async def delete(self, request: Request) -> Response:
        return await self.answer(request, "delete")

    async def cancel(self, request: Request) -> Response:
        return await self.answer(request, "cancel")

    async def answer(self, request: Request, verb: str) -> Response:
        data = await self.recall(request.path_params["response_id"], verb)
        return Response(data, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        asked = msgspec.json.decode(await self.recall(response_id, "asked"), type=Items)
        query = request.query_params
        limit = query.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= LIST_MAX):
            raise invalid(f"`limit` must be between 1 and {LIST_MAX}.", "limit")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("`order` must be asc or desc.", "order")
        items = [identified(item, response_id, i) for i, item in enumerate(asked)]
        if order == "desc":
            items.reverse()
        after = query.get("after")
        ids = [item.id for item in items]
        if after is not None:
            if after not in ids:
                raise invalid("`after` is no item of this response.", "after")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        listed = ItemList(data=page, first_id=first, last_id=last, has_more=len(items) > len(page))
        return json_response(listed)


def identified(item: InputItem, response_id: str, index: int) -> InputItem:
    """With an id, the type said, and content as parts: as the dialect lists items."""
    content = item.content
    if isinstance(content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        content = [InputPart(type=kind, text=content)]
    item_id = item.id or f"item_{response_id.removeprefix('resp_')}_{index}"
    return structs.replace(item, id=item_id, content=content)


class Create:
    """POST /v1/responses, an ASGI application of its own: see `Generate`."""

    def __init__(self, responses: Responses) -> None:
        self.responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self.responses.gateway
        exchange: Exchange = scope["exchange"]
        asked = await self.read(exchange)
        if asked.body.background:
            self.responses.begin(asked, exchange.made_id)
            reply = asked.writer.reply
            if asked.body.stream:
                await self.responses.tapes.follow(exchange, reply.id, 0)
            else:
                await exchange.respond(200, encode(reply))
            return
        stream = gateway.open(asked.ask.call, exchange.made_id)
        stream.on_cut = exchange.abort
        stream.names = (asked.writer.reply.id, exchange.made_id)
        if exchange.given_id is not None:
            stream.names += (exchange.given_id,)
        watcher = asyncio.create_task(watch(exchange, stream))
        try:
            if asked.body.stream:
                await self.answer_stream(exchange, asked, stream)
            else:
                await self.answer_plain(exchange, asked, stream)
        finally:
            watcher.cancel()
            stream.close()

    async def read(self, exchange: Exchange) -> Asked:
        gateway = self.responses.gateway
        created_s = time.time()
        with counting_refusals(gateway):
            body = await body_of(gateway, exchange, needs_place=True)
            return await self.responses.read(body, exchange.made_id, created_s)

    async def answer_plain(self, exchange: Exchange, asked: Asked, stream: Stream) -> None:
        rows = await read_rows(stream)
        asked.writer.begin()
        while rows:
            asked.writer.write(rows)
            rows = await read_rows(stream)
        asked.writer.end(int(time.time()))
        self.responses.keep(asked)
        await exchange.respond(200, encode(asked.writer.reply))

    async def answer_stream(self, exchange: Exchange, asked: Asked, stream: Stream) -> None:
        writer = asked.writer
        stream.pings = True
        begun = False
        try:
            while (rows := await read_news(stream)) is None or rows:
                if exchange.status is None:
                    await exchange.start(200, SSE_HEADERS)
                data = PING if rows is None else b"" if begun else writer.begin()
                if rows is not None:
                    begun = True
                    data += writer.write(rows)
                if data:
                    stream.is_quiet = rows is None
                    await exchange.write(data)
            last = writer.end(int(time.time()))
        except Refused as refused:
            if exchange.status is None:
                raise
            last = (b"" if begun else writer.begin()) + writer.fail(refused.problem)
        self.responses.keep(asked)
        await exchange.write_last(last)
