"""This file holds what one step brought for the detokenizer of one front end.

It does not know who that is: the actor does. Law: tails and openings are in the order of events;
both are taken together, as one message, so that a front end costs one message a step.
"""

from __future__ import annotations

from messages.detokenizer import Open, Tail, Tokens


class Mail:
    __slots__ = ("opened", "rows")

    def __init__(self) -> None:
        self.opened: list[Open] = []
        self.rows: list[Tail] = []

    def take(self) -> Tokens:
        """All of it, which leaves it empty."""
        message = Tokens(tuple(self.rows), tuple(self.opened))
        self.rows.clear()
        self.opened.clear()
        return message
