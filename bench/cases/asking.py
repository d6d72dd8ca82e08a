"""This file asks a server the way clients do, well-behaved and other, and judges what comes back.

It does not know the cases. It is synchronous and uses plain sockets, so that a case can say exactly
what goes over the wire and when; what runs at the same time runs in threads.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import psutil

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TIMEOUT_S = 300.0
T = TypeVar("T")
R = TypeVar("R")
ALIVE_S = 20.0
IDLE_S = 10.0
FLUSH_S = 1.5


class Failed(Exception):
    """The server does not do what is right. The message says what it did instead."""


class Skipped(Exception):
    """The case says nothing about this server; the message says why."""


def expect(is_right: object, found: object) -> None:
    """Raises Failed, telling what was found, unless it is right."""
    if not is_right:
        raise Failed(str(found)[:300])


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    raw: bytes
    seconds: float

    @property
    def body(self) -> Any:
        """Strict JSON. Raises Failed for anything else."""
        try:
            return json.loads(self.raw, parse_constant=refuse_constant)
        except ValueError as error:
            raise Failed(f"status {self.status}, no JSON ({error}): {self.raw[:120]!r}") from None

    @property
    def choice(self) -> dict[str, Any]:
        self.expect_ok()
        found: dict[str, Any] = self.body["choices"][0]
        return found

    @property
    def text(self) -> str:
        return text_of(self.choice)

    @property
    def texts(self) -> list[str]:
        self.expect_ok()
        return [text_of(choice) for choice in self.body["choices"]]

    @property
    def finish(self) -> str | None:
        found: str | None = self.choice["finish_reason"]
        return found

    @property
    def usage(self) -> dict[str, Any]:
        self.expect_ok()
        found: dict[str, Any] = self.body["usage"]
        return found

    @property
    def cached(self) -> int:
        """Prompt tokens that the server says it had. Raises Skipped if it does not say."""
        details = self.usage.get("prompt_tokens_details")
        if details is None:
            raise Skipped("the server does not tell cached tokens")
        return int(details.get("cached_tokens") or 0)

    def expect_ok(self) -> None:
        expect(self.status == 200, f"status {self.status}: {self.raw[:200]!r}")

    def expect_refused(self, *statuses: int, param: str | None = None) -> dict[str, Any]:
        """A whole error object with one of the statuses (400 if none is named). Returns it."""
        wanted = statuses or (400,)
        expect(self.status in wanted, f"status {self.status}, not {wanted}: {self.raw[:160]!r}")
        kind = self.headers.get("content-type", "")
        expect(kind.startswith("application/json"), f"content-type {kind!r}")
        error = self.body.get("error")
        expect(isinstance(error, dict), f"no error object: {self.raw[:160]!r}")
        whole = {"message", "type", "param", "code"} <= set(error)
        expect(whole and error["message"], f"error object {error}")
        if param is not None:
            named = str(error["param"]) + str(error["message"])
            expect(param in named, f"`{param}` is not named: {error}")
        found: dict[str, Any] = error
        return found


def refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def text_of(choice: dict[str, Any]) -> str:
    """Of a choice of either route, whole or streamed."""
    if "text" in choice:
        return choice["text"] or ""
    part = choice.get("delta") or choice.get("message") or {}
    return part.get("content") or ""


class Streamed(NamedTuple):
    """A stream read to its end."""

    reply: Reply
    chunks: list[dict[str, Any]]
    arrivals_s: list[float]  # of its pieces, on time.monotonic

    def of(self, index: int = 0) -> list[dict[str, Any]]:
        """The choices of one index, in order."""
        all_of = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [choice for choice in all_of if choice["index"] == index]

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.arrivals_s)]

    @property
    def text(self) -> str:
        return "".join(map(text_of, self.of(0)))

    @property
    def finishes(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.of(0) if choice["finish_reason"]]

    @property
    def usage(self) -> dict[str, Any]:
        found = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        expect(len(found) == 1, f"{len(found)} usage chunks")
        usage: dict[str, Any] = found[0]
        return usage


def read_events(reply: Reply) -> list[dict[str, Any]]:
    """The JSON of each event; checks framing and the end."""
    reply.expect_ok()
    raw = reply.raw.replace(b"\r\n", b"\n")
    expect(raw.endswith(b"data: [DONE]\n\n"), f"the stream ends in {raw[-60:]!r}")
    expect(raw.count(b"data: [DONE]") == 1, "[DONE] more than once")
    chunks = []
    for event in raw.split(b"\n\n")[:-2]:
        lines = [line for line in event.split(b"\n") if not line.startswith(b":")]
        expect(all(line.startswith(b"data: ") for line in lines), f"a line of {event[:80]!r}")
        for line in lines:
            try:
                chunk = json.loads(line[6:].decode(), parse_constant=refuse_constant)
            except ValueError as error:
                raise Failed(f"event is not JSON ({error}): {line[:120]!r}") from None
            expect("error" not in chunk, f"error in the stream: {line[:200]!r}")
            chunks.append(chunk)
    return chunks


class Peer:
    """The server under test."""

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        vocab_size: int = 0,
        eos_id: int = 0,
        pids: Sequence[int] = (),
    ) -> None:
        """`pids`: of the server's processes, where they are ours."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.key = key
        self.vocab_size, self.eos_id = vocab_size, eos_id
        self.processes = [psutil.Process(pid) for pid in pids]
        cards = self.get("/v1/models").body["data"]
        self.model: str = cards[0]["id"]
        self.context_len: int = cards[0].get("max_model_len") or 0

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), TIMEOUT_S)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        sent = {"content-type": "application/json"} if body is not None else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        if self.key:
            sent["authorization"] = f"Bearer {self.key}"
        begin_s = time.monotonic()
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused before it was sent
                connection.request(method, self.base + path, body, sent)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Failed(f"{method} {path}: {type(error).__name__} {error}") from None
        finally:
            connection.close()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, found, raw, time.monotonic() - begin_s)

    def get(self, path: str) -> Reply:
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, raw)

    def chat_body(self, content: Any, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return {"model": self.model, "messages": messages, "temperature": 0, **fields}

    def comp_body(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "temperature": 0, **fields}

    def chat(self, content: Any, **fields: Any) -> Reply:
        return self.post(CHAT, self.chat_body(content, **fields))

    def comp(self, prompt: Any, **fields: Any) -> Reply:
        return self.post(COMPLETION, self.comp_body(prompt, **fields))

    def chat_stream(self, content: Any, **fields: Any) -> Streamed:
        return self.stream(CHAT, self.chat_body(content, **fields))

    def comp_stream(self, prompt: Any, **fields: Any) -> Streamed:
        return self.stream(COMPLETION, self.comp_body(prompt, **fields))

    def stream(
        self, path: str, body: dict[str, Any], began: threading.Event | None = None
    ) -> Streamed:
        """Reads a whole stream, noting when its pieces come; the first one sets `began`."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        content = json.dumps({**body, "stream": True}).encode()
        headers = {"content-type": "application/json"}
        begin_s = time.monotonic()
        arrivals_s = []
        raw = b""
        try:
            connection.request("POST", self.base + path, content, headers)
            response = connection.getresponse()
            while data := response.read1(65536):
                raw += data
                arrivals_s.append(time.monotonic())
                if began is not None:
                    began.set()
        except (OSError, http.client.HTTPException) as error:
            raise Failed(f"stream: {type(error).__name__} {error}") from None
        finally:
            connection.close()
        found = {name.lower(): value for name, value in response.getheaders()}
        reply = Reply(response.status, found, raw, time.monotonic() - begin_s)
        return Streamed(reply, read_events(reply), arrivals_s)

    @contextmanager
    def opened(self, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
        """A connection on which the request was sent and nothing was read."""
        with self.connect() as link:
            content = json.dumps(body).encode()
            head = f"POST {self.base}{path} HTTP/1.1\r\nhost: {self.host}\r\n"
            head += "content-type: application/json\r\n"
            head += f"content-length: {len(content)}\r\n\r\n"
            link.sendall(head.encode() + content)
            yield link

    # What must hold afterwards

    def expect_alive(self) -> None:
        reply = self.chat("hi", max_tokens=4)
        expect(reply.status == 200, f"afterwards status {reply.status}")
        expect(reply.seconds < ALIVE_S, f"afterwards a chat took {reply.seconds:.1f} s")
        expect(self.get("/health").status == 200, "afterwards /health is not 200")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series. Raises Skipped if the server has no such metric."""
        reply = self.get("/metrics")
        lines = [line for line in reply.raw.decode().splitlines() if line.startswith(name)]
        lines = [line for line in lines if line[len(name)] in " {"]
        known = [line for line in lines if all(f'{k}="{v}"' in line for k, v in labels.items())]
        if not lines and f"# TYPE {name} " not in reply.raw.decode():
            raise Skipped(f"the server has no metric {name}")
        return sum(float(line.rsplit(" ", 1)[1]) for line in known)

    def counted(self, name: str, **labels: str) -> float:
        """A counter, once all that has happened until now is in it."""
        time.sleep(FLUSH_S)
        return self.metric(name, **labels)

    def resident_bytes(self) -> int:
        """Of all processes but the worker's, whose pool is touched as it is used. Raises Skipped
        where they are not ours."""
        self._expect_own()
        found = [each for each in self.processes if "worker" not in each.cmdline()]
        return sum(each.memory_info().rss for each in found)

    def connection_count(self) -> int:
        """TCP connections of the server's processes. Not their descriptors: processes in reserve,
        which start when they may, have some as well."""
        self._expect_own()
        return sum(len(process.net_connections("tcp")) for process in self.processes)

    def _expect_own(self) -> None:
        if not self.processes:
            raise Skipped("needs --spawn, to see the server's processes")

    def busy(self) -> tuple[float, float]:
        """Running and waiting requests."""
        return self.metric("histrio_requests_running"), self.metric("histrio_requests_waiting")

    def expect_idle(self) -> None:
        """Soon nothing runs or waits, no stream is open, and no page is leased."""
        time.sleep(FLUSH_S)  # what the server knows now is in its metrics after that
        until_s = time.monotonic() + IDLE_S
        found: tuple[float, ...] = ()
        while time.monotonic() < until_s:
            found = (
                *self.busy(),
                self.metric("histrio_streams_open"),
                self.metric("histrio_pages", state="leased"),
            )
            if not any(found):
                return
            time.sleep(0.1)
        raise Failed(f"not idle: running, waiting, streams, leased pages = {found}")


def each_at_once(ask: Callable[[T], R], values: Iterable[T]) -> list[R]:
    """`ask` of each value, in threads."""
    given = list(values)
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(ask, given))


