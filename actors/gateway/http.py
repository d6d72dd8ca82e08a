"""This file is the street door: routes, bodies in, responses out. Only it imports Starlette.

It does not know sockets (`site.py`), nor what a call means or how it is served: bodies become
calls and rows become bytes in the dialects' own files, and the gateway opens and closes calls.
Laws: a response starts only when its first event is known, so that errors have their status; a
client that leaves has its call closed, in whatever state it is; every error is the dialect's error
object; nothing a client sends or holds back keeps memory or a socket longer than the settings say.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from actors.gateway.access import Access, Cors
from actors.gateway.doors.batches import Batches
from actors.gateway.doors.control import Control, version
from actors.gateway.doors.full import Full
from actors.gateway.doors.generate import generate_routes
from actors.gateway.doors.ollama import Ollama
from actors.gateway.doors.responses import Responses
from actors.gateway.doors.resume import Resumes
from actors.gateway.errors import Refused, answer, answer_http, unavailable
from actors.gateway.exchange import (
    Exchange,
    Gone,
    HttpRefused,
    abort,
    json_response,
)
from actors.gateway.openapi import document
from actors.gateway.page import POLICY, status_page
from messages.openai import ModelCard, ModelList
from messages.types import Fault, Problem

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway

QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})


class App:
    """The ASGI application: routes, refusals, one log line, one count."""

    def __init__(self, gateway: Gateway, access: Access | None = None) -> None:
        self.gateway = gateway
        self.access = access or Access()
        self.cors = Cors(gateway.config.cors_origins)
        self.started_s = int(time.time())
        self.responses = Responses(gateway)
        self.resumes = Resumes(gateway)
        self.batches = Batches(gateway)
        self.full = Full(gateway, self.access)
        self.description: bytes | None = None  # made when somebody asks
        self.router = Router(
            [
                Route("/", self.index),
                Route("/health", self.health),
                Route("/ready", self.ready),
                Route("/metrics", self.metrics),
                Route("/openapi.json", self.openapi),
                Route("/actors", self.actors),
                Route("/actors/{path:path}/restart", self.restart, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{model:path}", self.model),
                *Control(gateway).routes(),
                *Ollama(gateway).routes(),
                *generate_routes(gateway, self.resumes),
                *self.responses.routes(),
                *self.batches.routes(),
            ],
            redirect_slashes=False,
            default=self.unknown,
        )
        routes = [route for route in self.router.routes if isinstance(route, Route)]
        self.labels = {route.path for route in routes}
        self.endpoints = {id(route.endpoint): route.path.replace(":path", "") for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self.serve(scope, receive, send)
        except MemoryError as error:
            # No fault of this request, and nothing to answer with: its client comes back, as those
            # of all others, which end with this process.
            self.gateway.context.crash(error)
            abort(scope)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin_s = self.gateway.context.now_s()
        stall_s = self.gateway.config.stream_stall_s
        exchange = Exchange(scope, receive, send, self.gateway.new_id(), stall_s)
        scope["app"] = self  # makes the router raise for a wrong method
        scope["exchange"] = exchange
        try:
            await self.answer(scope, receive, exchange)
        finally:
            self.count(exchange, self.gateway.context.now_s() - begin_s)

    async def answer(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        try:
            if not await self.admit(exchange):
                return
            await self.router(scope, receive, exchange.send)
        except Gone:
            return
        except Refused as refused:
            await exchange.refuse(answer(refused.problem))
        except HttpRefused as refused:
            await exchange.refuse(refused.answer)
        except HTTPException as error:
            allowed = (error.headers or {}).get("Allow", "")
            message = f"{scope['method'][:20]} is not allowed here; allowed: {allowed}."
            refusal = answer_http(error.status_code, message)
            headers = ((b"allow", allowed.encode()),) if allowed else ()
            await exchange.respond(refusal.status, refusal.body, headers)
        except MemoryError:
            raise
        except Exception:
            self.gateway.context.log.exception("request failed", **ids(exchange))
            problem = Problem(fault=Fault.INTERNAL, message="The server failed on this request.")
            if exchange.status is None:
                await exchange.refuse(answer(problem))
            else:
                await self.break_off(exchange, problem)

    async def break_off(self, exchange: Exchange, problem: Problem) -> None:
        """Ends a response that has begun: by an event that says so, or else by its connection."""
        try:
            last = b"" if exchange.fail is None else exchange.fail(problem)
        except Exception:
            last = b""
        if last:
            await exchange.write_last(last)
        else:
            exchange.abort()

    async def admit(self, exchange: Exchange) -> bool:
        """Before any route: who asks, and from which page. False: it is answered already."""
        scope = exchange.scope
        origin = exchange.header(b"origin")
        if self.cors.is_on:
            exchange.extra_headers = self.cors.headers(origin)
            asked = exchange.header(b"access-control-request-method")
            if scope["method"] == "OPTIONS" and origin is not None and asked is not None:
                headers = exchange.header(b"access-control-request-headers")
                await exchange.start(204, self.cors.preflight(headers))
                await exchange.write_last(b"")
                return False
        authorization, x_api_key = exchange.header(b"authorization"), exchange.header(b"x-api-key")
        denied = self.access.judge(scope["path"], authorization, x_api_key)
        if denied is None:
            return True
        headers_of = ((b"www-authenticate", b"Bearer"),) if denied.status == 401 else ()
        refusal = answer_http(denied.status, denied.message)
        await exchange.respond(denied.status, refusal.body, headers_of)
        return False

    def count(self, exchange: Exchange, elapsed_s: float) -> None:
        """One count for each request, and one log line for those that are no probes."""
        path = exchange.scope["path"]
        label = path if path in self.labels else "other"  # of one that no route has seen
        label = self.endpoints.get(id(exchange.scope.get("endpoint")), label)
        # A client that left before its answer began has no status; 499 is what proxies log for it.
        status = exchange.status or 499
        context = self.gateway.context
        context.count("histrio_http_requests_total", path=label, status=str(status))
        if path in QUIET_PATHS and status < 500:
            return
        context.log.info(
            "http",
            method=exchange.scope["method"],
            path=label,
            status=status,
            seconds=round(elapsed_s, 4),
            **ids(exchange),
        )

    async def unknown(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise HttpRefused(404, f"There is no {scope['method'][:20]} {scope['path'][:200]} here.")

    # What the house says of itself

    async def index(self, request: Request) -> Response:
        gateway = self.gateway
        rows = await gateway.controls.look()
        page = status_page(
            gateway.limits.model, gateway.controls.missing(), rows, len(gateway.calls.open)
        )
        headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
        return Response(page, media_type="text/html", headers=headers)

    async def health(self, request: Request) -> Response:
        """200 as long as this gateway can serve. Names what it can do without, too."""
        missing = self.gateway.controls.missing()
        impaired = [] if missing else self.gateway.controls.impaired()
        if impaired:
            return json_response({"status": "ok", "impaired": impaired})
        return self.state_of(missing)

    async def ready(self, request: Request) -> Response:
        gateway = self.gateway
        missing = gateway.controls.missing()
        if not missing and (gateway.recovery.down or not gateway.is_open):
            missing = sorted(gateway.recovery.down) or [gateway.context.address.path]
        return self.state_of(missing)

    def state_of(self, missing: list[str]) -> Response:
        if not missing:
            return json_response({"status": "ok"})
        refusal = answer(unavailable("Not serving: " + ", ".join(missing) + "."))
        error = msgspec.json.decode(refusal.body)
        body = {"status": "unavailable", "missing": missing, **error}
        return json_response(body, refusal.status, {"retry-after": str(refusal.retry_after_s)})

    async def metrics(self, request: Request) -> Response:
        text = await self.gateway.controls.scrape()
        if text is None:
            raise Refused(unavailable("The metrics are not available now."))
        return Response(text, media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        if self.description is None:
            self.description = document("Histrio", version())
        return Response(self.description, media_type="application/json")

    async def actors(self, request: Request) -> Response:
        rows = []
        for row in await self.gateway.controls.look():
            entry = msgspec.structs.asdict(row)
            if row.last_exit is not None:
                entry["last_exit"] = msgspec.structs.asdict(row.last_exit)
            rows.append(entry)
        return json_response(rows)

    async def restart(self, request: Request) -> Response:
        """A new life for one actor, and for those that depend on it. Streams go on."""
        path = request.path_params["path"]
        if not self.gateway.controls.ask_restart(path):
            raise HttpRefused(404, f"There is no actor {path[:200]} here.")
        return json_response({"restarting": path}, 202)

    async def models(self, request: Request) -> Response:
        return json_response(ModelList(data=[self.card()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        card = self.card()
        if name != card.id:
            message = f"The model `{name[:200]}` does not exist here."
            raise Refused(
                Problem(
                    fault=Fault.NOT_FOUND, message=message, param="model", code="model_not_found"
                )
            )
        return json_response(card)

    def card(self) -> ModelCard:
        name = self.gateway.limits.model
        return ModelCard(
            id=name,
            created=self.started_s,
            root=name,
            max_model_len=self.gateway.facts.context_len,
        )


def ids(exchange: Exchange) -> dict[str, str]:
    """What a log line calls a request: our id, and the client's."""
    given = {} if exchange.given_id is None else {"client_request": exchange.given_id}
    return {"request": exchange.made_id, **given}
