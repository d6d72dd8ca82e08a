"""This file keeps the pages that decode growth spends: leased in advance, so that no step asks.

It does not know requests, only how many run. It decides when to ask the cache for more and what to
give back; it sends nothing itself.

Laws: one `Reserve` is outstanding at most; a page is spent once; with nobody running it holds none.
"""

from __future__ import annotations

# How many tokens ahead each running sequence has pages for. Large enough that pages asked for in
# one step are there before they are needed, small enough to hoard little of a small pool.
LOOKAHEAD_LEN = 8


class Reserve:
    """Pages in hand, and whether the cache had as many as were asked for."""

    def __init__(self, page_size: int) -> None:
        self._page_count_each = -(-LOOKAHEAD_LEN // page_size)
        self._pages: list[int] = []
        self._asked_count = 0  # of the `Reserve` that is not answered yet
        self._is_short = False  # the last answer was less than asked for
        self._may_ask_again = False  # something has been given back since
        self._target_count = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def is_asking(self) -> bool:
        return self._asked_count > 0

    @property
    def is_short(self) -> bool:
        """The pool cannot feed those who run: nobody else should be let in."""
        return self._is_short and len(self._pages) < self._target_count

    @property
    def is_dry(self) -> bool:
        """There is no page, and asking again would bring none."""
        return (
            not self._pages
            and self._is_short
            and not self._may_ask_again
            and self._asked_count == 0
        )

    def set_running(self, count: int) -> None:
        self._target_count = count * self._page_count_each

    def take_ask(self) -> int:
        """How many pages to ask the cache for now; 0: none."""
        wanted = self._target_count - len(self._pages)
        if self._asked_count > 0 or wanted <= self._target_count // 2:
            return 0
        if self._is_short and not self._may_ask_again:
            return 0
        self._may_ask_again = False
        self._asked_count = wanted
        return wanted

    def take_excess(self) -> list[int]:
        """Pages to give back now: all when nobody runs, else what is far over the target."""
        keep = self._target_count
        if self._target_count > 0 and len(self._pages) <= 2 * keep:
            return []
        excess = self._pages[keep:]
        del self._pages[keep:]
        self._may_ask_again |= bool(excess)
        return excess

    def add(self, pages: list[int]) -> None:
        """The answer to what `take_ask` said."""
        assert len(pages) <= self._asked_count, f"{len(pages)} of {self._asked_count} pages"
        self._is_short = len(pages) < self._asked_count
        self._asked_count = 0
        self._pages += pages

    def spend(self) -> int:
        return self._pages.pop()

    def hint(self) -> None:
        """Pages have gone back to the cache: it may have more than it had."""
        self._may_ask_again = True

    def check(self) -> None:
        """Asserts the laws."""
        assert self._asked_count >= 0
        assert len(set(self._pages)) == len(self._pages), "a page is here twice"
