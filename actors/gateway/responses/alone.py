"""This file makes an answer of the Responses API that nothing goes on from: a line of a batch.

It does not know batches nor the store. It is a row of the table of `actors/gateway/dialect.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from actors.gateway.call import Call, Checked, Row
from actors.gateway.dialect import Dialect, Head
from actors.gateway.errors import invalid
from actors.gateway.inputs import Limits
from actors.gateway.openai import Ask
from actors.gateway.responses.reading import decode_responses, input_items, read_responses
from actors.gateway.responses.writing import ResponseWriter
from actors.gateway.sse import encode
from messages.responses import ResponsesBody


class Alone(NamedTuple):
    body: ResponsesBody
    ask: Ask

    @property
    def call(self) -> Call:
        return self.ask.call

    @property
    def stream(self) -> bool:
        return self.ask.stream


def read_alone(body: bytes, limits: Limits, draw: Callable[[], int], created_s: float) -> Alone:
    """Raises Refused."""
    found = decode_responses(body)
    for name in ("previous_response_id", "background"):
        if getattr(found, name):
            raise invalid(f"`{name}` is not supported in a batch.", name)
    return Alone(found, read_responses(found, input_items(found), limits, draw, created_s))


class AloneWriter:
    def __init__(self, asked: Alone, head: Head, checked: Sequence[Checked]) -> None:
        self.writer = ResponseWriter(asked.body, asked.ask, head)
        self.now_s = head.now_s

    def add(self, rows: Iterable[Row]) -> None:
        self.writer.write(rows)

    def body(self, checked: Sequence[Checked]) -> bytes:
        self.writer.end(int(self.now_s()))
        return encode(self.writer.reply)


RESPONSES = Dialect("/v1/responses", "resp_", read_alone, AloneWriter)
