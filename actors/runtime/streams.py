"""This file paces what one node's actors send to mailboxes of other nodes that make senders wait
(`Full.WAIT`), and grants credits to those who send to its own.

It does not know the law (`credit.py`) nor how messages travel (`peers.py`). A stream is all that
one life of an actor sends to one life of another. The window is in the directory, so the first
message needs no handshake; grants go back as messages are taken, and an idle stream costs nothing.
Without a credit, or while the link takes nothing, what a handler still sends is held here, at most
as many as the window, past that refused; the sender handles nothing further until all of it has
left. Only then is there an alarm: it tries the link again, and asks where a grant may be lost.

Laws: those of the core, for each stream; a stream that holds something has its sender paused and an
alarm set; what waits in a mailbox on credit is what its account says. Urgent lanes never wait here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from actors.runtime.credit import Account, Allowance
from actors.runtime.directory import UP
from actors.runtime.mailbox import Envelope
from messages.base import Address, Header, Lane
from messages.system import Cause, Credits, CreditsAsked, Known, State

if TYPE_CHECKING:
    from actors.runtime.life import Life
    from actors.runtime.node import Node

AGAIN_S = 0.5  # between the tries of a sender that is paused


class Stream:
    """The sender's end; one for each path that a life sends to, over the lives of the path."""

    __slots__ = ("account", "address", "alarm", "held", "sender")

    def __init__(self, sender: Life, address: Address, window: int) -> None:
        self.sender = sender
        self.address = address
        self.account = Account(window, address.incarnation)
        self.held: deque[Envelope] = deque()
        self.alarm: asyncio.TimerHandle | None = None


class Inflow:
    """The taker's end: what one life of a sender has under way to one actor of this node."""

    __slots__ = ("allowance", "life", "sender", "streams")

    def __init__(self, streams: Streams, life: Life, sender: Address) -> None:
        self.streams = streams
        self.life = life
        self.sender = sender
        self.allowance = Allowance(life.mailbox.spec.window)

    def taken(self) -> None:
        """One of its messages has left the mailbox, to be handled or as one that can't be."""
        granted = self.allowance.take()
        if granted is not None:
            self.streams.tell(self, granted)


