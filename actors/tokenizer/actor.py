"""This file is the tokenizer: it gives each prompt to a thread, and what comes back to the router.

It does not know HTTP, steps or pages. Encoding and templates run in threads of its own, so that
however long a prompt is, cancels and other prompts go on; a few thousand ids are only checked, and
that at once. Laws: each Encode is answered by one Encoded and a Submit, or by one terminal message
to the gateway; a Cancel never overtakes its request; no more than `queued_max` prompts wait, nor
more than QUEUED_BYTES_MAX of text.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import msgspec

from actors.processors.base import allowed_of
from actors.runtime.actor import Actor, MailboxSpec
from actors.runtime.context import Ref
from actors.tokenizer.chat import BadTemplate, ChatTemplates
from actors.tokenizer.dialect import defaults_of, dialect_of
from actors.tokenizer.grammar import check_grammar
from actors.tokenizer.processors import check_processors
from actors.tokenizer.prompt import (
    Refused,
    check_chars,
    check_ids,
    check_sampling,
    cut,
    labels,
    refuse,
    settle,
    spellings,
)
from actors.vocab.shared import vocab_of
from actors.vocab.vocab import Vocab
from messages import gateway, router, scheduler, tokenizer
from messages.base import Address
from messages.config import ModelConfig, Paths, TokenizerConfig
from messages.gateway import Delta, Deltas, Encoded, Failed
from messages.scheduler import Submit
from messages.system import Cause, Undelivered
from messages.tokenizer import Defaults, Encode
from messages.types import Fault, FinishReason, Int32s, Problem, Sampling, Usage, pack, unpack
from messages.worker import Facts

QUEUED_BYTES_MAX = 256 << 20
QUICK_IDS_MAX = 4096
SENT_MAX = 16_384  # submits that the router may still give back
RETRY_AFTER_S = 1.0
ENCODE_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Prompt(NamedTuple):
    """What a thread made of an Encode."""

    ids: Int32s
    prompt_len: int
    sampling: Sampling
    text: str  # of the ids, where it was asked for


class Done(NamedTuple):
    """Told by a thread: the prompt of `pending[key]`, or why there is none."""

    key: tuple[str, int]
    result: Prompt | Exception


class Pending:
    """An Encode that a thread has or will have. `is_cancelled` is read there too."""

    __slots__ = ("byte_count", "encode", "is_cancelled", "since_s")

    def __init__(self, encode: Encode, byte_count: int, since_s: float) -> None:
        self.encode = encode
        self.byte_count = byte_count
        self.since_s = since_s
        self.is_cancelled = False


class Tokenizer(Actor):
    accepts = tokenizer.In
    private = Done
    mailbox = MailboxSpec(count_max=16_384, bytes_max=QUEUED_BYTES_MAX)

    def __init__(self, model: ModelConfig, tokenizer: TokenizerConfig, paths: Paths) -> None:
        self.model = model
        self.config = tokenizer
        self.paths = paths
        self.offload_threads = {"default": tokenizer.threads}
        self.pending: dict[tuple[str, int], Pending] = {}
        self.pending_bytes = 0
        self.sent: OrderedDict[str, tuple[int, Address]] = OrderedDict()

    @staticmethod
    def prepare(model: ModelConfig, tokenizer: TokenizerConfig, paths: Paths) -> Vocab:
        return vocab_of(model.path)

    async def on_start(self) -> bytes:
        self.router: Ref[router.In] = self.context.peer(self.paths.router)
        self.facts = msgspec.msgpack.decode(self.context.notes[self.paths.worker], type=Facts)
        self.core = await self.context.in_thread(self.load)
        dialect = dialect_of(self.core.templates.sources, self.core.defaults)
        return msgspec.msgpack.encode(dialect)

    def load(self) -> Core:
        vocab = vocab_of(self.model.path)
        templates = dict(vocab.templates)
        if self.config.chat_template:
            templates = {"default": read_template(Path(self.config.chat_template))}
        defaults = read_defaults(Path(self.model.path) / "generation_config.json")
        return Core(vocab, ChatTemplates(templates, vocab.named), self.facts, self.config, defaults)

    def on_encode(self, message: Encode) -> None:
        assert not (message.measure and message.forward), message.request
        key = (message.request, message.attempt)
        assert key not in self.pending, key
        byte_count = byte_count_of(message)
        if (
            len(self.pending) >= self.config.queued_max
            or self.pending_bytes + byte_count > QUEUED_BYTES_MAX
        ):
            self.fail(
                message.request,
                message.attempt,
                message.reply_to,
                Problem(
                    Fault.OVERLOADED, "Too many prompts are waiting.", retry_after_s=RETRY_AFTER_S
                ),
            )
            return
        pending = Pending(message, byte_count, self.context.now_s())
        self.pending[key] = pending
        self.pending_bytes += byte_count
        core = self.core
        if is_quick(message):
            self.on_done(Done(key, attempted(core, message)))
            return
        self.context.offload(
            lambda: None if pending.is_cancelled else core.encode(message),
            lambda result: Done(key, result if result is not None else Cancelled()),
        )

    def on_cancel(self, message: tokenizer.Cancel) -> None:
        pending = self.pending.get((message.request, message.attempt))
        if pending is not None:
            # Its end is sent when the thread is through, so that it is sent once.
            pending.is_cancelled = True
            return
        cancel = scheduler.Cancel(message.request, message.attempt)
        self.router.tell(cancel, request=message.request)

    def on_done(self, message: Done) -> None:
        pending = self.pending.pop(message.key)
        self.pending_bytes -= pending.byte_count
        encode, result = pending.encode, message.result
        if pending.is_cancelled:
            self.abort(encode)
        elif isinstance(result, Prompt):
            waited_s = self.context.now_s() - pending.since_s
            self.context.observe("histrio_encode_seconds", waited_s, bounds=ENCODE_BOUNDS_S)
            self.context.log.debug(
                "encoded", request=encode.request, tokens=result.prompt_len, attempt=encode.attempt
            )
            self.submit(encode, result)
        elif isinstance(result, Refused):
            self.fail(encode.request, encode.attempt, encode.reply_to, result.problem)
            self.log_cause(encode, result.__cause__)
        else:
            # The encoder failed on this text. Nothing is shared with other prompts, so they go on.
            problem = Problem(Fault.INTERNAL, "The prompt could not be encoded.")
            self.fail(encode.request, encode.attempt, encode.reply_to, problem)
            self.log_cause(encode, result)

    def submit(self, encode: Encode, prompt: Prompt) -> None:
        reply: Ref[gateway.In] = self.context.ref(encode.reply_to)
        reply.tell(
            Encoded(
                encode.request,
                encode.attempt,
                prompt.prompt_len,
                prompt.ids if encode.want_prompt_ids else b"",
                prompt.text,
            ),
            request=encode.request,
        )
        if not encode.forward:
            return
        self.sent[encode.request] = (encode.attempt, encode.reply_to)
        if len(self.sent) > SENT_MAX:
            self.sent.popitem(last=False)
        self.router.tell(
            Submit(
                request=encode.request,
                attempt=encode.attempt,
                reply_to=encode.reply_to,
                prompt=prompt.ids,
                sampling=prompt.sampling,
                stop=encode.stop,
                emitted=encode.emitted,
                namespace=namespace_of(encode),
                priority=encode.priority,
                grammar=encode.grammar,
            ),
            request=encode.request,
        )

    def abort(self, encode: Encode) -> None:
        """The end of a request that was cancelled before it went on."""
        emitted_count = len(encode.emitted) // 4
        delta = Delta(
            request=encode.request,
            attempt=encode.attempt,
            index=emitted_count,
            token_count=0,
            finish=FinishReason.ABORT,
            usage=Usage(completion_tokens=emitted_count),
        )
        reply: Ref[gateway.In] = self.context.ref(encode.reply_to)
        reply.tell(Deltas((delta,)), request=encode.request)

    def fail(self, request: str, attempt: int, reply_to: Address, problem: Problem) -> None:
        reply: Ref[gateway.In] = self.context.ref(reply_to)
        reply.tell(Failed(request, attempt, problem), request=request)

    def log_cause(self, encode: Encode, cause: BaseException | None) -> None:
        """What the client is not told: how a template or the encoder failed."""
        if cause is not None:
            self.context.log.warning(
                "prompt_failed", request=encode.request, error=repr(cause)[:500]
            )

    def on_undelivered(self, notice: Undelivered) -> None:
        """A Submit came back: the request ends here, or it would wait for ever."""
        if notice.kind != "Submit" or notice.request is None:
            return
        sent = self.sent.pop(notice.request, None)
        if sent is None:
            self.context.count("histrio_submits_lost_total")
            return
        fault = Fault.OVERLOADED if notice.cause is Cause.FULL else Fault.UNAVAILABLE
        problem = Problem(fault, "The request could not be queued.", retry_after_s=RETRY_AFTER_S)
        self.fail(notice.request, *sent, problem)

    def check(self) -> None:
        held = sum(pending.byte_count for pending in self.pending.values())
        assert held == self.pending_bytes, (held, self.pending_bytes)
        assert len(self.pending) <= self.config.queued_max, len(self.pending)


def is_quick(message: Encode) -> bool:
    """Whether a thread would cost more than the work: ids that have to be checked and no more."""
    return (
        message.ids is not None
        and len(message.ids) <= 4 * QUICK_IDS_MAX
        and message.grammar is None
        and not message.bad_words
        and not message.want_prompt_text
    )


def attempted(core: Core, message: Encode) -> Prompt | Exception:
    try:
        return core.encode(message)
    except Exception as error:
        return error


class Cancelled(Exception):
    """The thread left out a prompt that nobody wants any more."""


class Core:
    """What the threads share: all of it immutable."""

    def __init__(
        self,
        vocab: Vocab,
        templates: ChatTemplates,
        facts: Facts,
        config: TokenizerConfig,
        defaults: Defaults,
    ) -> None:
        self.vocab = vocab
        self.templates = templates
        self.defaults = defaults
        self.facts = facts
        self.chars_max = facts.context_len * config.chars_per_token_max
        self.processors = allowed_of(config.logits_processors)

    def spell(self, text: str) -> list[int]:
        return self.vocab.encode(text, add_special=False)

    def encode(self, message: Encode) -> Prompt:
        """Raises Refused."""
        param = message.param or ("prompt" if message.chat is None else "messages")
        context_len = self.facts.context_len
        check_sampling(message.sampling, self.facts.vocab_size)
        if message.grammar is not None:
            check_grammar(message.grammar)
        if message.ids is not None:
            ids = list(unpack(message.ids))
        elif message.text is not None:
            check_chars(len(message.text), self.chars_max, context_len, param)
            ids = self.vocab.encode(message.text, add_special=message.add_special)
        elif message.chat is not None:
            text = self.templates.render(
                message.chat, chars_max=self.chars_max, context_len=context_len
            )
            # The template writes the special tokens, BOS as well.
            ids = self.vocab.encode(text, add_special=False)
        else:
            raise refuse("There is no prompt.", param)
        if message.truncate_len is not None:
            ids = cut(ids, message.truncate_len, message.sampling, context_len)
        if ids or not message.measure:
            check_ids(ids, self.facts.vocab_size, param)
        sampling = message.sampling
        if not message.measure:
            sampling = settle(sampling, len(ids), context_len, param)
        if sampling.processors:
            calls = check_processors(sampling.processors, self.processors, self.spell)
            sampling = msgspec.structs.replace(sampling, processors=calls)
        if message.bad_words:
            bad_sequences = spellings(message.bad_words, self.vocab.encode)
            sampling = msgspec.structs.replace(sampling, bad_sequences=bad_sequences)
        if message.label_words:
            label_ids = labels(message.label_words, self.vocab.encode)
            sampling = msgspec.structs.replace(sampling, label_ids=label_ids)
        skip_special = message.measure and message.stop.skip_special
        text = ""
        if message.want_prompt_text:
            text = self.vocab.decode(ids, skip_special=skip_special)
        return Prompt(pack(ids), len(ids), sampling, text)


def read_defaults(path: Path) -> Defaults:
    """What a generation_config.json recommends; nothing where there is none, or a damaged one."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError):
        return Defaults()
    return defaults_of(found)


def read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTemplate(f"{path}: the chat template cannot be read ({error})") from error


def namespace_of(encode: Encode) -> str:
    """Log probabilities of a prompt need all of it to be computed, in every attempt."""
    if encode.sampling.prompt_logprobs is None:
        return encode.namespace
    return f"{encode.namespace}\0{encode.request}.{encode.attempt}"


def byte_count_of(message: Encode) -> int:
    """About how much memory the prompt holds while it waits."""
    grammar_bytes = 0 if message.grammar is None else len(message.grammar.text)
    if message.chat is not None:
        return grammar_bytes + len(message.chat.messages_json) + len(message.chat.tools_json)
    return grammar_bytes + len(message.text or "") + len(message.ids or b"")
