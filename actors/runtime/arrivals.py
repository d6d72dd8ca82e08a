"""This file sorts what other nodes send: for an actor, an answer to an ask, or for the node itself.

It does not know transports. Laws: an actor sees only what is in its union and meant for its present
incarnation; orders come from the root alone and reports go to it alone; what can't be read changes
nothing but a count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.runtime.codec import (
    Body,
    Unreadable,
    as_message,
    kind_of,
    node_decoder,
    notice_decoder,
    root_decoder,
)
from actors.runtime.context import Rejected, Reply
from actors.runtime.mailbox import Envelope, give_back
from actors.runtime.recorder import Event
from messages.base import Address, Header, Lane, Message
from messages.system import Cause, Credits, CreditsAsked, State, Undelivered

if TYPE_CHECKING:
    from actors.runtime.life import Life
    from actors.runtime.node import Node


class Arrivals:
    """Of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def arrive(self, node: str, header: Header, body: Body) -> None:
        """Takes one message of a peer, for whomever it is."""
        target = header.target
        if target.node != self._node.name:
            return
        if target.path == "":
            self._take_control(node, header, body)
        elif header.is_answer:
            self.take_answer(header, body)
        else:
            body = self._take_for_actor(header, body)
        if self._node.recorder is not None and header.lane is not Lane.CONTROL:
            self._node.note(Event.CAME, header, kind_of(body))

    def _take_for_actor(self, header: Header, body: Body) -> Any:
        """Gives the body as it could be read."""
        life = self._node.lives.get(header.target.path)
        is_there = life is not None and life.address == header.target and not life.is_dead
        if header.lane is Lane.SUPERVISION:
            if is_there and life is not None:
                self._take_notice(life, header.sender, self._read(notice_decoder, body))
            return body
        envelope = Envelope(
            body,
            header.sender,
            header.deadline_s,
            header.question,
            header.request,
            header.exact,
        )
        if header.lane is not Lane.USER:  # orders to an actor come through its node, from the root
            self._node.dropped(envelope, header.target, Cause.UNREADABLE)
        elif life is None or not is_there or life.state is State.STARTING:
            self._node.undelivered(envelope, header.target, Cause.NOBODY)
        elif header.credit and not self._node.streams.arrive(
            life, envelope, header.sender, header.credit
        ):
            self._node.undelivered(envelope, header.target, Cause.FULL)
        else:
            self.deliver(life, envelope, body, None)
        return envelope.body

    def _take_notice(self, life: Life, sender: Address | None, notice: Any) -> None:
        """Credits are the nodes' business: they wait in no lane."""
        match notice:
            case Undelivered() if life.wants_undelivered:
                life.put_urgent(Lane.SUPERVISION, notice)
            case Credits(granted) if sender is not None:
                self._node.streams.granted(life, sender, granted)
            case CreditsAsked(spent) if sender is not None:
                self._node.streams.asked(life, sender, spent)

    def take_answer(self, header: Header, body: Body) -> None:
        question = self._node.questions.find(header.question, header.target)
        if question is None:
            envelope = Envelope(body, header.sender)
            self._node.dropped(envelope, header.target, Cause.EXPIRED)
            return
        assert header.question is not None
        if header.lane is Lane.SUPERVISION:
            notice = self._read(notice_decoder, body)
            cause = notice.cause if isinstance(notice, Undelivered) else Cause.UNREADABLE
            self._node.questions.resolve(header.question, Rejected(cause))
            return
        decoder = question.asker.answer_decoder
        message = self._read(decoder, body) if decoder is not None else None
        self._resolve_reply(header.question, question.asker, message)

    def _take_control(self, node: str, header: Header, body: Body) -> None:
        if self._node.office is not None:
            message = self._read(root_decoder, body)
            if message is not None and header.target.incarnation == self._node.address.incarnation:
                self._node.office.report(node, message)
        elif node == self._node.boot.root and header.target == self._node.address:
            message = self._read(node_decoder, body)
            if message is not None:
                self._node.obey(message)

    def _read(self, decoder: Any, body: Body) -> Any:
        try:
            return as_message(decoder, body)
        except Unreadable as error:
            self._node.log.warning("unreadable", detail=str(error))
            return None

    def deliver(self, life: Life, envelope: Envelope, body: Body, sender: Life | None) -> None:
        """Puts a message into a mailbox, once it is known to be one that is accepted there."""
        try:
            message = as_message(life.decoder, body)
        except Unreadable as error:
            self._node.log.debug("unreadable", target=str(life.address), detail=str(error))
            message = None
        if type(message) not in life.accepted:
            give_back(envelope)
            self._node.undelivered(envelope, life.address, Cause.UNREADABLE)
            return
        envelope.body = message
        if not isinstance(body, Message):
            envelope.size_bytes = max(len(body), 1)
        life.put(envelope, sender)

    def _resolve_reply(self, number: int, asker: Life, message: Any) -> None:
        if message is None or type(message) not in asker.answers:
            self._node.log.warning("answer not in `answers`", asker=str(asker.address))
            self._node.questions.resolve(number, Rejected(Cause.UNREADABLE))
        else:
            self._node.questions.resolve(number, Reply(message))
