"""This file reads the tool calls of gpt-oss: messages of any channel to `functions.NAME`.

It does not know reasoning: what is in other messages is text. See `actors/gateway/harmony.py` for
the form.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.gateway.harmony import CHANNEL, MESSAGE, START, Harmony, Piece
from actors.gateway.tools.base import TOOL_PARSERS, Machine, Signature, Tag, Tags, ToolFormat
from actors.gateway.tools.scan import ValueScan

PREFIX, CONSTRAIN = "functions.", "<|constrain|>"


class HarmonyCalls(Machine):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.channels = Harmony()
        self.value = ValueScan()
        self.has_arguments = False

    def run(self, is_end: bool) -> None:
        pieces = self.channels.feed(self.buffer, is_end)
        self.buffer = ""
        for piece in pieces:
            if piece.recipient is not None and piece.recipient.startswith(PREFIX):
                self.read(piece)
            else:
                self.say(piece.text)

    def read(self, piece: Piece) -> None:
        if piece.head:
            self.start(piece.recipient[len(PREFIX) :] if piece.recipient else "")
            self.value, self.has_arguments = ValueScan(), False
        text = piece.text if self.has_arguments else piece.text.lstrip()
        if text and not self.value.is_done:
            self.has_arguments = True
            self.arguments(text[: self.value.feed(text)])
        if piece.end and not self.has_arguments:
            self.arguments("{}")


def tags(tools: Sequence[Signature]) -> Tags:
    """Every header is one that is known: a call's, or that of a message without a recipient."""
    heads: list[tuple[str, object]] = [
        (f"{CHANNEL}{channel}{MESSAGE}", None) for channel in ("analysis", "commentary", "final")
    ]
    for tool in tools:
        head = f"{CHANNEL}commentary to={PREFIX}{tool.name}"
        heads += [
            (f"{head}{form}{MESSAGE}", tool.schema) for form in ("", " json", f" {CONSTRAIN}json")
        ]
    return Tags(
        [
            Tag(before[0] if before else CHANNEL, "".join(before) + head, schema)
            for before in ((), (START, "assistant"))
            for head, schema in heads
        ]
    )


TOOL_PARSERS.register("gpt-oss", "harmony")(ToolFormat(HarmonyCalls, shows_special=True, tags=tags))
