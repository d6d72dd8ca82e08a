"""This file is about the pages of requests: what is shared of them, and how they go back to the
cache.

It does not know slots, nor why a request leaves. Laws: pages go back only when no step in flight
touches them; whoever was retracted waits again after that, and an abort is acknowledged after that.
"""

from __future__ import annotations

from array import array

from actors.scheduler.admission import Admission
from actors.scheduler.flights import Flight, Flights
from actors.scheduler.output import Output
from actors.scheduler.request import Request, State
from actors.scheduler.reserve import Reserve
from messages import cache
from messages.types import FinishReason, pack


class Leases:
    """What the cache is told of pages."""

    def __init__(
        self,
        output: Output,
        admission: Admission,
        flights: Flights,
        reserve: Reserve,
        page_size: int,
    ) -> None:
        self.output, self.admission = output, admission
        self.flights, self.reserve = flights, reserve
        self.page_size = page_size
        self.retiring: list[Request] = []  # have left; a step in flight touches their pages

    def replenish(self, running_count: int) -> None:
        """Pages for those who run to grow into: asks for more, or returns what is too many."""
        # Not those who ask: were they deferred, what was reserved for them would go back at once,
        # be announced as freed, and bring them to ask again, for ever.
        self.reserve.set_running(running_count)
        excess = self.reserve.take_excess()
        if excess:
            self.output.to_cache.append(cache.Return(pack(excess)))
        count = self.reserve.take_ask()
        if count > 0:
            self.output.to_cache.append(cache.Reserve(count))

    def commit(self, flight: Flight) -> None:
        """Shares the full pages that the step's prefill chunks have completed."""
        for request, begin, end in flight.prefills:
            if end > request.leased_len:
                continue  # of a jump: the cache hears of it at the request's end
            if request.is_running and end // self.page_size > begin // self.page_size:
                self.output.to_cache.append(cache.Commit(request.id, request.attempt, end))
                self.admission.shared(request)

    def retire(self, request: Request) -> None:
        """It has left: its pages go back as soon as no step in flight touches them."""
        if self.flights.is_touched(request):
            request.is_retiring = True
            self.retiring.append(request)
        else:
            self._settle(request)

    def settle_retiring(self) -> None:
        """A step has landed."""
        if not self.retiring:
            return
        ready = [r for r in self.retiring if not self.flights.is_touched(r)]
        self.retiring = [r for r in self.retiring if self.flights.is_touched(r)]
        for request in ready:
            request.is_retiring = False
            self._settle(request)

    def _settle(self, request: Request) -> None:
        """Its pages go back; then it waits again, or its abort is acknowledged."""
        computed = b"" if request.is_poisoned else request.tokens[: request.planned_len].tobytes()
        self.let_go(request, computed)
        request.pages = b""
        request.page_count = request.cached_len = request.planned_len = 0
        request.room_len = request.stop_len = 0
        request.granted = array("i")
        if request.state is State.WAITING:
            self.admission.wait(request)

    def let_go(self, request: Request, computed: bytes) -> None:
        """Its pages go back now; `computed` are the tokens whose keys they hold."""
        granted = request.granted.tobytes()
        self.output.to_cache.append(cache.Release(request.id, request.attempt, computed, granted))
        self.reserve.hint()
        self.admission.let_go(request)
        if request.state is State.DONE:
            self.acknowledge(request)

    def acknowledge(self, request: Request) -> None:
        """Where it was aborted and nobody has been told."""
        if not request.is_acknowledged:
            request.is_acknowledged = True
            self.output.end(request, FinishReason.ABORT)

    def check(self) -> None:
        """Asserts the laws."""
        for request in self.retiring:
            assert request.is_retiring, f"{request.id} leaves without knowing"
            assert self.flights.is_touched(request), f"{request.id} could have left"
