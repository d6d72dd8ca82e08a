"""This file is the base class of every actor, and the check that it handles all that it accepts.

It does not know nodes, transports or the event loop: what an actor can do to the world is its
`context`. Law: a member of `accepts` or `private` without a handler, or with one annotated as
another type, is a TypeError when the class is defined, so no message can arrive unhandled.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec

from actors.runtime.context import Context
from actors.runtime.mailbox import Full, MailboxSpec
from messages.base import Message
from messages.system import Down, Drain, Reason, Undelivered, Up

__all__ = ["Actor", "Full", "HandlerRow", "MailboxSpec"]


class HandlerRow(NamedTuple):
    """Which method takes a type of message."""

    method: str
    is_async: bool
    is_private: bool


class Actor:
    """One message at a time, from its mailbox, to `on_<message>`; state is touched only there.

    A subclass declares `accepts` (a union of messages) and one handler for each member. An abstract
    base in between says `class Base(Actor, abstract=True)`.
    """

    accepts: ClassVar[Any]
    private: ClassVar[Any] = None  # union of what it tells itself: timers, offload results
    answers: ClassVar[Any] = None  # union of what its asks may be answered with
    mailbox: ClassVar[MailboxSpec] = MailboxSpec()
    offload_threads: Mapping[str, int] = {"default": 1}  # by lane; an instance may set its own
    # Takes the arguments of `__init__`; loads in a process in reserve what `on_start` would. The
    # first life there finds the result in `prepared`, and uses it or not.
    prepare: ClassVar[Callable[..., Any] | None] = None
    prepared: Any = None
    handlers: ClassVar[dict[type, HandlerRow]] = {}  # filled when the class is defined

    context: Context  # set before `on_start`

    def __init_subclass__(cls, *, abstract: bool = False, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if abstract:
            return
        if getattr(cls, "accepts", None) is None:
            raise TypeError(f"{cls.__qualname__} declares no `accepts`")
        names = {**sys._getframe(1).f_locals, **vars(cls)}
        cls.handlers = {}
        for is_private, union in ((False, cls.accepts), (True, cls.private)):
            for member in union_members(union):
                _check_member(cls, member, is_private)
                cls.handlers[member] = _handler_of(cls, member, is_private, names)
        methods = [row.method for row in cls.handlers.values()]
        doubled = {m for m in methods if methods.count(m) > 1}
        if doubled:
            raise TypeError(f"{cls.__qualname__}: two messages share {', '.join(sorted(doubled))}")

    async def on_start(self) -> bytes:
        """Loads what it needs; returns the note for all that start later."""
        return b""

    async def on_stop(self, reason: Reason) -> None:
        """Frees what the garbage collector would not."""

    def on_end(self) -> None:
        """However it ends, also by a crash, and last: frees what must not outlive it, such as a
        listening socket, and wakes who waits for it in its own process. It tells nobody anything.
        """

    def on_drain(self, message: Drain) -> None:
        """Takes no new work from now on. Whoever overrides this calls `context.drained()` once
        nothing is left: the end of the system waits for it."""

    def on_down(self, down: Down) -> None:
        """A watched actor is dead."""

    def on_up(self, up: Up) -> None:
        """A watched actor is in service."""

    def on_undelivered(self, notice: Undelivered) -> None:
        """A message of ours did not arrive."""

    def check(self) -> None:
        """Asserts the laws of its cores."""


def union_members(union: Any) -> tuple[type, ...]:
    """The classes of `A | B | C`, of a single class, or of None."""
    if union is None:
        return ()
    if isinstance(union, types.UnionType) or typing.get_origin(union) is typing.Union:
        return tuple(typing.get_args(union))
    return (union,)


def handler_name(member: type) -> str:
    """`StepDone` is handled by `on_step_done`."""
    return "on_" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", member.__name__).lower()


def _check_member(cls: type, member: Any, is_private: bool) -> None:
    if not isinstance(member, type):
        raise TypeError(f"{cls.__qualname__}: {member!r} is not a class of messages")
    if is_private:
        if not _is_frozen(member):
            raise TypeError(f"{cls.__qualname__}: private {member.__name__} must be frozen")
    elif not issubclass(member, Message):
        raise TypeError(f"{cls.__qualname__} accepts {member.__name__}, which is no Message")


def _is_frozen(member: type) -> bool:
    if issubclass(member, msgspec.Struct):
        return bool(member.__struct_config__.frozen)
    if dataclasses.is_dataclass(member):
        return bool(getattr(member, "__dataclass_params__").frozen)  # noqa: B009
    return issubclass(member, tuple)


def _handler_of(cls: type, member: type, is_private: bool, names: Mapping[str, Any]) -> HandlerRow:
    method = handler_name(member)
    function = inspect.unwrap(getattr(cls, method, None) or _missing)
    where = f"{cls.__qualname__}.{method}"
    if function is _missing:
        raise TypeError(f"{cls.__qualname__} accepts {member.__name__} but has no {method}")
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 2:
        raise TypeError(f"{where} must take (self, message)")
    annotation = parameters[1].annotation
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, dict(function.__globals__), dict(names))
        except NameError as error:
            raise TypeError(f"{where}: cannot resolve its annotation: {error}") from error
    if annotation is not member:
        raise TypeError(f"{where} must be annotated with {member.__name__}, not {annotation!r}")
    return HandlerRow(method, inspect.iscoroutinefunction(function), is_private)


def _missing() -> None:
    """Stands for a handler that is not there."""
