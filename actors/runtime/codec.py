"""This file encodes messages and decodes them into the receiver's declared union, and nothing else.

It does not know transports. Law: whatever bytes come in, the only exception that goes out is
`Unreadable`; nothing is ever pickled, and no byte names a class outside the union.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from typing import Any

import msgspec

from messages.base import Message
from messages.system import NodeIn, Notice, RootIn

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class Unreadable(Exception):
    """The sender's fault: the bytes are none of the messages that the receiver accepts."""


class Decoder:
    """Decodes one union."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, body: bytes | memoryview) -> Any:
        """Raises Unreadable."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise Unreadable(f"{type(error).__name__}: {error}"[:200]) from error


notice_decoder = Decoder(Notice)
node_decoder = Decoder(NodeIn)
root_decoder = Decoder(RootIn)


Body = Message | bytes | memoryview


def as_message(decoder: Decoder, body: Body) -> Any:
    """Decodes bytes; a message by reference passes as it is. Raises Unreadable."""
    return body if isinstance(body, Message) else decoder.decode(body)


def kind_of(body: Any) -> str:
    """The tag of a message, also of one that has not been decoded."""
    if not isinstance(body, bytes | memoryview):
        return type(body).__name__
    try:
        tag, *_ = msgspec.msgpack.decode(body, type=list[msgspec.Raw])
        return msgspec.msgpack.decode(tag, type=str)[:64]
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return "unreadable"


def load_factory(factory: str) -> Any:
    """Imports `package.module:Class`. The name comes from the tree, never from a client."""
    module_name, _, class_name = factory.partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, class_name)


def decode_arguments(factory: Any, arguments: dict[str, bytes]) -> dict[str, Any]:
    """Decodes keyword arguments by the annotations of the factory's `__init__`."""
    function = factory.__init__ if inspect.isclass(factory) else factory
    names = dict(vars(sys.modules[function.__module__]))
    hints = typing.get_type_hints(function, names)
    return {
        name: msgspec.msgpack.decode(value, type=hints[name]) for name, value in arguments.items()
    }
