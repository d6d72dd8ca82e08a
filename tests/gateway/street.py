"""A gateway in a cell, a scripted back end behind it and ASGI clients before it, in one loop.

The back end answers each `Encode` by its text: it says the words of the prompt back, one token
each, until `max_tokens`; `mute` keeps a request without an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from actors.gateway.actor import Gateway
from actors.gateway.http import App
from actors.runtime.context import Reply
from actors.runtime.testkit import Cell
from bench.sim.vectors import HIDDEN_LEN, vector_of
from messages.base import Message
from messages.config import GatewayConfig, ModelConfig, Paths
from messages.gateway import Delta, Deltas, Encoded, Failed
from messages.metrics import Page
from messages.scheduler import Poll
from messages.system import ActorRow, State
from messages.tokenizer import Cancel, Encode
from messages.types import Fault, FinishReason, Problem, Usage, pack, unpack
from messages.worker import Facts


async def until_true(holds: Callable[[], object], step: Callable[[], object] = bool) -> None:
    """Lets the loop run, and `step` between, until something holds."""
    for _ in range(1_000_000):
        if holds():
            return
        await asyncio.sleep(0)
        step()
    raise AssertionError("it never came to that")


PATHS = Paths()
CONTEXT = 64
V = 100
FACTS = Facts(
    model="M",
    vocab_size=V,
    context_len=CONTEXT,
    page_size=16,
    page_count=64,
    eos_ids=(2,),
    dtype="float32",
    device="cpu",
    hidden_len=HIDDEN_LEN,
)


class Back:
    """Tokenizer to detokenizer, as one function of the prompt."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.words: dict[str, list[str]] = {}
        self.running: dict[str, tuple[Encode, int, int]] = {}  # encode, prompt length, next token
        self.cancelled: list[str] = []
        self.mute = False
        self.paused = False
        self.bars = False  # every constraint is refused, as an engine does it
        self.vector_bytes = 0  # how long a vector is at least

    def pump(self) -> bool:
        """One step: answers what was sent, and gives each running request a token."""
        sent = self.cell.take()
        for _, message in sent:
            self.take(message)
        if self.paused:
            return bool(sent)
        rows = tuple(self.row(*entry) for entry in list(self.running.values()))
        if rows:
            self.cell.tell(Deltas(rows))
        return bool(sent or rows)

    def take(self, message: Message) -> None:
        if isinstance(message, Cancel):
            self.cancelled.append(message.request)
            entry = self.running.pop(message.request, None)
            if entry is not None:
                end = Delta(
                    message.request, message.attempt, entry[2], 0, finish=FinishReason.ABORT
                )
                self.cell.tell(Deltas((end,)))
            return
        if isinstance(message, Poll):  # it knows all that it has not ended
            return
        assert isinstance(message, Encode)
        words = self.words_of(message)
        self.words[",".join(map(str, range(len(words))))] = words
        if len(words) > CONTEXT and not message.measure:
            problem = Problem(
                fault=Fault.INVALID,
                message=f"The prompt has {len(words)} tokens, the context {CONTEXT}.",
                code="context_length_exceeded",
                param="messages" if message.chat else "prompt",
            )
            self.cell.tell(Failed(message.request, message.attempt, problem))
            return
        if self.bars and message.grammar is not None:
            text = f"`{message.grammar.param}` has a constraint that is not valid."
            problem = Problem(Fault.INVALID, text, param=message.grammar.param)
            self.cell.tell(Failed(message.request, message.attempt, problem))
            return
        ids = pack(range(len(words)))
        text = " ".join(words) if message.want_prompt_text else ""
        self.cell.tell(Encoded(message.request, message.attempt, len(words), ids, text))
        if message.forward and not self.mute:
            self.running[message.request] = (message, len(words), len(message.emitted) // 4)

    def words_of(self, message: Encode) -> list[str]:
        if message.ids is not None:
            return [f"w{token_id}" for token_id in unpack(message.ids)]
        if message.text is not None:
            return message.text.split()
        assert message.chat is not None
        turns = msgspec.json.decode(message.chat.messages_json)
        return [word for turn in turns for word in turn["content"].split()]

    def row(self, encode: Encode, prompt_len: int, index: int) -> Delta:
        words = self.words_of(encode)
        limit = encode.sampling.max_tokens or CONTEXT - prompt_len
        is_end = index + 1 >= min(limit, len(words))
        finish = None
        if is_end:
            finish = FinishReason.LENGTH if index + 1 == limit else FinishReason.STOP
            del self.running[encode.request]
        else:
            self.running[encode.request] = (encode, prompt_len, index + 1)
        return Delta(
            request=encode.request,
            attempt=encode.attempt,
            index=index,
            token_count=1,
            text=(" " if index else "") + words[index % len(words)],
            token_ids=pack([index]),
            finish=finish,
            usage=Usage(prompt_len, index + 1)
            if is_end
            else Usage(prompt_len)
            if not index
            else None,
            vector=b"" if index else self.vector(encode, prompt_len),
        )

    def vector(self, encode: Encode, prompt_len: int) -> bytes:
        sampling = encode.sampling
        if encode.label_words:
            sampling = msgspec.structs.replace(sampling, label_ids=(1, 2))
        values = vector_of([(0, at, "") for at in range(prompt_len)], sampling)
        return values.ljust(self.vector_bytes, b"\0") if values else b""


class Answered:
    """What a client got."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False

    def json(self) -> Any:
        assert self.headers["content-type"].startswith("application/json")
        return msgspec.json.decode(self.body)

    def error(self) -> dict[str, Any]:
        """The error object; asserts its shape."""
        error: dict[str, Any] = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and error["type"]
        assert "x-request-id" in self.headers
        return error

    def events(self) -> list[Any]:
        assert self.headers["content-type"].startswith("text/event-stream")
        assert self.body.endswith(b"data: [DONE]\n\n")
        assert self.body.count(b"[DONE]") == 1
        blocks = self.body[: -len(b"data: [DONE]\n\n")].split(b"\n\n")
        return [msgspec.json.decode(block.removeprefix(b"data: ")) for block in blocks if block]


class Client:
    """One HTTP request to the application; its connection can be dropped at any time."""

    def __init__(
        self,
        app: App,
        method: str,
        path: str,
        chunks: list[bytes],
        headers: dict[str, str],
        *,
        ends: bool = True,
    ) -> None:
        self.got = Answered()
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for i, chunk in enumerate(chunks):
            more = i + 1 < len(chunks) or not ends
            self.messages.put_nowait({"type": "http.request", "body": chunk, "more_body": more})
        self.aborted = False
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "query_string": b"",
            "state": {"abort": self.abort},
        }
        self.task = asyncio.create_task(app(self.scope, self.receive, self.send))

    def abort(self) -> None:
        self.aborted = True
        self.drop()

    def drop(self) -> None:
        """The client leaves."""
        self.messages.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Any:
        return await self.messages.get()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert self.got.status is None, "a second response"
            self.got.status = message["status"]
            self.got.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            return
        assert self.got.status is not None and not self.got.is_complete
        self.got.body += message.get("body", b"")
        if not message.get("more_body", False):
            self.got.is_complete = True
            self.messages.put_nowait({"type": "http.disconnect"})


class Street:
    def __init__(self, **settings: Any) -> None:
        config = GatewayConfig(http=False, **settings)
        self.gateway = Gateway(ModelConfig(), config, PATHS)
        notes = {PATHS.worker: msgspec.msgpack.encode(FACTS)}
        self.cell = Cell(self.gateway, path="gateway", notes=notes)
        self.cell.start()
        self.cell.answer = lambda path, message: Reply(Page(text="histrio_x 1\n"))
        self.rows(State.RUNNING)
        self.back = Back(self.cell)
        self.app = App(self.gateway)

    def rows(self, worker: State) -> None:
        self.cell.rows = [
            ActorRow(path, "main", 1, State.RUNNING, 1, 0)
            for path in (*self.gateway.recovery.needed, "gateway", "metrics")
            if path != PATHS.worker
        ]
        self.cell.rows.append(ActorRow(PATHS.worker, "worker", 2, worker, 1, 0))

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        chunks: list[bytes] | None = None,
        ends: bool = True,
    ) -> Client:
        if chunks is None:
            chunks = [b"" if body is None else body]
            if not isinstance(chunks[0], bytes):
                chunks = [msgspec.json.encode(body)]
        return Client(self.app, method, path, chunks, headers or {}, ends=ends)

    def chat(self, text: str = "one two three", **fields: Any) -> Client:
        body = {"model": "M", "messages": [{"role": "user", "content": text}], **fields}
        return self.request("POST", "/v1/chat/completions", body)

    def completion(self, prompt: Any = "one two three", **fields: Any) -> Client:
        body = {"model": "M", "prompt": prompt, **fields}
        return self.request("POST", "/v1/completions", body)

    async def step(self) -> bool:
        """Lets every task run as far as it can, then moves the back end by one token."""
        for _ in range(20):
            await asyncio.sleep(0)
        return self.back.pump()

    async def finish(self, *clients: Client) -> list[Answered]:
        for _ in range(1000):
            if all(client.task.done() for client in clients):
                break
            await self.step()
        else:
            raise AssertionError("a client was left without an end")
        for client in clients:
            client.task.result()
        await self.settle()
        return [client.got for client in clients]

    async def ask(self, client: Client) -> Answered:
        return (await self.finish(client))[0]

    async def settle(self) -> None:
        while await self.step():
            pass

    def assert_idle(self) -> None:
        assert not self.gateway.calls.open and not self.gateway.calls.streams
        assert len(self.gateway.recovery.ledger) == 0
        assert not self.back.running
        assert self.cell.timer_count == 0
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in others if not task.done()]
