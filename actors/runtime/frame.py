"""This file defines the frames that travel on a link between two nodes, and who may send them.

It does not know what is done with them (`link.py`) nor how they are carried (`transport/zmq.py`).
A frame is one msgpack array; the body of a message is a frame of its own behind its `Data`, so that
it is decoded by its receiver alone and can travel without being copied.
"""

from __future__ import annotations

import enum

import msgspec

from messages.base import Header

PROTOCOL = 1


class Stage(enum.IntEnum):
    """How far the hello is, seen from one end."""

    CALLING = 0  # nothing valid has been heard
    HEARD = 1  # the peer's hello is here; whether ours arrived is not known
    AGREED = 2  # the peer has said that it heard this session: messages flow


class Frame(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of what travels on a link. Wire form: `[tag, field, ...]`, fields append-only."""


class Hello(Frame, frozen=True, tag=0):
    protocol: int
    schema: bytes  # of all messages: both ends run one commit
    run: str
    token: bytes  # the run's shared secret
    node: str
    incarnation: int
    session: int  # of the sender; a later one is larger
    to_incarnation: int  # which life of the receiver this is meant for
    heard_session: int | None = None
    stage: Stage = Stage.CALLING
    received: int = 0


class Data(Frame, frozen=True, tag=1):
    """One message; its body is a frame of its own. `header.deadline_s` is what is left of it."""

    seq: int
    received: int
    header: Header


class Ack(Frame, frozen=True, tag=2):
    """All up to `received` is here. `gap`: the next one is not, though later ones are."""

    received: int
    probe: int | None = None
    gap: bool = False


class Probe(Frame, frozen=True, tag=3):
    """Asks for an `Ack`: in a pipe that loses nothing the answer tells what arrived before it."""

    count: int


class Bye(Frame, frozen=True, tag=4):
    """The sender's end is down."""

    session: int
    detail: str = ""


AnyFrame = Hello | Data | Ack | Probe | Bye


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a node is, and what proves that it belongs to this run."""

    node: str
    incarnation: int
    run: str
    token: bytes
    schema: bytes = b""
