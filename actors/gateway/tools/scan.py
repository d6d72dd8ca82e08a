"""This file reads JSON as it comes: where a value ends, and the two members of a call.

It does not know markers or formats. It checks no more of the JSON than it needs to find its end:
what the model wrote is passed on as written.
Laws: what is found does not depend on how the text is cut; each character is looked at once; no
recursion, so that nesting costs nothing.
"""

from __future__ import annotations

import json

BLANK = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters")


class ValueScan:
    """One JSON value. `feed` says how many characters belong to it."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind", "is_broken", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._kind = ""  # first character
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def kind(self) -> str:
        """The first character: `{`, `[`, `"`, or that of a number or word."""
        return self._kind

    def feed(self, text: str) -> int:
        for place, character in enumerate(text):
            if not self._kind:
                if character in "}],:":
                    self.is_broken = True
                    return place
                self._kind = character
                if character not in '{["':
                    continue
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
                    if not self._depth:
                        self.is_done = True
                        return place + 1
            elif self._kind in '{["':
                if character == '"':
                    self._in_string = True
                elif character in "{[":
                    self._depth += 1
                elif character in "}]":
                    self._depth -= 1
                    if not self._depth:
                        self.is_done = True
                        return place + 1
            elif character in ",}]" or character in BLANK:
                self.is_done = True  # a number or a word ends before what follows it
                return place
        return len(text)


class ObjectScan:
    """One object with a name and arguments, in either order; other members are passed over."""

    __slots__ = (
        "_arguments",
        "_key",
        "_raw",
        "_state",
        "_value",
        "has_arguments",
        "is_broken",
        "is_done",
        "name",
    )

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self.name: str | None = None
        self.has_arguments = False  # their value has begun
        self._arguments = ""  # not taken yet
        self._state = "{"
        self._key = ""
        self._raw = ""  # of the key or value that is being read
        self._value = ValueScan()

    def feed(self, text: str) -> int:
        """How many characters were read: all, unless the object has ended or is broken."""
        place = 0
        while place < len(text) and not (self.is_done or self.is_broken):
            if self._state in ("key", "value") and self._value.kind:
                place += self._feed_value(text[place:])
            elif text[place] in BLANK:
                place += 1
            else:
                place += self._feed_mark(text[place])
        return place

    def take_arguments(self) -> str:
        """What has come of the arguments since the last time; `{}` for a call that has none."""
        text, self._arguments = self._arguments, ""
        if self.is_done and not self.has_arguments:
            self.has_arguments = True
            return "{}"
        return text

    def _feed_mark(self, character: str) -> int:
        """One character between members, or the first of a key or value (which stays unread)."""
        state = self._state
        if state == "{" and character == "{":
            self._state = "first"
        elif character == "}" and state in ("first", ","):
            self.is_done = True
            self.is_broken = self.name is None
        elif character == '"' and state in ("first", "next"):
            self._state = "key"
            self._begin_value(character)
        elif character == ":" and state == ":":
            self._state = "value?"
        elif state == "value?" and character not in "}],:":
            self._state = "value"
            self._begin_value(character)
        elif character == "," and state == ",":
            self._state = "next"
        else:
            self.is_broken = True
            return 0
        return 1

    def _begin_value(self, character: str) -> None:
        self._value = ValueScan()
        self._value.feed(character)
        self._raw = character
        if self._state == "value" and self._key in ARGUMENT_KEYS and not self.has_arguments:
            self.has_arguments = True
            if character == "{":
                self._arguments = character
            self._key = "\0arguments"

    def _feed_value(self, text: str) -> int:
        used = self._value.feed(text)
        part = text[:used]
        if self._key == "\0arguments" and self._value.kind == "{":
            self._arguments += part
        else:
            self._raw += part
        if self._value.is_broken:
            self.is_broken = True
        elif self._value.is_done:
            self._end_value()
        return used

    def _end_value(self) -> None:
        if self._state == "key":
            self._key = str(loads(self._raw) or "")
            self._state = ":"
            return
        self._state = ","
        if self._key == "\0arguments":
            if self._value.kind != "{":
                self._arguments = arguments_of(self._raw)
        elif self._key == "name" and self.name is None:
            name = loads(self._raw)
            if isinstance(name, str) and name:
                self.name = name
            else:
                self.is_broken = True


def arguments_of(raw: str) -> str:
    """Arguments that are no object: some models write their JSON as a string, or null for none."""
    value = loads(raw)
    if value is None:
        return "{}"
    return value if isinstance(value, str) else raw


def loads(raw: str) -> object:
    """The value, or None if it is none. A text can be encoded."""
    try:
        value: object = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
    return encodable(value) if isinstance(value, str) else value


def encodable(text: str) -> str:
    """Halves of surrogate pairs, which a model may write as escapes, become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
