"""This file is the metrics actor: it merges what the nodes flush, and answers who asks for the
page.

It does not know what is counted. Nothing waits for it; when it is behind, the oldest flushes go.
"""

from __future__ import annotations

from actors.metrics.board import Board
from actors.metrics.prometheus import exposition
from actors.runtime.actor import Actor, Full, MailboxSpec
from messages import metrics
from messages.config import Paths
from messages.metrics import Flush, Page, Scrape


class Metrics(Actor):
    accepts = metrics.In
    mailbox = MailboxSpec(count_max=4096, bytes_max=64 << 20, full=Full.DROP_OLDEST)

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.board = Board()

    def on_flush(self, message: Flush) -> None:
        self.board.merge(message)

    def on_scrape(self, message: Scrape) -> None:
        self.context.reply(Page(text=exposition(self.board)))

    def check(self) -> None:
        self.board.check()
