"""This file keeps those who have a slot: who computes a prompt, who decodes, which slots are free.

It does not know steps in flight, the cache, or why anybody leaves. Laws: a slot has one tenant; of
each slot that has lost one, of whom the worker has been told, the worker is told once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from actors.scheduler.request import Event, Request, State
from messages.types import Int32s


class Running:
    """The requests that run, by slot."""

    def __init__(self, count_max: int, page_size: int) -> None:
        self.count_max = count_max
        self.page_size = page_size
        self.prefilling: dict[int, Request] = {}  # in order of admission
        self.jumping: dict[int, Request] = {}  # who has tokens that a grammar forced; first come
        self.decoding: dict[int, Request] = {}
        self.free_slots = list(range(count_max - 1, -1, -1))
        self._closed = array("i")  # slots that the worker is still to be told of

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.jumping) + len(self.decoding)

    def all(self) -> list[Request]:
        return [*self.decoding.values(), *self.jumping.values(), *self.prefilling.values()]

    @property
    def used_len(self) -> int:
        """Tokens that the pages of those who run have room for."""
        return sum(request.page_count for request in self.all()) * self.page_size

    @property
    def backlog_len(self) -> int:
        """Tokens that are known and in no step yet, of those who do not decode."""
        known = (*self.prefilling.values(), *self.jumping.values())
        return sum(len(request.tokens) - request.planned_len for request in known)

    def enter(self, request: Request, pages: Int32s, cached_len: int) -> None:
        """Gives it a slot; `pages` are leased to it, and hold `cached_len` of its tokens."""
        request.advance(Event.ADMIT)
        slot = self.free_slots.pop()
        request.slot = slot
        request.pages = pages
        request.page_count = len(pages) // 4
        request.cached_len = request.planned_len = cached_len
        request.leased_len = len(request.tokens)
        self._set_room(request)
        self.prefilling[slot] = request

    def grow(self, request: Request, page: int) -> tuple[int, int]:
        """One page more; it, and whose slot it is for."""
        request.granted.append(page)
        request.page_count += 1
        self._set_room(request)
        assert request.slot is not None
        return request.slot, page

    def planned(self, prefills: Iterable[tuple[Request, int]]) -> None:
        """A step was sent with a chunk of each; who has no more to compute decodes."""
        for request, _ in prefills:
            if request.planned_len == len(request.tokens):
                request.advance(Event.PREFILLED)
                assert request.slot is not None
                if self.jumping.pop(request.slot, None) is None:
                    del self.prefilling[request.slot]
                self.decoding[request.slot] = request

    def jumped(self, request: Request) -> None:
        """It decodes, and got tokens that are to be computed as a chunk."""
        request.advance(Event.JUMP)
        assert request.slot is not None
        del self.decoding[request.slot]
        self.jumping[request.slot] = request

    def leave(self, request: Request) -> None:
        """Gives up its slot."""
        slot = request.slot
        assert slot is not None
        if self.decoding.pop(slot, None) is None and self.jumping.pop(slot, None) is None:
            del self.prefilling[slot]
        if request.is_opened:
            self._closed.append(slot)
        self.free_slots.append(slot)
        request.slot = None
        request.is_opened = False

    def take_closed(self) -> Int32s:
        """The slots that the worker is to be told of with the next step."""
        closed = self._closed.tobytes()
        del self._closed[:]
        return closed

    def _set_room(self, request: Request) -> None:
        request.room_len = request.page_count * self.page_size
        request.stop_len = min(request.room_len, request.limit_len - 1)

    def check(self) -> None:
        """Asserts the laws. O(requests)."""
        chunked = {**self.prefilling, **self.jumping}
        for slot, request in (*chunked.items(), *self.decoding.items()):
            assert request.slot == slot, f"{request.id} is not in slot {slot}"
        assert all(r.state is State.PREFILL for r in chunked.values())
        assert all(r.state is State.DECODE for r in self.decoding.values())
        slots = [*self.prefilling, *self.jumping, *self.decoding, *self.free_slots]
        assert sorted(slots) == list(range(self.count_max)), f"slots {slots}"
