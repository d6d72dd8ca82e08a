"""This file is where chat templates run. They come with model files, and so from strangers: they
see only what they are given, can change none of it, and have a bounded amount of work.

It does not know chats. The dialect is the one that templates are written for: trimmed blocks,
`break` and `continue`, `tojson` that leaves letters as they are, `raise_exception`, `generation`
blocks. Work is counted where it can grow without bound: iterations, calls, the characters of every
text that is built, and all that is in a value of which a text is made, or that is compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, MappingView
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, cast

from jinja2 import Environment, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

STEPS_MAX = 1_000_000  # about a second
CALL_STEPS = 4  # what a call costs, against an iteration
WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)")
INTEGER_BITS_MAX = 4096
NUMBER_MAX = 1024  # of an argument that says how much a filter makes
# Methods that make a text as long as a number says, or bytes, which have such methods.
GROWING = frozenset({"center", "encode", "expandtabs", "ljust", "rjust", "translate", "zfill"})
# Filters that look no deeper into a value than they are counted for.
SHALLOW = frozenset(
    """attr batch count d default first items last length list map reject rejectattr select
    selectattr slice""".split()
)
NUMBERED = frozenset({"batch", "indent", "round", "slice"})
SEEKING = frozenset({"count", "index"})  # methods that compare
# Tests that look into their values.
DEEP_TESTS = frozenset(
    """!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper""".split()
)


class Exhausted(Exception):
    """The template did more than a template needs to."""


class Raised(TemplateError):
    """The template itself refused, with `raise_exception`."""


class Work:
    """What one rendering may still do."""

    def __init__(self, chars_max: int) -> None:
        self.text_max = chars_max  # characters in one text
        self.steps_left = STEPS_MAX
        self.chars_left = 400 * chars_max  # in all texts together

    def step(self, count: int = 1) -> None:
        self.steps_left -= count
        if self.steps_left < 0:
            raise Exhausted("too many steps")

    def weigh(self, *values: Any) -> int:
        """Counts all that is in `values`, as often as it is there, and returns how many characters
        that is: a list of a few lists may be told as a text without end."""
        char_count = 0
        pending = list(values)
        while pending:
            value = pending.pop()
            if isinstance(value, str):
                char_count += len(value)
                self.step(1 + (len(value) >> 8))
                if char_count > 2 * self.text_max:
                    raise Exhausted("too much text")
            elif isinstance(value, dict):
                self.step(2 * len(value))
                pending += value.keys()
                pending += value.values()
            elif isinstance(value, (list, tuple, set, frozenset, MappingView)):
                self.step(len(value))
                pending.extend(cast("Iterable[Any]", value))
            elif isinstance(value, Namespace):
                pending.append(dict(value._Namespace__attrs))
        return char_count

    def build(self, char_count: int) -> None:
        self.chars_left -= char_count
        if char_count > 2 * self.text_max or self.chars_left < 0:
            raise Exhausted("too much text")


# Set for as long as a template is rendered; each thread has its own.
WORK: ContextVar[Work] = ContextVar("work")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Templates compiled here run under the `Work` in WORK."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Without the optimizer nothing of a template runs while it is compiled.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=shown,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        for name, filter_ in self.filters.items():
            self.filters[name] = guarded(name, filter_)
        for name in DEEP_TESTS:
            self.tests[name] = compared(self.tests[name])  # type: ignore[arg-type]
        self.filters["tojson"] = tojson
        self.filters["replace"] = replace
        self.filters["join"] = join
        self.filters["_counted"] = counted
        self.filters["_built"] = built
        self.filters["_weighed"] = weighed
        self.filters["format"] = formatted
        for name in ("center", "pprint", "random", "urlize", "wordwrap", "xmlattr"):
            del self.filters[name]
        self.globals["raise_exception"] = raise_exception
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return Bounds().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            if attr in GROWING or (attr in ("format", "format_map") and ":" in obj):
                return False
        elif isinstance(obj, (int, float, bytes)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        # A field with a format, which may be wide, is left to `is_safe_attribute`.
        text = getattr(value, "__self__", None)
        if isinstance(text, str) and ":" in text:
            return None
        made = super().wrap_str_format(value)
        if made is None or not isinstance(text, str):
            return made

        def format_counted(*args: Any, **keywords: Any) -> str:
            work = WORK.get()
            work.build(len(text) + text.count("{") * work.weigh(args, keywords))
            return made(*args, **keywords)

        return format_counted

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            WORK.get().weigh(argument)
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **keywords: Any) -> Any:
        work = WORK.get()
        work.step(CALL_STEPS)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            work.build(len(owner))
            name = getattr(obj, "__name__", "")
            # Replaced, and not called here: jinja adds arguments of its own to every call.
            if name == "replace":
                obj = partial(replace, owner)
            elif name == "join":
                obj = partial(join, between=owner)
        elif isinstance(owner, (dict, list, tuple)):
            work.step(len(owner) >> 4)
            work.weigh(args, owner if args and getattr(obj, "__name__", "") in SEEKING else ())
        return super().call(context, obj, *args, **keywords)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operation(WORK.get(), operator, left, right)
        return super().call_binop(context, operator, left, right)


CONSTANT = (nodes.Const, nodes.TemplateData)


class Bounds(NodeTransformer):
    """Puts a count around what a template repeats or builds."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = wrapped(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [wrapped(part, "_weighed") for part in node.nodes]
        return cast(nodes.Node, wrapped(node, "_built"))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """What is compared with a constant costs no more than that."""
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        is_search = any(operand.op in ("in", "notin") for operand in node.ops)
        if len(sides) > 2 or is_search or not any(isinstance(side, CONSTANT) for side in sides):
            node.expr = wrapped(node.expr, "_weighed")
            for operand in node.ops:
                operand.expr = wrapped(operand.expr, "_weighed")
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = wrapped(node.key, "_weighed")  # it is hashed
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        return node if node.node is None else wrapped(node, "_built")  # None: a filter block's