class Streams:
    """Of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    # At the sender

    def send(self, sender: Life, envelope: Envelope, address: Address, window: int) -> None:
        """Sends on a credit of the address, or holds the message and pauses its sender."""
        stream = sender.streams.get(address.path)
        if stream is None:
            stream = sender.streams[address.path] = Stream(sender, address, window)
        elif stream.address.incarnation < address.incarnation:
            self._return_held(stream, Cause.NOBODY)
            stream.address = address
            stream.account.reopen(window, address.incarnation)
        if stream.held or not stream.account.left or not self._transmit(stream, envelope):
            self._hold(stream, envelope)

    def _transmit(self, stream: Stream, envelope: Envelope) -> bool:
        """False: the link takes nothing now. True: sent, or returned since there is no link."""
        node = self._node
        address = stream.address
        account = stream.account
        header = Header(
            address,
            envelope.sender,
            Lane.USER,
            envelope.deadline_s,
            envelope.question,
            False,
            envelope.request,
            envelope.exact,
            account.spent + 1,
        )
        if node.peers.send(address.node, header, envelope.body):
            account.spend()
        elif node.peers.is_up(address.node):
            return False
        else:
            node.undelivered(envelope, address, Cause.UNREACHABLE)
        return True

    def _hold(self, stream: Stream, envelope: Envelope) -> None:
        if len(stream.held) >= stream.account.window:
            self._node.undelivered(envelope, stream.address, Cause.FULL)
            return
        stream.held.append(envelope)
        stream.sender.blocked_count += 1
        if stream.alarm is None:
            stream.alarm = self._node.loop.call_later(AGAIN_S, self._again, stream)

    def granted(self, sender: Life, address: Address, granted: int) -> None:
        """The node of `address` lets it have more under way."""
        stream = sender.streams.get(address.path)
        more = stream.account.grant(granted, address.incarnation) if stream is not None else None
        if more is None:
            self._node.tally.count("histrio_stale_credits_total", 1, ())
        elif stream is not None and stream.held:
            self._release(stream)

    def _release(self, stream: Stream) -> None:
        """Sends what was held, as far as it goes."""
        node = self._node
        held = stream.held
        now_s = node.time()
        while held:
            envelope = held[0]
            if envelope.deadline_s is not None and envelope.deadline_s <= now_s:
                node.undelivered(envelope, stream.address, Cause.EXPIRED)
            elif not stream.account.left or not self._transmit(stream, envelope):
                return
            held.popleft()
            stream.sender.unblock()
        self._disarm(stream)

    def _again(self, stream: Stream) -> None:
        self._release(stream)
        if not stream.held:
            return
        if not stream.account.left:
            address = stream.address
            header = Header(address, stream.sender.address, Lane.SUPERVISION)
            self._node.peers.send(address.node, header, CreditsAsked(stream.account.spent))
        stream.alarm = self._node.loop.call_later(AGAIN_S, self._again, stream)

    def _return_held(self, stream: Stream, cause: Cause) -> None:
        """The life that it was held for is gone."""
        while stream.held:
            self._node.undelivered(stream.held.popleft(), stream.address, cause)
            stream.sender.unblock()
        self._disarm(stream)

    def _disarm(self, stream: Stream) -> None:
        if stream.alarm is not None:
            stream.alarm.cancel()
            stream.alarm = None

    # At the taker

    def arrive(self, life: Life, envelope: Envelope, sender: Address | None, number: int) -> bool:
        """Books a message that came on a credit. False: there was none for it."""
        if sender is None or not life.mailbox.spec.window:
            return True
        inflow = self._inflow(life, sender)
        if inflow is None:  # nobody is left to be paused: it waits like anybody's
            return True
        if not inflow.allowance.arrive(number):
            return False
        envelope.inflow = inflow
        return True

    def asked(self, life: Life, sender: Address, spent: int) -> None:
        """A sender that is paused has sent so many, and wants to know."""
        inflow = self._inflow(life, sender) if life.mailbox.spec.window else None
        granted = inflow.allowance.asked(spent) if inflow is not None else None
        if inflow is not None and granted is not None:
            self.tell(inflow, granted)

    def _inflow(self, life: Life, sender: Address) -> Inflow | None:
        """None: that sender is dead, as far as is known here."""
        inflow = life.inflows.get(sender)
        if inflow is None:
            known = self._node.entry(sender.path).known
            if known is not None and _is_over(sender, known):
                return None
            inflow = life.inflows[sender] = Inflow(self, life, sender)
        return inflow

    def tell(self, inflow: Inflow, granted: int) -> None:
        """Tells the sender. Where the link takes nothing now, it will ask."""
        life, sender = inflow.life, inflow.sender
        if not life.is_dead and life.inflows.get(sender) is inflow:
            header = Header(sender, life.address, Lane.SUPERVISION)
            self._node.peers.send(sender.node, header, Credits(granted))

    # Lives that end

    def learn(self, known: Known) -> None:
        """What the directory says of a path may end the streams to it and from it."""
        for life in list(self._node.lives.values()):
            stream = life.streams.get(known.path)
            if stream is not None and stream.held and _is_over(stream.address, known):
                self._return_held(stream, Cause.NOBODY)
            for sender, inflow in list(life.inflows.items()):
                if sender.path == known.path and _is_over(sender, known):
                    del life.inflows[sender]
                    for envelope in life.mailbox.uncredit(inflow):
                        self._node.undelivered(envelope, life.address, Cause.FULL)

    def sender_ended(self, life: Life) -> None:
        """What it held ends with it."""
        for stream in life.streams.values():
            for envelope in stream.held:
                self._node.dropped(envelope, stream.address, Cause.ABANDONED)
            stream.held.clear()
            self._disarm(stream)

    def check(self) -> None:
        for life in self._node.lives.values():
            for stream in life.streams.values():
                stream.account.check()
                assert len(stream.held) <= stream.account.window, len(stream.held)
                assert bool(stream.held) == (stream.alarm is not None), stream.address
            held_count = sum(len(stream.held) for stream in life.streams.values())
            assert life.blocked_count >= held_count, (life.blocked_count, held_count)
            for inflow in life.inflows.values():
                inflow.allowance.check()
                waiting_count = life.mailbox.count_of(inflow)
                assert inflow.allowance.waiting == waiting_count, waiting_count


def _is_over(address: Address, known: Known) -> bool:
    """Whether a life is dead or dying, by what the directory says of its path."""
    if known.incarnation != address.incarnation:
        return known.incarnation > address.incarnation
    return known.state not in UP and known.state is not State.STARTING
