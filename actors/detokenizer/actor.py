"""This file is the detokenizer: what a step brought, as text, in one message for each gateway.

It does not know HTTP or steps. Laws: a tail of a request that it does not know, of an older
attempt, or of a scheduler that is dead, is dropped and counted; when a stop string is met the
client has its end at once, and the scheduler is told; the request's entry stays until the scheduler
has said that it is over.
"""

from __future__ import annotations

from actors.detokenizer.output import Output
from actors.runtime.actor import Actor, MailboxSpec
from actors.runtime.context import Ref
from actors.vocab.shared import vocab_of
from actors.vocab.vocab import Vocab
from messages import detokenizer, gateway, scheduler
from messages.base import Address
from messages.config import ModelConfig, Paths
from messages.detokenizer import Open, Tail, Tokens
from messages.gateway import Delta, Deltas, Failed
from messages.scheduler import StopMet
from messages.system import Down
from messages.types import Fault, Problem


class Detokenizer(Actor):
    accepts = detokenizer.In
    # One message a step: this many steps behind is minutes, and the scheduler is told (REJECT).
    mailbox = MailboxSpec(count_max=8192)

    def __init__(self, model: ModelConfig, paths: Paths) -> None:
        self.model = model
        self.paths = paths
        self.outputs: dict[str, Output] = {}
        self.incarnation_min = 0  # lives of the scheduler before this one are over

    @staticmethod
    def prepare(model: ModelConfig, paths: Paths) -> Vocab:
        return vocab_of(model.path)

    async def on_start(self) -> bytes:
        self.scheduler: Ref[scheduler.In] = self.context.peer(self.paths.scheduler)
        self.vocab = await self.context.in_thread(lambda: vocab_of(self.model.path))
        self.context.watch(self.paths.scheduler)
        return b""

    def on_tokens(self, message: Tokens) -> None:
        sender = self.context.sender
        if sender is not None and sender.incarnation < self.incarnation_min:
            # The news of a death overtakes what the dead said. Nobody would end what this opens.
            self.context.count("histrio_detokenizer_dropped_total", reason="dead")
            return
        life = self.incarnation_min if sender is None else sender.incarnation
        for opened in message.opened:
            self.open(opened, life)
        by_gateway: dict[Address, list[Delta]] = {}
        for tail in message.rows:
            output = self.outputs.get(tail.request)
            if output is None or output.attempt != tail.attempt:
                self.context.count("histrio_detokenizer_dropped_total", reason="unknown")
                continue
            delta = self.take(output, tail)
            if delta is not None:
                by_gateway.setdefault(output.reply_to, []).append(delta)
        for address, deltas in by_gateway.items():
            reply: Ref[gateway.In] = self.context.ref(address)
            reply.tell(Deltas(tuple(deltas)))

    def open(self, opened: Open, life: int) -> None:
        known = self.outputs.get(opened.request)
        if known is not None and known.attempt > opened.attempt:
            self.context.count("histrio_detokenizer_dropped_total", reason="old")
            return
        vocab = self.vocab
        self.outputs[opened.request] = Output(opened, vocab.pieces, vocab.token_bytes, life)

    def take(self, output: Output, tail: Tail) -> Delta | None:
        if not output.follows(tail):
            self.lose(output)
        delta = output.take(tail)
        if tail.finish is not None:
            del self.outputs[tail.request]
            self.context.log.debug(
                "ended", request=tail.request, finish=tail.finish.value, tokens=output.token_count
            )
        elif delta is not None and output.matched is not None:
            met = StopMet(tail.request, tail.attempt, output.token_count)
            self.scheduler.tell(met, request=tail.request)
        return delta

    def lose(self, output: Output) -> None:
        """Tokens did not arrive (a step's message was refused): the gateway starts a new attempt
        from what the client has."""
        output.ended = True
        self.context.count("histrio_detokenizer_dropped_total", reason="gap")
        problem = Problem(Fault.UNAVAILABLE, "Part of the output was lost.")
        reply: Ref[gateway.In] = self.context.ref(output.reply_to)
        reply.tell(Failed(output.request, output.attempt, problem), request=output.request)

    def on_down(self, down: Down) -> None:
        """Whatever that scheduler was running comes again under a new attempt. The next one may
        have spoken before the news was here: what it runs goes on."""
        self.incarnation_min = max(self.incarnation_min, down.address.incarnation + 1)
        dead = [name for name, out in self.outputs.items() if out.life < self.incarnation_min]
        for name in dead:
            del self.outputs[name]

    def check(self) -> None:
        for request, output in self.outputs.items():
            assert output.request == request, (request, output.request)
            assert output.life >= self.incarnation_min, f"{request} is of a dead scheduler"
            output.check()