def wrapped(node: Any, name: str) -> Any:
    if isinstance(node, CONSTANT):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class Generation(Extension):
    """`{% generation %}` marks what the model says, for training. Here it is only its contents."""

    tags = {"generation"}

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def check_operation(work: Work, operator: str, left: Any, right: Any) -> None:
    """Refuses an operation whose result would be out of proportion, before it is computed."""
    work.step()
    if operator == "%":
        if isinstance(left, str):
            if WIDE.search(left):
                raise Exhausted("a field too wide")
            times = left.count("%") if isinstance(right, dict) else 1
            work.build(len(left) + times * work.weigh(right))
        return
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else 0
        if max(left.bit_length(), right.bit_length(), bits) > INTEGER_BITS_MAX:
            raise Exhausted("a number too large")
        return
    if operator == "*":
        for sized, times in ((left, right), (right, left)):
            if isinstance(sized, (str, bytes, list, tuple)) and isinstance(times, int):
                work.build(len(sized) * max(times, 0))
    elif operator == "+" and isinstance(left, (str, list)) and isinstance(right, (str, list)):
        work.build(len(left) + len(right))


def counted(iterable: Any) -> Any:
    """What is looped over, each item a step."""
    work = WORK.get()
    if hasattr(iterable, "__len__"):
        work.step(len(iterable))
        return iterable
    return counted_items(iterable, work) if isinstance(iterable, Iterable) else iterable


def counted_items(iterable: Iterable[Any], work: Work) -> Iterator[Any]:
    for item in iterable:
        work.step()
        yield item


def built(value: Any) -> Any:
    """The result of a filter or of `~`."""
    work = WORK.get()
    work.step()
    if isinstance(value, (str, list)):
        work.build(len(value))
    return value


def weighed(value: Any) -> Any:
    """What is compared, or becomes part of a text."""
    WORK.get().weigh(value)
    return value


@pass_context
def shown(context: Context, value: Any) -> Any:
    """What a template writes: into the prompt, or into a text of its own."""
    work = WORK.get()
    work.build(work.weigh(value))
    return value


Function = Callable[..., Any]


def guarded(name: str, filter_: Function) -> Function:
    """A filter whose work is counted before it is done."""

    @wraps(filter_)
    def run(*args: Any, **keywords: Any) -> Any:
        work = WORK.get()
        numbers = (*args, *keywords.values()) if name in NUMBERED else ()
        if any(isinstance(given, (int, float)) and given > NUMBER_MAX for given in numbers[1:]):
            raise Exhausted("a number too large")
        if name == "sum":
            # Texts and lists are not added up.
            start = keywords.get("start", args[3] if len(args) > 3 else 0)
            if not isinstance(start, (int, float)):
                raise SecurityError("sum is of numbers only")
        if name not in SHALLOW:
            char_count = work.weigh(*args, *keywords.values())
            if name == "indent":
                width = keywords.get("width", args[1] if len(args) > 1 else 4)
                lead_len = width if isinstance(width, int) else len(str(width))
                work.build(char_count + str(args[0]).count("\n") * lead_len)
        return filter_(*args, **keywords)

    return run


def compared(test: Function) -> Function:
    @wraps(test)
    def run(*args: Any) -> Any:
        WORK.get().weigh(*args)
        return test(*args)

    return run


def replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    WORK.get().weigh(text, old, new)
    whole, old, new = str(text), str(old), str(new)
    places = whole.count(old) if count is None else min(count, whole.count(old))
    WORK.get().build(len(whole) + max(places, 0) * len(new))
    return whole.replace(old, new, -1 if count is None else count)


def formatted(text: Any, *values: Any) -> str:
    WORK.get().weigh(text)
    text = str(text)
    check_operation(WORK.get(), "%", text, values)
    return str(text % values)


def join(values: Iterable[Any], between: Any = "", attribute: str | int | None = None) -> str:
    work = WORK.get()
    texts = []
    for value in values:
        part = value if attribute is None else attribute_of(value, attribute)
        work.weigh(part)
        text = str(part)
        work.build(len(text) + len(str(between)))
        texts.append(text)
    work.build(sum(map(len, texts)))
    joined: str = str(between).join(texts)
    return joined


def attribute_of(value: Any, attribute: str | int) -> Any:
    if isinstance(value, dict):
        return value[attribute]
    if isinstance(value, list) and isinstance(attribute, int):
        return value[attribute]
    raise SecurityError("join takes attributes of objects and lists only")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON that is meant to be read by a model, not put into HTML."""
    if isinstance(indent, int) and indent > 16:
        raise Exhausted("an indent too wide")
    WORK.get().weigh(value)
    return json.dumps(
        value,
        ensure_ascii=bool(ensure_ascii),
        indent=indent,
        separators=separators,
        sort_keys=bool(sort_keys),
    )


def raise_exception(message: Any) -> None:
    raise Raised(str(message))
