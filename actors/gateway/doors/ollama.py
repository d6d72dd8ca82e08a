"""This file is the door of the Ollama dialect beside what generates: which models there are.

It does not know how answers are made (`ollama.py`, `ollama_replies.py`). There is one model, and it
stays: routes that fetch, copy or delete models are not here.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from actors.gateway.doors.control import version
from actors.gateway.errors import invalid
from actors.gateway.exchange import Exchange, json_response
from actors.gateway.inputs import decode
from actors.gateway.ollama import named
from actors.gateway.ollama_replies import moment
from messages.ollama import Card, Details, Show, ShowBody, Tags, Version

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway

FOREVER = "9999-12-31T23:59:59Z"  # when the model is unloaded


class Ollama:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.started = moment(time.time())
        self.show_decoder = msgspec.json.Decoder(ShowBody)

    def routes(self) -> list[Route]:
        return [
            Route("/api/version", self.version),
            Route("/api/tags", self.tags),
            Route("/api/ps", self.ps),
            Route("/api/show", self.show, methods=["POST"]),
        ]

    async def version(self, request: Request) -> Response:
        return json_response(Version(version=version()))

    async def tags(self, request: Request) -> Response:
        return json_response(Tags(models=[self.card()]))

    async def ps(self, request: Request) -> Response:
        card = msgspec.structs.replace(
            self.card(),
            expires_at=FOREVER,
            size_vram=0 if self.gateway.facts.device == "cpu" else self.card().size,
            context_length=self.gateway.facts.context_len,
        )
        return json_response(Tags(models=[card]))

    async def show(self, request: Request) -> Response:
        exchange: Exchange = request.scope["exchange"]
        config = self.gateway.config
        body = await exchange.read_body(config.body_bytes_max, config.body_timeout_s)
        given = decode(body, self.show_decoder)
        name = given.model or given.name
        if not name:
            raise invalid("The required field `model` is missing.", "model")
        limits, facts = self.gateway.limits, self.gateway.facts
        model = named(name, limits)
        capabilities = ["completion"]
        if limits.parsers.tool != "none":
            capabilities.append("tools")
        if limits.parsers.reasoning:
            capabilities.append("thinking")
        show = Show(
            modelfile=f"FROM {model}\n",
            parameters="",
            template="",
            details=self.details(),
            model_info={
                "general.architecture": "model",
                "general.basename": model,
                "general.parameter_count": facts.parameter_count,
                "model.context_length": facts.context_len,
                "model.vocab_size": facts.vocab_size,
            },
            capabilities=capabilities,
            modified_at=self.started,
        )
        return json_response(show)

    def details(self) -> Details:
        facts = self.gateway.facts
        return Details(
            format="gguf" if self.gateway.model.path.endswith(".gguf") else "safetensors",
            parameter_size=rounded(facts.parameter_count),
            quantization_level=facts.dtype,
        )

    def card(self) -> Card:
        model, facts = self.gateway.limits.model, self.gateway.facts
        identity = f"{model} {facts.parameter_count} {facts.vocab_size} {facts.dtype}"
        return Card(
            name=model,
            model=model,
            modified_at=self.started,
            size=size_of(self.gateway.model.path),
            digest=hashlib.sha256(identity.encode()).hexdigest(),
            details=self.details(),
        )


def rounded(count: int) -> str:
    """1234567890 is 1.2B."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return str(count)


def size_of(path: str) -> int:
    """Bytes of the model's files; 0 where they are not to be seen from here."""
    if not path:
        return 0
    try:
        found = Path(path)
        if found.is_file():
            return found.stat().st_size
        return sum(file.stat().st_size for file in found.iterdir() if file.is_file())
    except OSError:
        return 0
