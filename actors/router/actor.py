"""This file is the router: it picks the replica that a request goes to.

It does not know what a request says. There is one replica for now, so there is nothing to choose;
the place is where a policy (least loaded, prefix-aware) will choose. Laws: a cancel goes where its
request went, after it; a request that its replica's mailbox gave back ends here, with an error.
"""

from __future__ import annotations

from collections import OrderedDict

from actors.runtime.actor import Actor, MailboxSpec
from actors.runtime.context import Ref
from messages import gateway, scheduler
from messages import router as inbox
from messages.base import Address
from messages.config import Paths
from messages.gateway import Failed
from messages.scheduler import Cancel, Poll, Submit
from messages.system import Cause, Undelivered
from messages.types import Fault, Problem

# Requests whose mailbox may still give them back. What was sent longer ago than that many others
# has arrived, or its replica's death has been told to the gateway.
SENT_MAX = 16_384
RETRY_AFTER_S = 1.0


class Router(Actor):
    """Passes requests on to the one replica."""

    accepts = inbox.In
    # The gateway bounds the open requests and the scheduler answers those that are too many.
    mailbox = MailboxSpec(count_max=1 << 16, bytes_max=1 << 30)

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.sent: OrderedDict[str, tuple[int, Address]] = OrderedDict()

    async def on_start(self) -> bytes:
        self.scheduler: Ref[scheduler.In] = self.context.peer(self.paths.scheduler)
        return b""

    def on_submit(self, message: Submit) -> None:
        self.sent[message.request] = (message.attempt, message.reply_to)
        self.sent.move_to_end(message.request)
        if len(self.sent) > SENT_MAX:
            self.sent.popitem(last=False)
        self.scheduler.tell(message, request=message.request)

    def on_cancel(self, message: Cancel) -> None:
        self.scheduler.tell(message, request=message.request)

    def on_poll(self, message: Poll) -> None:
        self.scheduler.tell(message)

    def on_undelivered(self, notice: Undelivered) -> None:
        """A request that did not arrive would be waited for; a cancel of it is void with it.

        If the replica is down, the gateway is about to try again, and drops this by its attempt.
        """
        if notice.kind != "Submit" or notice.request is None:
            return
        sent = self.sent.pop(notice.request, None)
        if sent is None:
            self.context.count("histrio_submits_lost_total")
            return
        attempt, reply_to = sent
        fault = Fault.OVERLOADED if notice.cause is Cause.FULL else Fault.UNAVAILABLE
        problem = Problem(fault, "The request could not be queued.", retry_after_s=RETRY_AFTER_S)
        reply: Ref[gateway.In] = self.context.ref(reply_to)
        reply.tell(Failed(notice.request, attempt, problem), request=notice.request)

    def check(self) -> None:
        assert len(self.sent) <= SENT_MAX, len(self.sent)
