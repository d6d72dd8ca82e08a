"""This file is the cache: the ledger, reached by messages from the scheduler.

It does not know why pages are asked for. It serves one life of one scheduler at a time: what a dead
one held is freed when its death is seen, or when the next one speaks, whichever comes first; the
prefixes that were shared stay.
"""

from __future__ import annotations

import msgspec

from actors.cache.evict import EVICTIONS
from actors.cache.ledger import Counts, Ledger
from actors.runtime.actor import Actor, MailboxSpec
from actors.runtime.context import Ref
from messages import cache as inbox
from messages import scheduler as peer
from messages.base import Address
from messages.cache import Acquire, Clear, Cleared, Commit, Probe, Release, Reserve, Return
from messages.config import CacheConfig, Paths
from messages.scheduler import Probed
from messages.system import Down
from messages.types import pack
from messages.worker import Facts


class Cache(Actor):
    """Owns page numbers; never touches a tensor."""

    accepts = inbox.In
    # All of it comes from the scheduler, which bounds its own requests; a message refused here
    # would be pages lost.
    mailbox = MailboxSpec(count_max=1 << 17, bytes_max=1 << 30)

    def __init__(self, cache: CacheConfig, paths: Paths) -> None:
        self.config = cache
        self.paths = paths
        self.holder: Address | None = None  # the life of the scheduler that all leases are of
        self.incarnation_min = 0  # lives before this one are over; what they said comes too late
        self.counts: Counts | None = None  # as last published

    async def on_start(self) -> bytes:
        facts = msgspec.msgpack.decode(self.context.notes[self.paths.worker], type=Facts)
        self.ledger = Ledger(
            facts.page_count,
            facts.page_size,
            prefix_cache=self.config.prefix_cache,
            policy=EVICTIONS.get(self.config.eviction),
        )
        self.scheduler: Ref[peer.In] = self.context.peer(self.paths.scheduler)
        self.context.watch(self.paths.scheduler)
        self._publish()
        return b""

    def on_acquire(self, message: Acquire) -> None:
        if self._is_current():
            answer = self.ledger.acquire(
                message.request, message.attempt, message.tokens, message.namespace
            )
            self.scheduler.tell(answer, request=message.request)
            self._publish()

    def on_commit(self, message: Commit) -> None:
        if self._is_current():
            self.ledger.commit(message.request, message.attempt, message.computed_len)

    def on_release(self, message: Release) -> None:
        if self._is_current():
            self.ledger.release(message.request, message.attempt, message.tokens, message.pages)
            self._tell_freed()

    def on_reserve(self, message: Reserve) -> None:
        if self._is_current():
            self.scheduler.tell(self.ledger.reserve(message.page_count))
            self._publish()

    def on_return(self, message: Return) -> None:
        if self._is_current():
            self.ledger.take_back(message.pages)
            self._tell_freed()

    def on_probe(self, message: Probe) -> None:
        if self._is_current():
            self.scheduler.tell(Probed(pack(self.ledger.probe(message.rows))))

    def on_clear(self, message: Clear) -> None:
        # Not from the scheduler: it says nothing of whose leases these are.
        leased_count = self.ledger.leased_count
        freed_count = 0 if leased_count else self.ledger.clear()
        self.context.log.info("clear", freed=freed_count, leased=leased_count)
        self._tell_freed()
        self.context.reply(Cleared(freed_count, leased_count))

    def on_down(self, down: Down) -> None:
        # Supervision overtakes requests: messages of the dead may still be in the mailbox.
        self.incarnation_min = max(self.incarnation_min, down.address.incarnation + 1)
        if down.address == self.holder:
            self._forget()
            self.holder = None

    def check(self) -> None:
        self.ledger.check()

    def _is_current(self) -> bool:
        """Whether the sender is the scheduler that lives now. A newer one ends the leases of the
        older, whose last messages may still be on their way."""
        sender = self.context.sender
        if sender == self.holder or sender is None:
            return True
        if sender.incarnation < self.incarnation_min:
            return False
        if self.holder is not None:
            self._forget()
        self.holder = sender
        self.incarnation_min = sender.incarnation
        # Answers go to the one who asked, never to one that came after.
        self.scheduler = self.context.ref(sender)
        return True

    def _forget(self) -> None:
        self.ledger.forget_leases()
        self._publish()

    def _tell_freed(self) -> None:
        freed = self.ledger.take_freed()
        if freed is not None:
            self.scheduler.tell(freed)
        self._publish()

    def _publish(self) -> None:
        counts = self.ledger.counts()
        if counts != self.counts:
            for state, count in zip(Counts._fields, counts, strict=True):
                self.context.gauge("histrio_pages", count, state=state)
            self.counts = counts
