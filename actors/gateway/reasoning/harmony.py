"""This file reads the reasoning of gpt-oss: the channel `analysis`.

Messages to a recipient are passed on as they came, markers and all, for the tool parser to read.
"""

from __future__ import annotations

from actors.gateway.harmony import Harmony, Piece
from actors.gateway.reasoning.base import REASONING_PARSERS, Event, Reasoning, ReasoningFormat
from actors.gateway.tools.base import Text


class HarmonyReasoning:
    def __init__(self) -> None:
        self.channels = Harmony()

    def feed(self, text: str) -> list[Event]:
        return [event for piece in self.channels.feed(text) for event in events_of(piece)]

    def flush(self) -> list[Event]:
        return [event for piece in self.channels.flush() for event in events_of(piece)]

    @property
    def is_thinking(self) -> bool | None:
        channels = self.channels
        if channels.state == "body":
            return channels.channel == "analysis" and channels.recipient is None
        return None if channels.state == "header" or channels.buffer else False


def events_of(piece: Piece) -> list[Event]:
    if piece.recipient is not None:
        text = piece.head + piece.text + piece.end
        return [Text(text)] if text else []
    if not piece.text:
        return []
    return [Reasoning(piece.text) if piece.channel == "analysis" else Text(piece.text)]


REASONING_PARSERS.register("gpt-oss", "harmony")(
    ReasoningFormat(HarmonyReasoning, shows_special=True)
)
