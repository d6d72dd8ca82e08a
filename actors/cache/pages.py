"""This file is the page allocator: which page numbers are free.

It does not know tokens, requests or why a page is held. Pages come back in the order that keeps
recently used ones together; the lowest numbers go out first, so that a quiet pool stays compact.

Laws: a page is handed out once until it comes back; all that is not handed out is free.
"""

from __future__ import annotations

from collections.abc import Iterable


class Pages:
    """The free ones of pages [0, page_count)."""

    def __init__(self, page_count: int) -> None:
        assert page_count > 0, page_count
        self.page_count = page_count
        self._free = list(range(page_count - 1, -1, -1))  # a stack; the next one out is last
        self._is_free = bytearray(b"\x01") * page_count

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hands out `count` pages. The caller has checked that there are as many."""
        assert 0 <= count <= len(self._free), f"{count} of {len(self._free)} free pages"
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for page in taken:
            self._is_free[page] = 0
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Takes pages back."""
        for page in pages:
            assert not self._is_free[page], f"page {page} came back twice"
            self._is_free[page] = 1
            self._free.append(page)

    def is_free(self, page: int) -> bool:
        return bool(self._is_free[page])

    def check(self) -> None:
        """Asserts the laws."""
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert sum(self._is_free) == len(self._free), "the marks differ from the stack"
        assert all(self._is_free[page] for page in self._free), "a free page is not marked"
