"""This file decides whom to ask the cache for next, and keeps those who were told to wait.

It does not know steps, slots or pages at hand; its owner says when somebody may be let in. An
admission is one question to the cache and one answer: all that the request needs, or nothing.

Laws: who waits is in the queue or behind exactly one other; whoever waits behind another asks again
as soon as that one has shared something or is gone; who lacks pages holds up those after it, so
that small requests cannot starve a large one.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.scheduler.queue import Queue, SchedulePolicy
from actors.scheduler.request import Event, Request
from messages.cache import Acquire, Candidate, Probe
from messages.scheduler import Deferred
from messages.types import Int32s, unpack

RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1.0, 60.0


class Admission:
    """Those who wait, and those for whom the cache has been asked."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self.queue = Queue(policy)
        self.asking: dict[tuple[str, int], Request] = {}
        self._behind: dict[str, list[Request]] = {}  # by whom they wait for
        self._holders: dict[str, Request] = {}  # who has pages; the latest attempt of each
        self._blocked_by: Request | None = None  # there are not enough pages for it
        self._told_count = 0  # what the cache has been told that changes its answers
        self._probing: list[Request] | None = None
        self._is_fresh = False  # match lengths of the window are as good as they get

    def wait(self, request: Request) -> None:
        self.queue.push(request)
        self._is_fresh = False

    def remove(self, request: Request) -> None:
        """A waiting request has ended."""
        if self._blocked_by is request:
            self._blocked_by = None
        if self.queue.remove(request):
            return
        for name, followers in self._behind.items():
            if request in followers:
                followers.remove(request)
                if not followers:
                    del self._behind[name]
                return
        raise AssertionError(f"{request.id} waits nowhere")

    def next(self) -> Acquire | Probe | None:
        """The next question to the cache, when somebody may be let in."""
        if self._blocked_by is not None or self._probing is not None or len(self.queue) == 0:
            return None
        if self.queue.policy.wants_match and len(self.queue) > 1 and not self._is_fresh:
            self._probing = self.queue.window()
            return Probe(
                tuple(
                    Candidate(request.tokens.tobytes(), request.namespace)
                    for request in self._probing
                )
            )
        request = self.queue.pop()
        request.advance(Event.ASK)
        request.asked_at = self._told_count
        self.asking[request.id, request.attempt] = request
        return Acquire(request.id, request.attempt, request.tokens.tobytes(), request.namespace)

    def probed(self, cached_lens: Int32s) -> None:
        """The answer to `Probe`. Some of those it is about may have ended meanwhile."""
        assert self._probing is not None, "an answer without a question"
        for request, cached_len in zip(self._probing, unpack(cached_lens), strict=True):
            request.match_len = cached_len
        self._probing = None
        self._is_fresh = True

    def acquired(self, name: str, attempt: int) -> Request:
        """The answer to `Acquire`. The request may have ended meanwhile."""
        request = self.asking.pop((name, attempt))
        self._holders[name] = request
        return request

    def deferred(self, message: Deferred) -> Request:
        """The other answer to `Acquire`."""
        request = self.asking.pop((message.request, message.attempt))
        return request

    def wait_again(self, request: Request, behind: str | None) -> None:
        """Puts back a request whom the cache has told to wait."""
        request.advance(Event.DEFER)
        if behind is None:
            self._blocked_by = request
            self.queue.push(request)
            return
        owner = self._holders.get(behind)
        if owner is None or owner.shared_at > request.asked_at:
            # The cache answered before it heard what we have told it since.
            self.wait(request)
        else:
            self._behind.setdefault(behind, []).append(request)

    def shared(self, request: Request) -> None:
        """The cache is being told that `request` has computed more, or lets go."""
        self._told_count += 1
        request.shared_at = self._told_count
        self._is_fresh = False
        for follower in self._behind.pop(request.id, ()):
            self.queue.push(follower)

    def let_go(self, request: Request) -> None:
        """The cache is being told that `request` holds nothing any more."""
        if self._holders.get(request.id) is request:
            del self._holders[request.id]
        self.shared(request)

    def freed(self) -> None:
        """There are pages again."""
        self._blocked_by = None

    def waiting(self) -> Iterable[Request]:
        yield from self.queue
        for followers in self._behind.values():
            yield from followers

    def check(self) -> None:
        """Asserts the laws."""
        self.queue.check()
        waiting = list(self.waiting())
        assert len(set(waiting)) == len(waiting), "somebody waits twice"
        for name, followers in self._behind.items():
            assert followers, f"nobody is behind {name}"
            assert name in self._holders, f"{followers[0].id} waits for {name}, who is gone"
        if self._blocked_by is not None:
            assert self._blocked_by in waiting, "one who does not wait holds up the others"


class Pace:
    """How fast requests end, to tell a refused client when to come back."""

    def __init__(self) -> None:
        self._gap_s = RETRY_AFTER_MIN_S
        self._last_s: float | None = None

    def ended(self, now_s: float) -> None:
        if self._last_s is not None:
            # A smoothed mean over about the last ten; a pause without work is no sign of slowness.
            gap_s = min(now_s - self._last_s, RETRY_AFTER_MAX_S)
            self._gap_s += (gap_s - self._gap_s) / 10
        self._last_s = now_s

    def retry_after_s(self, waiting_count: int) -> float:
        """When about `waiting_count` more requests will have ended, within bounds."""
        wait_s = self._gap_s * waiting_count
        return min(max(wait_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
