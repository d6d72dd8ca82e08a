"""This file is a client that costs as little as it can: raw sockets and epoll in a process of its
own, which counts events and reads no JSON.

It does not know what is asked, nor what was found by it. It is run as `python -m bench.flood`: a
line of JSON in for each wave (`Wave`), lines of JSON out (`Seen` as it goes, at last one `Found`).
Connections are kept for the next request, as HTTP clients do. Times are of the machine's clock.
"""

from __future__ import annotations

import random
import resource
import select
import socket
import subprocess
import sys
import time
from collections import deque
from typing import Any

import msgspec

from bench.report import ROOT

READ_BYTES = 1 << 16
CROWD_PER_S = 2000  # connections that a crowd makes, so that no backlog overflows
TAIL = 16  # bytes of a response that are kept, since what is looked for may come in two parts
END = b"0\r\n\r\n"  # of a chunked body
DONE = b"data: [DONE]"


class Wave(msgspec.Struct, kw_only=True):
    """What is sent. With `rate` requests arrive at seeded random times whatever becomes of them;
    without, each of `clients` asks again as soon as it has its answer, or once if `once`."""

    port: int
    requests: list[bytes]  # whole ones, taken in turn
    seconds: float
    clients: int = 0
    rate: float = 0.0
    once: bool = False
    requests_max: int = 0  # 0: as many as there is time for
    keeps: bool = True  # a connection is used again
    wait_s: float = 60.0  # for the last answers


class Answer(msgspec.Struct, array_like=True):
    """Of one request. Seconds since the wave began; `done_s` is None where none has come."""

    due_s: float
    sent_s: float
    first_s: float | None
    done_s: float | None
    status: int
    events: int
    retries: bool  # it says when to come again
    is_whole: bool


class Seen(msgspec.Struct, tag=True):
    """Of a crowd that asks once, which ends where one is refused: all have events now, or the first
    has all of its own."""

    events: int
    reads: int
    at_s: float


class Found(msgspec.Struct, tag=True):
    answers: list[Answer]
    cpu_s: float  # of this process
    late_s: list[float]  # how long after its time each was sent: this client's own delay


class Wire:
    """One connection and the request that it has under way."""

    __slots__ = ("answer", "head", "is_chunked", "left", "reads", "request", "sock", "tail")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reads = 0
        self.answer: Answer | None = None

    def ask(self, request: bytes, answer: Answer) -> None:
        self.request = request  # what of it has not been written
        self.answer = answer
        self.head = b""
        self.tail = b""
        self.left: int | None = None
        self.is_chunked = False

    def write(self) -> bool:
        """Whether all has been written."""
        try:
            count = self.sock.send(self.request)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno == 107:  # not connected yet
                return False
            raise
        self.request = self.request[count:]
        return not self.request

    def feed(self, data: bytes, now_s: float) -> bool:
        """Whether the answer has ended with these bytes."""
        answer = self.answer
        assert answer is not None
        self.reads += 1
        if self.left is None:
            data = self.head + data
            at = data.find(b"\r\n\r\n")
            if at < 0:
                self.head = data
                return False
            head, data = data[:at].lower(), data[at + 4 :]
            answer.status, answer.first_s = int(head[9:12]), now_s
            answer.retries = b"\r\nretry-after:" in head
            self.is_chunked = b"\r\ntransfer-encoding: chunked" in head
            at = head.find(b"\r\ncontent-length:")
            self.left = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if not self.is_chunked:
            self.left -= len(data)
            answer.is_whole = self.left <= 0
            return answer.is_whole
        seen = self.tail + data
        answer.events += seen.count(b"\n\n")
        answer.is_whole = answer.is_whole or DONE in seen
        counted = seen.rfind(b"\n\n")
        self.tail = seen[max(counted + 2 if counted >= 0 else 0, len(seen) - TAIL) :]
        return self.tail.endswith(END)