def at_once(*work: Callable[[], Any]) -> list[Any]:
    """Runs all of it in threads; raises what the first of them raised."""
    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(each) for each in work]
        return [future.result() for future in futures]


class Watch:
    """Something that is done again and again while a block runs."""

    def __init__(self, peer: Peer, path: str = "/health", every_s: float = 0.1) -> None:
        self.peer, self.path, self.every_s = peer, path, every_s
        self.replies: list[Reply] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.wait(self.every_s):
            self.replies.append(self.peer.get(self.path))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def expect_healthy(self, seconds_max: float) -> None:
        bad = [reply.status for reply in self.replies if reply.status != 200]
        expect(not bad, f"{self.path} gave {bad[:5]}")
        slowest = max((reply.seconds for reply in self.replies), default=0.0)
        expect(slowest <= seconds_max, f"{self.path} took {slowest:.2f} s")


@contextmanager
def stream_beside(peer: Peer) -> Iterator[list[float]]:
    """One stream after another while the block runs; the seconds between their tokens, whole once
    the block has ended."""
    ends = threading.Event()
    gaps: list[float] = []

    def stream() -> None:
        while not ends.is_set():
            gaps.extend(peer.comp_stream("Once", max_tokens=40, ignore_eos=True).gaps_s)

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        yield gaps
    finally:
        ends.set()
        thread.join()


def same(values: Sequence[object]) -> bool:
    return all(value == values[0] for value in values)
