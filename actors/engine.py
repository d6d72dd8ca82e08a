"""This file is the tree for Python users: `Engine`, sync and async, streaming or not, without HTTP.

It does not know how a request is served: arguments become the same body that a client would send,
so that they are checked in the same place and by the same words, and the gateway's stream is read.
The tree runs on a loop and in a thread of its own, so that what the caller does between two answers
never holds it up.

    with Engine() as engine:
        print(engine.generate("The capital of France is", max_tokens=16, temperature=0).text)
        for delta in engine.stream(messages=[{"role": "user", "content": "Hello"}]):
            print(delta.text, end="")
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any, Self, TypeVar, overload

import msgspec

from actors import run
from actors.gateway import errors, openai
from actors.gateway.actor import Gateway
from actors.gateway.call import Row
from actors.gateway.stream import Stream
from actors.runtime.system import StartFailed, System
from actors.settings import FLAGS, SettingsError, read_config
from messages.config import Config, Paths
from messages.openai import ChatBody, CompletionBody
from messages.types import FinishReason, Usage, unpack

CANCEL_S = 5.0  # for a call that is cancelled to end
T = TypeVar("T")
Prompt = str | Sequence[int]
# The reader is the caller itself, whom nobody else waits for: it may take its time.
UNREAD_S, UNREAD_BYTES = 1e9, 1 << 30


class Refusal(ValueError):
    """The request was refused, or failed; `param` is the argument at fault, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StartError(RuntimeError):
    """The tree did not start. The message has what the part at fault wrote last."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of one answer. The last one has a finish reason and the usage."""

    text: str
    index: int = 0  # which choice, with n > 1
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer."""

    text: str
    finish_reason: str
    usage: Usage
    token_ids: tuple[int, ...] = ()


class Engine:
    """A model, served to the caller of this object.

    `settings` are the flags of `python -m app serve` with underscores: `Engine("./model",
    max_running=8, dtype="float32")`. Raises SettingsError for one that does not exist. The tree
    runs inline unless `placement` says otherwise. Thread-safe once started.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._open(config_of(model, settings), quiet)

    @classmethod
    def of(cls, config: Config, show: Callable[[str], None] | None = None) -> Self:
        """From settings that were read elsewhere; `show` is told of a model that is fetched."""
        engine = cls.__new__(cls)
        engine._open(config, show or quiet)
        return engine

    def _open(self, config: Config, show: Callable[[str], None]) -> None:
        gateway = msgspec.structs.replace(
            config.gateway, http=False, stream_stall_s=UNREAD_S, stream_bytes_max=UNREAD_BYTES
        )
        self._given = msgspec.structs.replace(config, gateway=gateway)
        self._show = show
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._system: System | None = None
        self._leave: asyncio.Event | None = None

    # Life

    def start(self) -> None:
        """Brings the tree up, loading the model. Raises StartError, and SourceError for a model
        that is not there."""
        assert self._thread is None, "started already"
        self.config = run.settle(self._given, self._show).config
        up: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=(up,), name="engine")
        self._thread.start()
        try:
            up.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends what runs and takes the tree down. Harmless when it is down."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._loop is not None and self._leave is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._leave.set)
        thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def _live(self, up: Future[None]) -> None:
        with asyncio.Runner() as runner:
            try:
                runner.run(self._serve(up))
            except BaseException as error:
                if up.done():
                    raise
                up.set_exception(error)

    async def _serve(self, up: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._leave = asyncio.Event()
        with run.build(self.config) as system:
            self._system = system
            try:
                await system.start()
            except StartFailed as failure:
                text = f"{failure.path} did not start: {run.explained(failure.reason)}"
                raise StartError(text) from None
            up.set_result(None)
            leaving = asyncio.ensure_future(self._leave.wait())
            ended = asyncio.ensure_future(system.wait())
            await run.either(leaving, ended)
            leaving.cancel()
            await system.stop()
            await ended

    @property
    def model(self) -> str:
        """What the model is called."""
        return self.config.model.name

    # Answers, sync

    @overload
    def generate(self, prompts: str, **sampling: Any) -> Completion: ...

    @overload
    def generate(self, prompts: Sequence[Prompt], **sampling: Any) -> list[Completion]: ...

    def generate(self, prompts: Any, **sampling: Any) -> Completion | list[Completion]:
        """Completes a text, or each of a list of texts or of lists of token ids, all at once.

        `sampling` has the fields of an OpenAI completion: max_tokens, temperature, top_p, stop,
        seed… Raises Refusal for the first that is refused.
        """
        return self._call(self._answers(prompts, sampling))

    def chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> Completion:
        """The assistant's next message. Raises Refusal."""
        return self._call(self.achat(messages, **sampling))

    def stream(self, prompt: Prompt | None = None, **sampling: Any) -> Iterator[Delta]:
        """The answer to a prompt, or to `messages=`, as it comes. Closing the iterator, or leaving
        the loop over it, ends the request. Raises Refusal."""
        batches = self._batches(prompt, sampling)
        try:
            while batch := self._call(next_of(batches)):
                yield from batch
        finally:
            self._call(batches.aclose())

    def each(self, asked: Sequence[dict[str, Any]]) -> Iterator[Completion | Refusal]:
        """One answer for each set of `stream`'s keywords, in order, each when it is there; all are
        asked at once, as far as there is room. A refusal is an answer too."""
        room = asyncio.Semaphore(self.config.scheduler.queued_max)

        async def one(keywords: dict[str, Any]) -> Completion | Refusal:
            async with room:
                try:
                    return await self._complete(**keywords)
                except Refusal as refusal:
                    return refusal

        loop = self._running()
        futures = [asyncio.run_coroutine_threadsafe(one(keywords), loop) for keywords in asked]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    # Answers, async: from any loop

    @overload
    async def agenerate(self, prompts: str, **sampling: Any) -> Completion: ...

    @overload
    async def agenerate(self, prompts: Sequence[Prompt], **sampling: Any) -> list[Completion]: ...

    async def agenerate(self, prompts: Any, **sampling: Any) -> Completion | list[Completion]:
        """The twin of `generate`."""
        return await self._bring(self._answers(prompts, sampling))

    async def achat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> Completion:
        """The twin of `chat`."""
        return await self._bring(self._complete(messages=messages, **sampling))

    async def astream(self, prompt: Prompt | None = None, **sampling: Any) -> AsyncIterator[Delta]:
        """The twin of `stream`."""
        if asyncio.get_running_loop() is self._running():  # nothing has to be brought over
            with self._opened(prompt, sampling) as stream:
                while rows := await stream.read():
                    for row in rows:
                        yield delta_of(row)
            return
        batches = self._batches(prompt, sampling)
        try:
            while batch := await self._bring(next_of(batches)):
                for delta in batch:
                    yield delta
        finally:
            await self._bring(batches.aclose())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the tree's own loop and waits for it. The async twins cost least there."""
        return self._call(work)

    # On the tree's loop

    async def _answers(
        self, prompts: Any, sampling: dict[str, Any]
    ) -> Completion | list[Completion]:
        if isinstance(prompts, str):
            return await self._complete(prompts, **sampling)
        asked = (self._complete(prompt, **sampling) for prompt in prompts)
        return list(await asyncio.gather(*asked))

    async def _complete(self, prompt: Prompt | None = None, **sampling: Any) -> Completion:
        texts: list[str] = []
        ids: list[int] = []
        last: Delta | None = None
        async for batch in self._batches(prompt, sampling, is_one=True):
            for last in batch:
                texts.append(last.text)
                ids.extend(last.token_ids)
        return Completion(
            text="".join(texts),
            finish_reason=(last and last.finish_reason) or FinishReason.LENGTH,
            usage=(last and last.usage) or Usage(),
            token_ids=tuple(ids),
        )

    async def _batches(
        self, prompt: Prompt | None, sampling: dict[str, Any], *, is_one: bool = False
    ) -> AsyncGenerator[list[Delta], None]:
        """What has come since the last time, never empty. Must be closed. `is_one`: the texts of
        several choices could not be told apart."""
        with self._opened(prompt, sampling, is_one=is_one) as stream:
            while rows := await stream.read():
                yield [delta_of(row) for row in rows]

    @contextlib.contextmanager
    def _opened(
        self, prompt: Prompt | None, sampling: dict[str, Any], *, is_one: bool = False
    ) -> Iterator[Stream]:
        """A call, which ends when its reader leaves. Raises Refusal, also for what comes later."""
        gateway = self._gateway()
        try:
            call = ask_of(gateway, prompt, sampling).call
            if is_one and call.request_count != 1:
                text = "a completion is one text: give one prompt and no `n`, or use `stream`"
                raise Refusal(text, "n")
            stream = gateway.open(call)
            try:
                yield stream
            finally:
                stream.close()
        except errors.Refused as refused:
            raise Refusal(refused.problem.message, refused.problem.param) from None

    def _gateway(self) -> Gateway:
        """The one in service: after a crash it is another."""
        found = self._system.local(Paths().gateway) if self._system else None
        if not isinstance(found, Gateway):
            raise Refusal("The engine is restarting; try again.")
        return found

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._thread is None:
            raise RuntimeError("the engine is not started: use `with Engine() as engine`")
        return self._loop

    def _loop_for(self, work: Coroutine[Any, Any, Any]) -> asyncio.AbstractEventLoop:
        """The tree's loop; without one, `work` is put away unstarted."""
        try:
            return self._running()
        except RuntimeError:
            work.close()
            raise

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the tree's loop and waits. Ctrl-C cancels it, and waits for it to end:
        what it used may be used again at once."""
        loop = self._loop_for(work)
        ended: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda task: settle(ended, task))

        loop.call_soon_threadsafe(begin)
        try:
            return ended.result()
        finally:
            if not ended.done():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                wait([ended], CANCEL_S)

    async def _bring(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the tree's loop, whichever this one is."""
        loop = self._loop_for(work)
        if asyncio.get_running_loop() is loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


async def next_of(batches: AsyncGenerator[list[Delta], None]) -> list[Delta]:
    """The next batch, or [] after the last."""
    return await anext(batches, [])


def settle(ended: Future[T], task: asyncio.Task[T]) -> None:
    """Passes on how `task` ended."""
    if task.cancelled():
        ended.set_exception(CancelledError())
    elif (error := task.exception()) is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


def delta_of(row: Row) -> Delta:
    """Raises Refused: the request failed."""
    delta = row.delta
    if delta.problem is not None:
        raise errors.Refused(delta.problem)
    return Delta(
        text=delta.text,
        index=row.choice,
        token_ids=tuple(unpack(delta.token_ids)),
        finish_reason=delta.finish,
        usage=delta.usage,
    )


def ask_of(gateway: Gateway, prompt: Prompt | None, sampling: dict[str, Any]) -> openai.Ask:
    """Writes the body that a client would send. Raises Refused, or Refusal for what has no JSON."""
    body = {"model": gateway.limits.model, **sampling}
    if prompt is not None:
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    if ("messages" in body) == ("prompt" in body):
        raise Refusal("give either a prompt or messages", "prompt")
    schema = ChatBody if "messages" in body else CompletionBody
    unknown = sorted(body.keys() - set(schema.__struct_encode_fields__))
    if unknown:  # HTTP lets pass what it does not know; here it is a slip of the caller
        raise Refusal(f"no such argument: {', '.join(unknown)}", unknown[0])
    try:
        content = msgspec.json.encode(body)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refusal(f"not a value that a request can have: {error}") from None
    read = openai.read_chat if "messages" in body else openai.read_completion
    return read(content, gateway.limits, gateway.draw_seed)


def config_of(model: str, settings: dict[str, Any]) -> Config:
    """Raises SettingsError naming what is not a setting."""
    keys = {row.flag.removeprefix("--").replace("-", "_"): row.key for row in FLAGS}
    given: dict[str, Any] = {"runtime.placement": "inline"}
    if model:
        given["model.path"] = str(model)
    unknown = [name for name in settings if name not in keys]
    if unknown:
        raise SettingsError(f"no such setting: {', '.join(sorted(unknown))}")
    given.update({keys[name]: value for name, value in settings.items()})
    return read_config(None, given)


def quiet(text: str) -> None:
    """Shows nothing."""