class Flood:
    """One wave, from its first request to its last answer."""

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.poll = select.epoll()
        self.wires: dict[int, Wire] = {}
        self.idle: deque[Wire] = deque()
        self.answers: list[Answer] = []
        self.open_count = 0
        self.free_count = wave.clients  # of the clients: those that ask next
        self.begun_count = 0  # of a crowd: those with an event, or refused
        self.is_said = [False, False]
        self.begin_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self.begin_s

    def run(self) -> Found:
        wave = self.wave
        used_s = time.process_time()
        rng = random.Random(wave.port)
        due_s = 0.0
        while True:
            now_s = self.now_s()
            if wave.once:
                is_over = not self.free_count
            else:
                is_over = now_s >= wave.seconds or 0 < wave.requests_max <= len(self.answers)
            wait_s = 1.0
            if wave.rate and not is_over:
                while due_s <= now_s:
                    self.send(due_s)
                    due_s += rng.expovariate(wave.rate)
                wait_s = due_s - now_s
            elif not is_over:
                count = self.free_count
                if wave.once:
                    count = min(count, int(now_s * CROWD_PER_S) - len(self.answers))
                    wait_s = 0.01
                for _ in range(count):
                    self.free_count -= 1
                    self.send(now_s)
            if is_over and (not self.open_count or now_s > wave.seconds + wave.wait_s):
                break
            for fd, _ in self.poll.poll(max(0.0, min(wait_s, 1.0)), 512):
                self.serve(self.wires[fd])
        for wire in self.wires.values():
            wire.sock.close()
        self.poll.close()
        late_s = [answer.sent_s - answer.due_s for answer in self.answers]
        return Found(self.answers, time.process_time() - used_s, late_s)

    def send(self, due_s: float) -> None:
        """Starts the next request, on a connection that is free or on a new one."""
        request = self.wave.requests[len(self.answers) % len(self.wave.requests)]
        answer = Answer(due_s, self.now_s(), None, None, 0, 0, False, False)
        self.answers.append(answer)
        self.open_count += 1
        wire = self.idle.popleft() if self.idle else self.connect()
        wire.ask(request, answer)
        self.push(wire)

    def connect(self) -> Wire:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect_ex(("127.0.0.1", self.wave.port))
        wire = self.wires[sock.fileno()] = Wire(sock)
        self.poll.register(sock.fileno(), select.EPOLLIN)
        return wire

    def push(self, wire: Wire) -> None:
        try:
            is_sent = wire.write()
        except OSError:
            self.drop(wire)
            return
        if not is_sent:
            self.poll.modify(wire.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def serve(self, wire: Wire) -> None:
        """Bytes have come for it, or can go."""
        answer = wire.answer
        if answer is not None and wire.request:
            self.push(wire)
            if wire.request or wire.answer is None:
                return
            self.poll.modify(wire.sock.fileno(), select.EPOLLIN)
        try:
            data = wire.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.drop(wire)
            return
        if answer is None:
            return  # nothing was asked on it
        events = answer.events
        ends = wire.feed(data, self.now_s())
        if self.wave.once and not events and answer.events:
            self.begun_count += 1
        if ends:
            answer.done_s = self.now_s()
            wire.answer = None
            self.end()
            if self.wave.keeps:
                self.idle.append(wire)
            else:
                self.drop(wire)
        if self.wave.once:
            self.say(answer)

    def drop(self, wire: Wire) -> None:
        """The connection has ended, and with it what was asked on it."""
        del self.wires[wire.sock.fileno()]
        wire.sock.close()
        if wire.answer is None:
            if wire in self.idle:
                self.idle.remove(wire)
            return
        if self.wave.once and not self.is_said[0]:
            raise SystemExit("a connection was cut before all had begun")
        wire.answer = None
        self.end()

    def end(self) -> None:
        """A request has its outcome."""
        self.open_count -= 1
        if not (self.wave.rate or self.wave.once):
            self.free_count += 1

    def say(self, answer: Answer) -> None:
        if answer.status not in (0, 200):
            raise SystemExit(f"refused with status {answer.status}")
        if not self.is_said[0] and self.begun_count == self.wave.clients:
            self.is_said[0] = True
            self.report()
        if not self.is_said[1] and self.is_said[0] and answer.is_whole:
            self.is_said[1] = True
            self.report()

    def report(self) -> None:
        put(
            Seen(
                sum(answer.events for answer in self.answers),
                sum(wire.reads for wire in self.wires.values()),
                time.monotonic(),
            )
        )


def put(message: Seen | Found) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


class Flooder:
    """That process, from outside, as long as the block lasts."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "bench.flood"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe)

    def __enter__(self) -> Flooder:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def start(self, wave: Wave) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(wave) + b"\n")
        self.process.stdin.flush()

    def next(self) -> Seen | Found:
        """What it says next. Raises EOFError: it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the client ended with {self.process.wait()}")
        found: Seen | Found = msgspec.json.decode(line, type=Seen | Found)
        return found

    def flood(self, wave: Wave) -> Found:
        """A wave from its beginning to its end."""
        self.start(wave)
        while True:
            found = self.next()
            if isinstance(found, Found):
                return found


def post(path: str, body: dict[str, Any], *, keeps: bool = True) -> bytes:
    """A whole request."""
    content = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n"
    head += "\r\n" if keeps else "Connection: close\r\n\r\n"
    return head.encode() + content


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for line in sys.stdin.buffer:
        put(Flood(msgspec.json.decode(line, type=Wave)).run())


if __name__ == "__main__":
    main()
