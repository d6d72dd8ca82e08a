"""This file is the gateway: calls in, streams of rows out, and nobody notices a crash behind it.

It does not know protocols: `http.py` and `actors/engine.py` open calls and read their streams.
`calls.py` keeps them, `recovery.py` sends their requests and sends them again after a loss; this
file starts and stops, and gives each message to the one that it is for.
Law: a drain is over, and the sweep rests, when nothing is open and every end has been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from actors.gateway.call import Call
from actors.gateway.calls import FULL, Calls
from actors.gateway.controls import Controls
from actors.gateway.errors import CLOSING, Refused, unavailable
from actors.gateway.inputs import Limits
from actors.gateway.recovery import Lost, Recovery, Resume
from actors.gateway.shape import parsers_of
from actors.gateway.stream import Stream
from actors.runtime.actor import Actor, MailboxSpec
from messages import gateway
from messages.cache import Cleared
from messages.config import GatewayConfig, ModelConfig, Paths
from messages.gateway import Abort, Deltas, Encoded, Failed, Recall, Recalled, Unknown
from messages.metrics import Page
from messages.scheduler import Load
from messages.system import Down, Drain, Reason, Undelivered, Up
from messages.tokenizer import Defaults, Dialect
from messages.types import Fault, Problem
from messages.worker import Facts

if TYPE_CHECKING:
    from actors.gateway.site import Site

SWEEP_S = 1.0  # how often stalls and waits are looked at, while anything is open


class Sweep(NamedTuple):
    """Look for streams that nobody reads and for waits that are over."""


class Beat(NamedTuple):
    """Give a sign to the clients of streams that have been silent."""


class Gateway(Actor):
    accepts = gateway.In
    private: ClassVar[Any] = Sweep | Beat | Resume
    answers = Page | Load | Cleared | Recalled
    offload_threads: Mapping[str, int] = {"batches": 1}
    mailbox = MailboxSpec(count_max=65_536, bytes_max=256 << 20)

    def __init__(self, model: ModelConfig, gateway: GatewayConfig, paths: Paths) -> None:
        self.model = model
        self.config = gateway
        self.paths = paths
        self.recovery = Recovery(paths, gateway.recover_s)
        self.calls = Calls(gateway, self.recovery)
        self.is_draining = False
        self.is_stopping = False
        self.swept_s = 0.0
        self.site: Site | None = None

    async def on_start(self) -> bytes:
        context = self.context
        self.facts = msgspec.msgpack.decode(context.notes[self.paths.worker], type=Facts)
        note = context.notes.get(self.paths.tokenizer, b"")
        dialect = msgspec.msgpack.decode(note, type=Dialect) if note else Dialect()
        self.limits = Limits(
            config=self.config,
            model=self.model.name or self.facts.model,
            vocab_size=self.facts.vocab_size,
            parsers=parsers_of(self.config, dialect),
            defaults=dialect.defaults if self.config.sampling_defaults == "model" else Defaults(),
            context_len=self.facts.context_len,
            hidden_len=self.facts.hidden_len,
            vector_lens=self.facts.vector_lens,
        )
        self.ids = context.rng("call ids")
        self.seeds = context.rng("seeds")
        self.controls = Controls(context, self.paths, self.recovery.needed)
        self.calls.start(context)
        self.recovery.start(context)
        if not self.config.http:
            return b""
        # Only a gateway with a street door pays for the HTTP libraries.
        from actors.gateway.site import Site

        self.site = Site(self)
        host, port = await self.site.open()
        context.log.info("listening", host=host, port=port)
        return msgspec.msgpack.encode({"host": host, "port": port})

    async def on_stop(self, reason: Reason) -> None:
        self.is_stopping = True
        self.calls.fail_all(CLOSING)
        self._settle()
        if self.site is not None:
            await self.site.close()

    def on_end(self) -> None:
        """After a crash `on_stop` has not run: no reader may be left waiting, no port taken."""
        self.calls.wake_all(unavailable("The gateway failed; try again."))
        if self.site is not None:
            self.site.cut()

    def on_drain(self, message: Drain) -> None:
        self.is_draining = True
        self._settle()

    # For readers: HTTP and the Engine, on this loop

    def open(self, call: Call, call_id: str | None = None) -> Stream:
        """Starts a call. Raises Refused when the house is full or closing."""
        try:
            if not self.is_open:
                raise Refused(CLOSING)
            stream = self.calls.begin(call, call_id or self.new_id(), self)
        except Refused:
            self.context.count("histrio_requests_total", outcome="refused")
            raise
        if len(self.calls.streams) == 1:
            self.swept_s = self.context.now_s()
            self.context.start_timer("sweep", Sweep(), every_s=SWEEP_S)
            if self.config.ping_s:
                self.context.start_timer("beat", Beat(), every_s=self.config.ping_s)
        return stream

    def full_problem(self) -> Problem | None:
        """Why not one more request is taken; None where there is a place."""
        if not self.is_open:
            return CLOSING
        return FULL if self.calls.is_full else None

    def close(self, stream: Stream) -> None:
        """The reader has gone: cancels what still runs of its call."""
        self.calls.close(stream)
        self._settle()

    def forget(self, stream: Stream) -> None:
        """Its end has been read."""
        self.calls.forget(stream)
        self._settle()

    def new_id(self) -> str:
        return f"{self.ids.getrandbits(96):024x}"

    def draw_seed(self) -> int:
        return self.seeds.getrandbits(63)

    @property
    def is_open(self) -> bool:
        """New calls are taken, though they may have to wait for a part that is down."""
        return not (self.is_draining or self.is_stopping)

    def abort(self, prefix: str) -> int:
        """Ends the requests that a client, or we, call by a name that begins so; all of them for
        an empty one. Returns how many of this gateway's they were; the others are told."""
        self.controls.abort_elsewhere(prefix)
        return self._abort(prefix)

    def _abort(self, prefix: str) -> int:
        count = self.calls.abort(prefix)
        self._settle()
        return count

    # Messages

    def on_abort(self, message: Abort) -> None:
        self._abort(message.prefix)

    async def on_recall(self, message: Recall) -> None:
        if self.site is None:
            self.context.reply(Recalled(problem=unavailable("There is no such door here.")))
        else:
            self.context.reply(await self.site.app.responses.local(message))

    def on_deltas(self, message: Deltas) -> None:
        self.calls.take(message.rows)
        if self.recovery.ledger.has_suspects:
            self.recovery.resume()
        self._settle()

    def on_encoded(self, message: Encoded) -> None:
        self.calls.encoded(message)
        self._settle()

    def on_failed(self, message: Failed) -> None:
        ledger = self.recovery.ledger
        if message.problem.fault is Fault.UNAVAILABLE and not self.is_stopping:
            record = ledger.records.get(message.request)
            if record is not None and record.attempt == message.attempt:
                self._lose(self.recovery.interrupt(record))
            return
        failed = ledger.failed(message)
        if failed is not None:
            self._lose([Lost(failed, message.problem)])

    def on_unknown(self, message: Unknown) -> None:
        self._lose(self.recovery.unknown(message))

    def on_up(self, up: Up) -> None:
        self.recovery.up(up)

    def on_down(self, down: Down) -> None:
        self._lose(self.recovery.lose_part(down))

    def on_undelivered(self, notice: Undelivered) -> None:
        self._lose(self.recovery.undelivered(notice))

    def on_resume(self, message: Resume) -> None:
        self.recovery.resume()

    def on_sweep(self, message: Sweep) -> None:
        self.calls.lose(self.recovery.sweep())
        now_s = self.context.now_s()
        late_s = now_s - self.swept_s - SWEEP_S
        self.swept_s = now_s
        self.calls.cut_unread(late_s if late_s > SWEEP_S else 0.0)
        self._settle()

    def on_beat(self, message: Beat) -> None:
        for stream in self.calls.streams.values():
            stream.beat()

    def check(self) -> None:
        self.calls.check()

    def _lose(self, lost: list[Lost]) -> None:
        self.calls.lose(lost)
        self._settle()

    def _settle(self) -> None:
        """Opens what has found a place; rests, or ends its drain, if nothing is left."""
        self.calls.feed()
        if not self.calls.is_idle:
            return
        self.context.cancel_timer("sweep")
        self.context.cancel_timer("beat")
        if self.is_draining:
            self.context.drained()
