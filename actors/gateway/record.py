"""This file keeps the record of each open request: what was asked, and which tokens have come.

It does not know streams, protocols, the loop or which room died; time is an argument. It decides
what is dropped, what interrupts a request, and what is sent for it again.

Laws. A request leaves the ledger once, by its terminal message, by giving up or by being
cancelled while nothing of it is in flight; whatever comes for it later is dropped. Results of an
older attempt are dropped. The tokens taken are [0, token_count) without a gap: what was taken is
skipped, and what does not follow on it interrupts the request, since the link delivers at most
once. A request of which nothing is heard is asked for, and interrupted where nobody has it.

Blame. A part may die of a request, each time anew. Whoever was in flight at two deaths without a
token in between is a suspect; suspects are tried again in small groups and at last alone, and the
one that is alone when the part dies again is given up. Until then whoever was in flight at one
death waits as well, so that no other becomes a suspect beside it. Who gets a token is cleared.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from messages.gateway import Delta, Encoded, Failed
from messages.tokenizer import Cancel, Encode
from messages.types import FinishReason, Usage

LOSSES_MAX = 2  # deaths in a row, without a token in between: then a request is suspect
# Before what nobody died of is sent again: a refusal, a gap, a request that nobody has.
RETRY_S = 0.1
RETRY_MAX_S = 2.0
# A request of which nothing is heard for so long is asked for. What has no owner any more has lost
# a message that nobody could report; twice, since an answer may cross with its end.
POLL_S = 5.0
UNKNOWN_MAX = 2
# How long a cancelled request is kept for its terminal message before it is taken for lost.
CANCEL_WAIT_S = 60.0


class Stage(enum.Enum):
    PARKED = "parked"  # not sent: waits for a lost part to be back
    ENCODING = "encoding"  # sent to the tokenizer, which has not answered
    RUNNING = "running"  # past the tokenizer
    CANCELLED = "cancelled"  # nobody reads it: waits for its terminal message


class Record:
    """One open request."""

    __slots__ = (
        "attempt",
        "call_id",
        "choice",
        "emitted",
        "encode",
        "is_suspect",
        "last_s",
        "losses",
        "opened_s",
        "parked_s",
        "polled_s",
        "ready_s",
        "retries",
        "since_s",
        "stage",
        "token_count",
        "unknown_count",
        "usage",
    )

    def __init__(self, encode: Encode, call_id: str, choice: int, now_s: float) -> None:
        self.encode = encode  # its first attempt
        self.call_id = call_id
        self.choice = choice
        self.attempt = 0  # the last one sent
        self.stage = Stage.PARKED
        self.token_count = 0
        self.emitted = bytearray()  # Int32s of the tokens taken
        self.losses = 0  # deaths that it was in flight at, since its last token
        self.is_suspect = False
        self.retries = 0  # other interruptions, since its last token
        self.ready_s = now_s  # when it may be sent, if it is parked
        self.parked_s = 0.0  # how long it has been parked before, since its last token
        self.opened_s = now_s
        self.since_s = now_s  # since when it is in its stage
        self.last_s: float | None = None  # when the last tokens came
        self.polled_s: float | None = None  # when the scheduler was last asked whether it has it
        self.unknown_count = 0  # how often it said no, with nothing heard in between
        self.usage: Usage | None = None  # of its prompt, as the first tokens told it

    @property
    def request(self) -> str:
        return self.encode.request

    @property
    def is_check(self) -> bool:
        """Its terminal message is `Encoded`."""
        return not self.encode.forward

    def as_first_told(self, delta: Delta) -> Delta:
        """What was found in the cache is what the first attempt that came to a token found: a later
        one finds its own."""
        if self.attempt == 1 or delta.usage is None or self.usage is None:
            return delta
        usage = msgspec.structs.replace(delta.usage, cached_tokens=self.usage.cached_tokens)
        return msgspec.structs.replace(delta, usage=usage)


class Verdict(enum.Enum):
    TAKEN = "taken"
    DROPPED = "dropped"
    LOST = "lost"  # tokens are missing before it, or it was ended unasked: interrupt the request


# Bound once, for what is done with each token: read from its class, a member costs as much as a
# call (Python 3.11).
ENCODING, CANCELLED = Stage.ENCODING, Stage.CANCELLED
TAKEN, DROPPED, LOST = Verdict.TAKEN, Verdict.DROPPED, Verdict.LOST


class Interrupted(NamedTuple):
    """What a loss did. Records in `given_up` and `forgotten` have left the ledger."""

    parked: list[Record]
    given_up: list[Record]  # to be failed: parts die of it, or it has waited too long
    forgotten: list[Record]  # were cancelled: their terminal message will not come


class Ledger:
    """The open requests, by id, in the order in which they were opened."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.dropped_count = 0  # messages of unknown requests, older attempts, taken tokens
        self._may_have_suspects = False  # spares the look at each record

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records.values())

    def add(self, record: Record) -> None:
        """A new request, parked: `send` gives what to send for it."""
        assert record.request not in self.records, f"{record.request} is open already"
        self.records[record.request] = record

    def send(self, record: Record, now_s: float) -> list[Cancel | Encode]:
        """Starts the next attempt of a parked request: the messages to send, in order.

        The cancel ends what may still run of the attempt before it, wherever that is.
        """
        assert record.stage is Stage.PARKED, f"{record.request} is {record.stage}"
        messages: list[Cancel | Encode] = []
        if record.attempt:
            messages.append(Cancel(request=record.request, attempt=record.attempt))
        record.attempt += 1
        record.parked_s += now_s - record.since_s
        record.stage, record.since_s = Stage.ENCODING, now_s
        record.polled_s, record.unknown_count = None, 0
        encode = record.encode
        if record.attempt > 1:
            encode = msgspec.structs.replace(
                encode, attempt=record.attempt, emitted=bytes(record.emitted)
            )
        messages.append(encode)
        return messages

    def encoded(self, message: Encoded, now_s: float) -> Record | None:
        """The request is past the tokenizer; one that was only checked has left the ledger."""
        record = self._current(message.request, message.attempt)
        if record is None:
            return None
        if record.is_check:
            del self.records[record.request]
        elif record.stage is Stage.ENCODING:
            record.stage, record.since_s = Stage.RUNNING, now_s
        return record

    def take(self, delta: Delta, now_s: float) -> tuple[Verdict, Record | None]:
        """Judges one delta; a terminal one that is taken has removed its record."""
        record = self._current(delta.request, delta.attempt)
        if record is None:
            return DROPPED, None
        is_end = delta.finish is not None
        if record.stage is CANCELLED:
            if is_end:
                del self.records[record.request]
            return (TAKEN if is_end else DROPPED), record
        if delta.index > record.token_count or (is_end and delta.index < record.token_count):
            return LOST, record
        if delta.finish is FinishReason.ABORT:
            # Nobody here has asked for it: a part behind believed for a while that this gateway
            # was gone.
            return LOST, record
        if is_end:
            del self.records[record.request]
            return TAKEN, record
        if delta.index < record.token_count:
            self.dropped_count += 1
            return DROPPED, record
        assert len(delta.token_ids) == 4 * delta.token_count, (
            f"{delta.request}: {delta.token_count} tokens with {len(delta.token_ids)} bytes of ids"
        )
        if record.stage is ENCODING:  # it overtook `Encoded`, which comes another way
            record.stage, record.since_s = Stage.RUNNING, now_s
        if delta.token_count:
            record.losses = record.retries = record.unknown_count = 0
            record.parked_s = 0.0
            record.is_suspect = False
        if record.usage is None:
            record.usage = delta.usage
        record.token_count += delta.token_count
        record.emitted += delta.token_ids
        return TAKEN, record

    def failed(self, message: Failed) -> Record | None:
        """The record, removed; None when the message is of no use."""
        record = self._current(message.request, message.attempt)
        if record is not None:
            del self.records[record.request]
        return record

    def cancel(self, record: Record, now_s: float) -> Cancel | None:
        """Nobody reads it any more. With nothing in flight it leaves at once; otherwise the
        returned message asks for its end, and it stays until that has come."""
        if record.stage is Stage.CANCELLED or record.request not in self.records:
            return None
        was_parked = record.stage is Stage.PARKED
        record.stage, record.since_s = Stage.CANCELLED, now_s
        record.is_suspect = False
        if was_parked:
            del self.records[record.request]
            if not record.attempt:
                return None
        return Cancel(request=record.request, attempt=record.attempt)

    def interrupt(self, records: Iterable[Record], now_s: float, *, blames: bool) -> Interrupted:
        """What these requests were doing is lost. `blames`: a part died of something, and it may be
        one of them."""
        result = Interrupted([], [], [])
        struck: list[Record] = []
        for record in list(records):
            if record.stage is Stage.CANCELLED:
                del self.records[record.request]
                result.forgotten.append(record)
            elif record.stage is not Stage.PARKED:
                struck.append(record)
        for record in struck:
            record.stage, record.since_s = Stage.PARKED, now_s
            if blames:
                record.losses += 1
                record.ready_s = now_s
            else:
                record.ready_s = now_s + min(RETRY_S * 2.0**record.retries, RETRY_MAX_S)
                record.retries += 1
        accused = [record for record in struck if record.losses >= LOSSES_MAX] if blames else []
        if len(accused) == 1:
            struck.remove(accused[0])
            del self.records[accused[0].request]
            result.given_up.append(accused[0])
        else:
            for record in accused:
                record.is_suspect = self._may_have_suspects = True
        result.parked.extend(struck)
        return result

    def cancels(self) -> list[Cancel]:
        """The cancels whose terminal message has not come, to be sent again."""
        return [
            Cancel(request=record.request, attempt=record.attempt)
            for record in self
            if record.stage is Stage.CANCELLED
        ]

    def silent(self, now_s: float) -> list[Record]:
        """Those that the scheduler should have, and that nothing has been heard of for a while.
        Counts as asked for."""
        result = []
        for record in self:
            heard_s = max(record.since_s, record.last_s or 0.0, record.polled_s or 0.0)
            if record.stage is Stage.RUNNING and now_s - heard_s >= POLL_S:
                record.polled_s = now_s
                result.append(record)
        return result

    def unknown(self, request: str, attempt: int) -> Record | None:
        """The scheduler does not have it. Gives the record once that cannot be a crossing, or it
        does not matter: its cancel goes the way that it went."""
        record = self.records.get(request)
        if record is None or record.attempt != attempt:
            return None
        if record.stage is not Stage.RUNNING:
            return record if record.stage is Stage.CANCELLED else None
        if record.polled_s is None or (record.last_s or 0.0) >= record.polled_s:
            return None
        record.unknown_count += 1
        return record if record.unknown_count >= UNKNOWN_MAX else None

    def parked(self) -> list[Record]:
        return [record for record in self if record.stage is Stage.PARKED]

    @property
    def has_suspects(self) -> bool:
        if self._may_have_suspects:
            self._may_have_suspects = any(record.is_suspect for record in self)
        return self._may_have_suspects

    def ready(self, now_s: float) -> list[Record]:
        """The parked requests that may be sent now; of the suspects, the next to be tried."""
        parked = [record for record in self.parked() if record.ready_s <= now_s]
        suspects = [record for record in parked if record.is_suspect]
        is_trying = self._is_trying()
        if not suspects and not is_trying:
            return parked
        chosen = [record for record in parked if not record.losses]
        if not is_trying:
            # Groups first, so that many innocent ones do not wait long; then one by one, so that a
            # part dies four times at most until the guilty one is found.
            worst = max(record.losses for record in suspects)
            group = [record for record in suspects if record.losses == worst]
            count = 1 if worst > LOSSES_MAX else math.isqrt(len(group) - 1) + 1
            chosen += group[:count]
        return chosen

    def _is_trying(self) -> bool:
        """A suspect is in flight."""
        return any(record.is_suspect and record.stage is not Stage.PARKED for record in self)

    def expire(self, now_s: float, parked_max_s: float) -> Interrupted:
        """Removes what has waited too long: parked requests are given up, cancelled ones
        forgotten. Who waits for suspects to be tried waits for them, not for a part."""
        result = Interrupted([], [], [])
        is_trying = self._is_trying()
        for record in list(self):
            waited_s = now_s - record.since_s
            if record.stage is Stage.PARKED and record.losses and is_trying:
                record.since_s = now_s
            elif record.stage is Stage.PARKED and record.parked_s + waited_s >= parked_max_s:
                result.given_up.append(record)
                del self.records[record.request]
            elif record.stage is Stage.CANCELLED and waited_s >= CANCEL_WAIT_S:
                result.forgotten.append(record)
                del self.records[record.request]
        return result

    def check(self) -> None:
        """Asserts the laws of every record."""
        for request, record in self.records.items():
            where = f"{request} ({record.stage.value})"
            assert request == record.request, f"{where} is kept as {request}"
            assert len(record.emitted) == 4 * record.token_count, f"{where}: ids and count differ"
            is_accused = record.losses >= LOSSES_MAX
            assert is_accused or not record.is_suspect, f"{where}: suspect of {record.losses}"
            assert record.parked_s >= 0.0, f"{where}: parked for {record.parked_s} s"
            assert record.attempt or record.stage is Stage.PARKED, f"{where} was never sent"
            if record.is_check:
                assert not record.token_count, f"{where} has tokens, and is a check"

    def _current(self, request: str, attempt: int) -> Record | None:
        record = self.records.get(request)
        if record is None or record.attempt != attempt or not attempt:
            self.dropped_count += 1
            return None
        return record
