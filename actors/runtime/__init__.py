"""The actor runtime: mailboxes, supervision, nodes and transports.

It knows no room and no message but `messages.{base,system,log}`. What a room needs is exported
here; `system.System` runs a tree, `testkit.Cell` runs one actor in a test.
"""

from actors.runtime.actor import Actor, Full, MailboxSpec
from actors.runtime.context import (
    Context,
    Died,
    Outcome,
    Ref,
    Rejected,
    Reply,
    TimedOut,
)
from actors.runtime.spec import Child, Node, NodeKind, Restart, Strategy, Supervisor

__all__ = [
    "Actor",
    "Child",
    "Context",
    "Died",
    "Full",
    "MailboxSpec",
    "Node",
    "NodeKind",
    "Outcome",
    "Ref",
    "Rejected",
    "Reply",
    "Restart",
    "Strategy",
    "Supervisor",
    "TimedOut",
]
