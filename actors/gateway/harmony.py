"""This file reads the channels of gpt-oss's answer format.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"a": 1}<|call|>        … <|channel|>final<|message|>…<|return|>

It does not know what the channels mean to a client. Its markers are special tokens; text outside of
any channel belongs to the channel "".
Law: the joined pieces are the same however the text is cut.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from actors.gateway.tools.base import split

CHANNEL, START, MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class Piece(NamedTuple):
    """Some text of one message. `head`: the message begins here, and this was its header."""

    channel: str
    recipient: str | None
    text: str
    head: str = ""
    end: str = ""  # the message ends here, with this marker ("" also where it is only cut off)


class Harmony:
    """`feed` and `flush`, as the parsers have them."""

    def __init__(self) -> None:
        self.buffer = ""
        self.state = "outside"  # outside | header | body
        self.head = ""  # of the header, or of a body that has said nothing yet
        self.channel = ""
        self.recipient: str | None = None

    def feed(self, text: str, is_end: bool = False) -> list[Piece]:
        self.buffer += text
        pieces: list[Piece] = []
        while self.buffer and self._read(pieces, is_end):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        return self.feed("", True)

    def _read(self, pieces: list[Piece], is_end: bool) -> bool:
        markers = {
            "outside": (CHANNEL, START, *ENDS),
            "header": (MESSAGE,),
            "body": (CHANNEL, START, *ENDS),
        }[self.state]
        text, marker, self.buffer = split(self.buffer, markers, is_end)
        if self.state == "header":
            self.head += text
            if marker == MESSAGE:
                self._begin_body()
            return marker is not None
        if text:
            pieces.append(Piece(self.channel, self.recipient, text, self._take_head()))
        if marker is None:
            return False
        if self.state == "body":
            end = marker if marker in ENDS else ENDS[0]
            pieces.append(Piece(self.channel, self.recipient, "", self._take_head(), end))
        self.channel, self.recipient = "", None
        self.state = "outside" if marker in ENDS else "header"
        self.head = "" if marker in ENDS else marker
        return True

    def _begin_body(self) -> None:
        name = NAME.search(self.head)
        recipient = RECIPIENT.search(self.head)
        self.channel = name[1] if name else "final"
        self.recipient = recipient[1] if recipient else None
        self.head += MESSAGE
        self.state = "body"

    def _take_head(self) -> str:
        head, self.head = self.head, ""
        return head
