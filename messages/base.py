"""This file defines what every message is: a frozen msgspec struct with a tag, and what carries it.

It does not know any room. The runtime (`actors/runtime`) imports this file, `system` and `log`,
and nothing else of ours.

Wire form: msgpack arrays `[tag, field, field, ...]`. Fields are append-only: a new one goes at the
end and has a default; none is reordered or retyped.
"""

from __future__ import annotations

import enum

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of everything that is put into a mailbox.

    Subclasses are leaves: they hold numbers, text, bytes, tuples of those, and other frozen
    structs, never a cycle (`gc=False` would leak it).
    """


class Part(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Base of the structs that travel inside messages but are never put into a mailbox."""


class Lane(enum.IntEnum):
    """Order in which a mailbox is emptied: the smallest first."""

    KILL = 0
    CONTROL = 1
    SUPERVISION = 2
    USER = 3


class Address(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One life of one actor: `node/path#incarnation`. Never reused within a run."""

    node: str
    path: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.node}/{self.path}#{self.incarnation}"


class Header(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What travels beside a message's body."""

    target: Address
    sender: Address | None = None
    lane: Lane = Lane.USER
    # Absolute time after which nobody wants the message any more. Carried over a link as the
    # seconds that are left, since clocks of two hosts are not comparable.
    deadline_s: float | None = None
    # Set on an `ask`, and on its answer: the asker's counter.
    question: int | None = None
    is_answer: bool = False
    # For logs and traces: which request this is about, if one.
    request: str | None = None
    # Meant for one incarnation, not for whoever follows it: not kept over a restart in place.
    exact: bool = False
    # Of a message to a mailbox that makes senders wait: the number of the credit that it is sent
    # on, from 1; 0: on none.
    credit: int = 0
