"""This file is the operator's door: flush, abort, pause, and what the server says of itself.

It does not know how any of it is done: the cache, the scheduler and the gateways are asked. Who may
come here `access.py` says.
Laws: an answer says what has happened, not what was asked for; what the server says of itself is an
allow-list, without keys, paths or addresses.
"""

from __future__ import annotations

import asyncio
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from actors.gateway.errors import Refused, invalid, unavailable
from actors.gateway.exchange import Exchange, json_response
from actors.gateway.inputs import decode
from actors.runtime.context import Ref, Reply
from messages.base import Message
from messages.cache import Clear, Cleared
from messages.native import AbortBody, Done, LoadReply, Loads, ModelInfo, PauseBody, ServerInfo
from messages.scheduler import Continue, Inspect, Load, Pause

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway

ASK_TIMEOUT_S = 5.0
FLUSH_WAIT_MAX_S = 60.0
FLUSH_AGAIN_S = 0.05
A = TypeVar("A", bound=Message)


class Control:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.abort_decoder = msgspec.json.Decoder(AbortBody)
        self.pause_decoder = msgspec.json.Decoder(PauseBody)

    def routes(self) -> list[Route]:
        return [
            Route("/flush_cache", self.flush, methods=["GET", "POST"]),
            Route("/abort_request", self.abort, methods=["POST"]),
            Route("/pause_generation", self.pause, methods=["POST"]),
            Route("/continue_generation", self.go_on, methods=["POST"]),
            Route("/v1/loads", self.loads),
            Route("/server_info", self.server_info),
            Route("/get_server_info", self.server_info),
            Route("/model_info", self.model_info),
            Route("/get_model_info", self.model_info),
        ]

    async def flush(self, request: Request) -> Response:
        """Refused while requests hold pages, after a wait of `timeout` seconds if it is given."""
        left_s = read_timeout(request.scope["query_string"])
        while True:
            cleared = await self.ask(self.gateway.controls.cache, Clear(), Cleared)
            if not cleared.leased_count:
                return done(f"The cache is empty: {cleared.freed_count} pages were forgotten.")
            if left_s <= 0.0:
                raise invalid(
                    f"The cache was not flushed: requests that run hold {cleared.leased_count} "
                    "pages.",
                    None,
                    "requests_running",
                )
            await asyncio.sleep(min(FLUSH_AGAIN_S, left_s))
            left_s -= FLUSH_AGAIN_S

    async def abort(self, request: Request) -> Response:
        given = decode(await self.body(request), self.abort_decoder)
        if given.abort_all:
            prefix = ""
        elif given.rid:
            prefix = given.rid
        else:
            raise invalid("Either `rid` or `abort_all` is needed.", "rid")
        count = self.gateway.abort(prefix)
        # Other gateways of this server have been told; what they have aborted is not known here.
        return done(f"Requests aborted by this gateway: {count}.")

    async def pause(self, request: Request) -> Response:
        """`abort` ends all requests first; those that come later wait."""
        given = decode(await self.body(request) or b"{}", self.pause_decoder)
        load = await self.ask(
            self.gateway.controls.scheduler, Pause(retract=given.mode == "retract"), Load
        )
        if given.mode == "abort":
            self.gateway.abort("")
        return done(f"Paused; requests waiting: {load.waiting_count}.")

    async def go_on(self, request: Request) -> Response:
        await self.body(request)
        load = await self.ask(self.gateway.controls.scheduler, Continue(), Load)
        return done(f"Going on; requests waiting: {load.waiting_count}.")

    async def loads(self, request: Request) -> Response:
        load = await self.ask(self.gateway.controls.scheduler, Inspect(), Load)
        return json_response(LoadReply(loads=[loads_of(load)]))

    async def server_info(self, request: Request) -> Response:
        gateway = self.gateway
        facts, config = gateway.facts, gateway.config
        load = await self.ask(gateway.controls.scheduler, Inspect(), Load)
        info = ServerInfo(
            version=version(),
            model=self.info(),
            device=facts.device,
            page_size=facts.page_size,
            max_total_num_tokens=facts.page_count * facts.page_size,
            choices_max=config.choices_max,
            prompts_max=config.prompts_max,
            open_max=config.open_max,
            body_bytes_max=config.body_bytes_max,
            open_calls=len(gateway.calls.open),
            internal_states=[loads_of(load)],
        )
        return json_response(info)

    async def model_info(self, request: Request) -> Response:
        return json_response(self.info())

    def info(self) -> ModelInfo:
        gateway = self.gateway
        facts, limits = gateway.facts, gateway.limits
        return ModelInfo(
            model_path=limits.model,
            tokenizer_path=limits.model,
            served_model_name=limits.model,
            context_length=facts.context_len,
            vocab_size=facts.vocab_size,
            parameter_count=facts.parameter_count,
            dtype=facts.dtype,
            tool_call_parser=limits.parsers.tool or None,
            reasoning_parser=limits.parsers.reasoning or None,
        )

    async def body(self, request: Request) -> bytes:
        exchange: Exchange = request.scope["exchange"]
        config = self.gateway.config
        return await exchange.read_body(config.body_bytes_max, config.body_timeout_s)

    async def ask(self, ref: Ref[Any], message: Message, kind: type[A]) -> A:
        """The answer. Raises Refused where there is none."""
        outcome = await self.gateway.context.ask(ref, message, timeout_s=ASK_TIMEOUT_S)
        if isinstance(outcome, Reply) and isinstance(outcome.message, kind):
            return outcome.message
        raise Refused(unavailable("A part of the server did not answer."))


def read_timeout(query: bytes) -> float:
    """Seconds. Raises Refused."""
    given = parse_qs(query.decode("latin-1")).get("timeout", ["0"])[-1]
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= FLUSH_WAIT_MAX_S:
        raise invalid(f"`timeout` must be between 0 and {FLUSH_WAIT_MAX_S:g} seconds.", "timeout")
    return value


def done(message: str) -> Response:
    return json_response(Done(success=True, message=message))


def version() -> str:
    try:
        return metadata.version("histrio")
    except metadata.PackageNotFoundError:
        return "0"


def loads_of(load: Load) -> Loads:
    return Loads(
        num_running_reqs=load.running_count,
        num_waiting_reqs=load.waiting_count,
        num_total_reqs=load.running_count + load.waiting_count,
        num_used_tokens=load.used_len,
        max_total_num_tokens=load.capacity_len,
        token_usage=load.used_len / max(1, load.capacity_len),
        utilization=load.running_count / max(1, load.running_max),
        max_running_requests=load.running_max,
        num_waiting_tokens=load.waiting_len,
        cache_hit_rate=load.cached_tokens / max(1, load.prompt_tokens),
        is_paused=load.is_paused,
    )
