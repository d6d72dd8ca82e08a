"""This file keeps the requests whose grammar is being compiled, and knows which are ready.

It does not know engines or steps: it asks for each grammar once, however many requests wait for it,
and tells who may go on. How long a grammar is compiled, the worker sees to; here it is only counted
how long one waits for its turn. Time is an argument. A request is here or with the schedule, never
in both.

Laws: no more than INFLIGHT_MAX questions are with the worker, so that steps find room in its
mailbox; whose grammar takes too long to compile is refused, and who waits too long for its turn is
told that the server is busy: neither holds up anybody; a request that has been let in before, and
lost with a part, waits many times as long for its turn; what is wrong stays refused for a while
without asking again.
"""

from __future__ import annotations

from collections import OrderedDict

from messages.base import Address
from messages.scheduler import Compiled, Outcome, Submit
from messages.types import Fault, Grammar, Problem
from messages.worker import Compile

INFLIGHT_MAX = 4
RESUMED_FACTOR = 10  # times longer than others' time
READY_MAX = 256  # as many as a worker keeps; a row that opens with another one is compiled there
REFUSED_MAX = 256


class Wait:
    """One grammar that is not ready, and who waits for it."""

    __slots__ = ("is_asked", "number", "submits")

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_asked = False  # the worker has it
        self.submits: dict[str, tuple[Submit, float]] = {}  # by request, and since when


class Grammars:
    """`asks` are to be sent to the worker; the owner empties it."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.asks: list[Compile] = []
        self._ready: OrderedDict[Grammar, None] = OrderedDict()
        self._refused: OrderedDict[Grammar, str] = OrderedDict()
        self._waits: OrderedDict[Grammar, Wait] = OrderedDict()
        self._asked: dict[int, Grammar] = {}
        self._by_request: dict[str, Grammar] = {}
        self._number = 0

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._by_request)

    def judge(self, grammar: Grammar) -> bool | Problem:
        """True: it is ready. A problem: it is known to be wrong. False: it has to be asked for."""
        if grammar in self._ready:
            self._ready.move_to_end(grammar)
            return True
        problem = self._refused.get(grammar)
        return False if problem is None else refused(grammar, problem)

    def hold(self, submit: Submit, now_s: float) -> None:
        """The request waits until its grammar is ready."""
        grammar = submit.grammar
        assert grammar is not None and submit.request not in self._by_request
        wait = self._waits.get(grammar)
        if wait is None:
            self._number += 1
            wait = self._waits[grammar] = Wait(self._number)
        wait.submits[submit.request] = (submit, now_s)
        self._by_request[submit.request] = grammar
        self._ask()

    def attempt_of(self, request: str) -> int | None:
        """The attempt that waits here, if one does."""
        grammar = self._by_request.get(request)
        return None if grammar is None else self._waits[grammar].submits[request][0].attempt

    def take(self, request: str) -> Submit:
        """Takes out a request that waits here. Its grammar is forgotten, if nobody else waits for
        it and the worker has not been asked."""
        grammar = self._by_request.pop(request)
        wait = self._waits[grammar]
        if len(wait.submits) == 1 and not wait.is_asked:
            del self._waits[grammar]
        return wait.submits.pop(request)[0]

    def take_of(self, reply_to: Address) -> list[Submit]:
        """Takes out all that nobody would read."""
        found = [
            submit
            for wait in self._waits.values()
            for submit, _ in wait.submits.values()
            if submit.reply_to == reply_to
        ]
        for submit in found:
            self.take(submit.request)
        return found

    def expire(self, now_s: float) -> list[tuple[Submit, Problem]]:
        """Takes out those who have waited too long for their turn."""
        waits = [wait for wait in self._waits.values() if not wait.is_asked]
        late = [submit for wait in waits for submit in self._late(wait, now_s)]
        for submit in late:
            self.take(submit.request)
        return [(submit, busy()) for submit in late]

    def _late(self, wait: Wait, now_s: float) -> list[Submit]:
        return [
            submit
            for submit, since_s in wait.submits.values()
            if now_s - since_s >= self.timeout_s * (RESUMED_FACTOR if submit.attempt > 1 else 1)
        ]

    def compiled(self, message: Compiled, now_s: float) -> list[tuple[Submit, Problem | None]]:
        """The answer to one question: who has waited for it, and what is wrong with it."""
        grammar = self._asked.pop(message.number)
        wait = self._waits.pop(grammar)
        leaving = [submit for submit, _ in wait.submits.values()]
        problem = None
        match message.outcome:
            case Outcome.READY:
                remember(self._ready, grammar, None, READY_MAX)
            case Outcome.WRONG:
                problem = refused(grammar, message.problem)
                remember(self._refused, grammar, message.problem, REFUSED_MAX)
            case Outcome.LATE:
                problem = too_slow(grammar, self.timeout_s)
            case Outcome.NO_TURN:
                problem = busy()
                leaving = self._late(wait, now_s)
        for submit in leaving:
            del wait.submits[submit.request], self._by_request[submit.request]
        if wait.submits:  # it has another turn, behind the others
            wait.is_asked = False
            self._waits[grammar] = wait
        self._ask()
        return [(submit, problem) for submit in leaving]

    def check(self) -> None:
        """Asserts the laws."""
        assert len(self._asked) <= INFLIGHT_MAX, f"{len(self._asked)} grammars are asked for"
        held = {name: grammar for grammar, wait in self._waits.items() for name in wait.submits}
        assert held == self._by_request, "who waits, and for what, is told in two ways"
        asked = {wait.number: grammar for grammar, wait in self._waits.items() if wait.is_asked}
        assert asked == self._asked, "what is asked for is told in two ways"
        assert all(wait.submits or wait.is_asked for wait in self._waits.values()), "for nobody"
        if len(self._asked) < INFLIGHT_MAX:
            assert len(self._asked) == len(self._waits), "a grammar is not asked for"
        assert not set(self._ready) & set(self._waits), "a ready grammar is waited for"

    def _ask(self) -> None:
        for grammar, wait in self._waits.items():
            if len(self._asked) >= INFLIGHT_MAX:
                return
            if not wait.is_asked:
                wait.is_asked = True
                self._asked[wait.number] = grammar
                self.asks.append(Compile(wait.number, grammar))


def remember(known: OrderedDict, key: Grammar, value: object, count_max: int) -> None:  # type: ignore[type-arg]
    known[key] = value
    if len(known) > count_max:
        known.popitem(last=False)


def refused(grammar: Grammar, problem: str) -> Problem:
    param = grammar.param or None
    return Problem(Fault.INVALID, problem, param=param, code="invalid_grammar")


def busy() -> Problem:
    return Problem(
        Fault.OVERLOADED,
        "The server is busy with the constraints of others. Try again later.",
        code="queue_full",
        retry_after_s=1.0,
    )


def too_slow(grammar: Grammar | None, timeout_s: float) -> Problem:
    param = grammar.param if grammar is not None else ""
    return Problem(
        Fault.INVALID,
        f"The constraint was not compiled within {timeout_s:g} seconds: it is too complex.",
        param=param or None,
        code="grammar_timeout",
    )
