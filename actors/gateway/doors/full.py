"""This file turns requests away before they cost anything, while the house is full or closing.

It does not know sockets: it is given the bytes of a request, and gives those of the answer. Who is
turned away here is counted as any other; the log is told once a second, of all together.
Law: None for what `plain.py` does not read, and where the key is not valid; the ordinary way then
decides, and refuses in the same words.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from actors.gateway.access import Access
from actors.gateway.doors.generate import DIALECTS
from actors.gateway.errors import answer, is_anthropic, voiced
from actors.gateway.exchange import usable_id
from actors.gateway.plain import read_plain
from messages.types import Problem

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway

TELL_S = 1.0
CLOSES = b"connection: close\r\n"


class Away(NamedTuple):
    """What a request is turned away with."""

    data: bytes
    closes: bool  # the connection ends with it


class Made(NamedTuple):
    """An answer but for its id: it lies between `head` and `rest`."""

    status: str
    head: bytes
    rest: bytes
    id_twice: bool


class Full:
    def __init__(self, gateway: Gateway, access: Access) -> None:
        self.gateway = gateway
        self.access = access
        self.paths = frozenset(row.path.encode() for row in DIALECTS if row.needs_place)
        self._made: dict[tuple[str, str], Made] = {}  # by path and message
        self._untold_count = 0
        self._teller: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        return self.gateway.full_problem() is not None

    def turn_away(self, data: bytes) -> Away | None:
        """`data` is what has come on a connection on which nothing is being served."""
        problem = self.gateway.full_problem()
        if problem is None:
            return None
        found = read_plain(data, self.paths)
        if found is None:
            return None
        path, headers, closes = found
        closes = closes or not self.gateway.is_open
        if not self.access.is_open:
            keys = (headers.get(b"authorization"), headers.get(b"x-api-key"))
            given = [None if key is None else key.decode("latin-1") for key in keys]
            if self.access.judge(path, *given) is not None:
                return None
        made = self._made.get((path, problem.message)) or self._make(path, problem)
        name = usable_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        line = f"x-request-id: {name or self.gateway.new_id()}\r\n".encode()
        if made.id_twice:
            line += line[2:]
        self._note(path, made.status)
        return Away(made.head + line + (CLOSES if closes else b"") + made.rest, closes)

    def close(self) -> None:
        if self._teller is not None:
            self._teller.cancel()
            self._tell()

    def _make(self, path: str, problem: Problem) -> Made:
        refusal = answer(problem)
        status, body = voiced(path, refusal.status, refusal.body)
        phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nretry-after: {refusal.retry_after_s}\r\n"
        made = Made(str(status), head.encode(), b"\r\n" + body, is_anthropic(path))
        self._made[path, problem.message] = made
        return made

    def _note(self, path: str, status: str) -> None:
        count = self.gateway.context.count
        count("histrio_requests_total", outcome="refused")
        count("histrio_http_requests_total", path=path, status=status)
        self._untold_count += 1
        if self._teller is None:
            self._teller = asyncio.get_running_loop().call_later(TELL_S, self._tell)

    def _tell(self) -> None:
        self._teller = None
        self.gateway.context.log.info("turned away", count=self._untold_count)
        self._untold_count = 0
