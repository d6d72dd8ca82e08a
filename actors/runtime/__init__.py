"""The actor runtime: mailboxes, supervision, nodes and transports.

It knows no room and no message but `messages.{base,system,log}`. What a room needs is exported
here; `system.System` runs a tree, `testkit.Cell` runs one actor in a test. A room looks like this:

    class Router(Actor):
        accepts = router.In  # a union: each member has its handler, or the class is a TypeError

        def __init__(self, paths: Paths) -> None:  # what the tree's `arguments` name
            self.paths = paths

        async def on_start(self) -> bytes:  # here is the context; returns a note for later actors
            self.scheduler: Ref[scheduler.In] = self.context.peer(self.paths.scheduler)
            return b""

        def on_submit(self, message: Submit) -> None:
            self.scheduler.tell(message, request=message.request)

`Actor` says what else may be overridden, `Context` what an actor can do to the world.
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
