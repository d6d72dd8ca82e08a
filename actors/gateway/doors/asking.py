"""This file is what the routes that make calls do alike: before one runs, and while it runs.

It does not know dialects. Laws: a refusal is counted once; who has no place is refused before the
body costs its reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from actors.gateway.errors import CLOSING, Refused
from actors.gateway.exchange import Exchange, HttpRefused

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway
    from actors.gateway.stream import Stream


@contextmanager
def counting_refusals(gateway: Gateway) -> Iterator[None]:
    try:
        yield
    except (Refused, HttpRefused):
        gateway.context.count("histrio_requests_total", outcome="refused")
        raise


async def body_of(gateway: Gateway, exchange: Exchange, *, needs_place: bool) -> bytes:
    """Raises Refused, HttpRefused, Gone."""
    config = gateway.config
    if not gateway.is_open:
        raise Refused(CLOSING)
    body = await exchange.read_body(config.body_bytes_max, config.body_timeout_s)
    problem = gateway.full_problem() if needs_place else None
    if problem is not None:
        raise Refused(problem)
    return body


async def watch(exchange: Exchange, stream: Stream) -> None:
    """Closes the call when its client leaves; the reader then finds its stream closed."""
    while (await exchange.receive())["type"] != "http.disconnect":
        pass
    stream.close()
