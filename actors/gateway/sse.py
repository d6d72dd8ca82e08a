"""This file frames server-sent events.

It does not know what the events mean. An event is `data: ` + one line + an empty line; JSON escapes
newlines, so a JSON text is always one line.
Law: `Template.fill(text)` is the frame of the event that the template was made from, with its
marked string replaced by `text`; nothing else of the event is encoded again, so that an event
costs one string escape and one join.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
# Stands for the text in an event that is made into a template. It contains no character that JSON
# escapes, and no event has it by itself.
MARK = "\ue000text\ue000"

_encoder = msgspec.json.Encoder()
encode = _encoder.encode


def frame(data: bytes) -> bytes:
    """One event. `data` has no newline."""
    return b"data: " + data + b"\n\n"


class Template:
    """An event whose one string changes: everything around it is encoded once."""

    __slots__ = ("prefix", "suffix")

    def __init__(self, event: Any) -> None:
        parts = frame(encode(event)).split(encode(MARK))
        assert len(parts) == 2, "an event of a template has the mark exactly once"
        self.prefix, self.suffix = parts

    def fill(self, text: str) -> bytes:
        return self.prefix + encode(text) + self.suffix
