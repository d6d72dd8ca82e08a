"""This file reads calls written as Python: `[f(a=1, b="x"), g()]`, as Llama 3.2 and 4 do.

It executes nothing: the text is parsed, and only literal values of keywords are taken. A call comes
as a whole when its last parenthesis has come. It is one only where the answer begins so and names a
tool of the request.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence

from actors.gateway.tools.base import TOOL_PARSERS, Machine, ToolFormat
from actors.gateway.tools.scan import encodable

NAME = re.compile(r"[A-Za-z_][\w.\-]*")
WORDS = {"true": True, "false": False, "null": None, "none": None}
CALL_CHARS_MAX = 1 << 16
TAGS = ("<|python_start|>", "<|python_end|>")


class Pythonic(Machine):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.state = "begin"  # begin | first | next | call | text
        self.raw = ""  # read, and not yet said or part of a call
        self.depth = 0
        self.quote = ""
        self.escaped = False

    def run(self, is_end: bool) -> None:
        for place, character in enumerate(self.buffer):
            if self.state == "text":
                self.say(self.buffer[place:])
                break
            self.raw += character
            self.read(character)
        self.buffer = ""
        if is_end and self.state in ("begin", "first", "call", "next") and self.raw:
            if self.state != "next":
                self.say(self.raw)
            self.raw = ""

    def read(self, character: str) -> None:
        if self.state == "call":
            self.read_call(character)
        elif character.isspace():
            return
        elif self.state == "begin":
            if character == "[":
                self.state = "first"
            else:
                self.give_up()
        elif self.state == "next" and character in ",]":
            self.raw = ""
            self.state = "after" if character == "]" else "next"
        elif self.state == "after":
            self.give_up()
        elif NAME.match(character):
            self.state = "call"
        else:
            self.give_up()

    def read_call(self, character: str) -> None:
        if len(self.raw) > CALL_CHARS_MAX:
            self.give_up()
        elif self.quote:
            if self.escaped:
                self.escaped = False
            elif character == "\\":
                self.escaped = True
            elif character == self.quote:
                self.quote = ""
        elif character in "'\"":
            self.quote = character
        elif character in "([{":
            self.depth += 1
        elif character in ")]}":
            self.depth -= 1
            if self.depth < 0:
                self.give_up()
            elif not self.depth and character == ")":
                self.end_call()
        elif not self.depth and not (character.isalnum() or character in "_.-"):
            self.give_up()

    def end_call(self) -> None:
        found = read_call(self.raw.lstrip().removeprefix("[").strip())
        if found is None or found[0] not in self.names:
            self.give_up()
            return
        self.raw = ""
        self.state = "next"
        self.start(found[0])
        self.arguments(found[1])

    def give_up(self) -> None:
        """The rest is text."""
        self.state = "text"
        self.depth, self.quote = 0, ""
        self.say(self.raw)
        self.raw = ""


def read_call(source: str) -> tuple[str, str] | None:
    """Name and arguments as JSON; None if it is not a call with literal keywords."""
    match = NAME.match(source)
    if match is None:
        return None
    name = match.group()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in the model's strings
            tree = ast.parse(f"f{source[len(name) :]}", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        arguments = {word.arg: literal(word.value) for word in tree.keywords if word.arg}
        if len(arguments) != len(tree.keywords):
            return None
        return name, encodable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def literal(node: ast.expr) -> object:
    """Raises ValueError for what is no literal."""
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(literal(key)): literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    value: object = ast.literal_eval(node)
    return value


TOOL_PARSERS.register("pythonic")(ToolFormat(Pythonic))
