"""This file collects what one event makes the scheduler say, and counts what metrics show.

It does not know who sends it or how. Law: within each list the order is the order of events; what
goes to the cache goes before the tails that acknowledge it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from actors.scheduler.finish import usage_of
from actors.scheduler.mail import Mail
from actors.scheduler.request import Request
from messages import cache
from messages.detokenizer import Open, Tail
from messages.scheduler import Submit
from messages.types import FinishReason, Problem, Usage
from messages.worker import PromptPart, Step


class News(NamedTuple):
    """What became of a request, for those who follow it in the log."""

    event: str
    request: str
    facts: Mapping[str, object]


class Output:
    """Emptied by its owner after each event."""

    __slots__ = (
        "cached_tokens",
        "generated_tokens",
        "landed",
        "mails",
        "news",
        "prompt_tokens",
        "queue_s",
        "retraction_count",
        "steps",
        "to_cache",
    )

    def __init__(self) -> None:
        self.to_cache: list[cache.In] = []
        self.steps: list[Step] = []
        self.mails: dict[str, Mail] = {}  # by the path of the gateway that reads it
        self.news: list[News] = []
        self.landed: list[tuple[float, int]] = []  # seconds and rows of steps that are done
        self.queue_s: list[float] = []  # how long those admitted first now had waited
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.retraction_count = 0

    def mail(self, gateway: str) -> Mail:
        """What goes to the front end of that gateway."""
        mail = self.mails.get(gateway)
        if mail is None:
            mail = self.mails[gateway] = Mail()
        return mail

    def announce(self, request: Request) -> None:
        """The detokenizer is told of a request before its first tail."""
        assert not request.is_announced
        request.is_announced = True
        emitted = request.tokens[request.prompt_len :][: request.resumed_len].tobytes()
        request.mail.opened.append(
            Open(
                request.id,
                request.attempt,
                request.reply_to,
                request.stop,
                emitted,
                usage_of(request, 0),
            )
        )

    def tell_prompt(self, request: Request, part: PromptPart) -> None:
        """A tail with log probabilities of the prompt, and no tokens."""
        if not request.is_announced:
            self.announce(request)
        request.mail.rows.append(
            Tail(
                request.id,
                request.attempt,
                request.output_len,
                prompt_logprobs=part.logprobs,
                prompt_index=part.index,
            )
        )

    def end(
        self,
        request: Request,
        finish: FinishReason,
        *,
        matched: int | None = None,
        problem: Problem | None = None,
        completion_tokens: int | None = None,
    ) -> None:
        """A terminal tail without tokens."""
        if not request.is_announced:
            self.announce(request)
        request.mail.rows.append(
            Tail(
                request.id,
                request.attempt,
                request.output_len,
                finish=finish,
                matched=matched,
                usage=usage_of(request, completion_tokens),
                problem=problem,
            )
        )

    def refuse(
        self,
        message: Submit,
        problem: Problem | None,
        finish: FinishReason = FinishReason.ERROR,
    ) -> None:
        """The terminal tail of a request that was never taken in."""
        prompt_len = len(message.prompt) // 4
        usage = Usage(prompt_tokens=prompt_len)
        mail = self.mail(message.reply_to.path)
        mail.opened.append(
            Open(
                message.request,
                message.attempt,
                message.reply_to,
                message.stop,
                message.emitted,
                usage,
            )
        )
        mail.rows.append(
            Tail(
                message.request,
                message.attempt,
                len(message.emitted) // 4,
                finish=finish,
                usage=usage,
                problem=problem,
            )
        )
