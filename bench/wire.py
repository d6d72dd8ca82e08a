"""This file throws hostile bytes at what stands between a node and others: the decoder of every
mailbox, and a bound node socket.

It knows the runtime's codec and its ZMQ transport. Bytes are drawn under a seed: noise, msgpack of
any shape behind a known tag, well-formed frames with something changed. Laws: a decoder raises the
boundary's error or none; nothing that comes without the run's token reaches a node or is answered;
afterwards a friend's message still arrives. `wire_within.py` has what is struck without a socket.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from actors.runtime.actor import union_members
from actors.runtime.codec import Decoder, Unreadable
from actors.runtime.frame import PROTOCOL, Ack, AnyFrame, Bye, Data, Hello, Probe
from actors.runtime.transport.zmq import ZmqTransport
from bench.command import parser_of
from bench.report import Report
from bench.wire_within import KINDS, attack, until
from messages.base import Address, Header, Message
from messages.system import NodeIn, Reason, RootIn, Stop, Undelivered

ABOUT = """\
Hostile bytes for decoders, links, a node's inbox, an actor behind a link, and a node's socket; exit
status 1 where a law does not hold.

  python -m app bench wire              a million for each
  python -m app bench wire --count 20000 --seed 7
"""

ROOMS = (
    "cache",
    "detokenizer",
    "gateway",
    "metrics",
    "router",
    "scheduler",
    "tokenizer",
    "worker",
)
DEPTH_MAX = 4
BURST = 256
TRIES = 10_000
NAMES = (
    b"friend#1/1",
    b"friend#1/999",
    b"friend#1/01",
    b"friend#2/1",
    b"stranger#1/1",
    b"victim#1/1",
    b"\xff#",
    b"a",
)


def hostile_value(rng: random.Random, depth: int = 0) -> bytes:
    """Msgpack of any shape, also such as no encoder of ours would make."""
    kind = rng.randrange(14 if depth < DEPTH_MAX else 10)
    match kind:
        case 0:
            return bytes([rng.randrange(128)])
        case 1:
            return b"\xcf" + rng.randbytes(8)
        case 2:
            return b"\xd3" + rng.randbytes(8)
        case 3:
            return rng.choice((b"\xc0", b"\xc1", b"\xc2", b"\xc3"))
        case 4:
            return b"\xcb" + struct.pack(">d", rng.choice((0.0, -0.0, 1e308, float("nan"), -1.5)))
        case 5:
            text = rng.randbytes(rng.randrange(12))
            return bytes([0xA0 | len(text)]) + text
        case 6:
            data = rng.randbytes(rng.randrange(40))
            return b"\xc4" + bytes([len(data)]) + data
        case 7:  # says that it is long, and is not
            return rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")) + rng.randbytes(4)
        case 8:
            return b"\xd4" + rng.randbytes(2)
        case 9:
            return b"\xd9\x05hello"
        case 10 | 11 | 12:
            count = rng.randrange(8)
            return bytes([0x90 | count]) + b"".join(
                hostile_value(rng, depth + 1) for _ in range(count)
            )
        case _:
            if rng.random() < 0.02:
                return b"\x91" * rng.randrange(1, 100_000)  # deeper than any stack
            count = rng.randrange(4)
            return bytes([0x80 | count]) + b"".join(
                hostile_value(rng, depth + 1) for _ in range(2 * count)
            )


def spoilt(rng: random.Random, good: bytes) -> bytes:
    """Something well-formed, with something changed."""
    data = bytearray(good)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0 if data:
                data[at % len(data)] = rng.randrange(256)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                data[at:at] = data[: rng.randrange(len(data) + 1)]
    return bytes(data)


def frames_of(rng: random.Random) -> list[bytes]:
    """Well-formed frames as an intruder would make them: all but the token is right."""
    header = Header(Address("victim", "a", 1), Address("friend", "b", 1))
    made: list[AnyFrame] = [
        Hello(PROTOCOL, b"schema", "run", rng.randbytes(32), "friend", 1, 1, 1),
        Data(rng.randrange(9), 0, header),
        Ack(rng.randrange(9), rng.randrange(9), True),
        Probe(rng.randrange(9)),
        Bye(rng.randrange(9), "ended"),
    ]
    return [msgspec.msgpack.encode(frame) for frame in made]


def hostile(rng: random.Random, tags: list[bytes], good: list[bytes]) -> bytes:
    """`tags`: encoded first elements of what the reader expects."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1 and good:
        return spoilt(rng, rng.choice(good))
    count = rng.randrange(14)
    fields = b"".join(hostile_value(rng) for _ in range(count))
    return bytes([0x90 | (count + 1)]) + rng.choice(tags) + fields


def unions() -> dict[str, Any]:
    found = {room: importlib.import_module(f"messages.{room}").In for room in ROOMS}
    return {**found, "node": NodeIn, "root": RootIn, "notice": Undelivered, "frame": AnyFrame}


def attack_decoders(count: int, seed: int) -> dict[str, int]:
    """Raises whatever a decoder raises that it may not."""
    rng = random.Random(f"decoders/{seed}")
    readers = []
    for union in unions().values():
        members = union_members(union)
        tags = [msgspec.msgpack.encode(m.__struct_config__.tag) for m in members]
        readers.append((Decoder(union), tags))
    good = frames_of(rng)
    outcome = {"read": 0, "refused": 0}
    for index in range(count):
        decoder, tags = readers[index % len(readers)]
        data = hostile(rng, tags, good)
        try:
            decoder.decode(data)
            outcome["read"] += 1
        except Unreadable:
            outcome["refused"] += 1
    return outcome


class Inbox:
    """What stands behind a transport in place of a node."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self.ups: list[str] = []
        self.downs: list[str] = []

    def arrive(self, node: str, header: Header, body: Message | bytes | memoryview) -> None:
        self.arrived.append(node)

    def link_up(self, node: str, incarnation: int) -> None:
        self.ups.append(node)

    def link_down(self, node: str, reason: Reason) -> None:
        self.downs.append(node)


async def attack_socket(count: int, seed: int) -> dict[str, int]:
    """A victim with one friend; intruders who found its socket. Asserts the laws."""
    rng = random.Random(f"socket/{seed}")
    token = rng.randbytes(32)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="hz") as folder:
        ends = {}
        for name in ("victim", "friend"):
            transport = ZmqTransport(name, 1, run="run", run_dir=Path(folder), token=token)
            ends[name] = (transport, Inbox())
            await transport.start(ends[name][1])
        (victim, inbox), (friend, _) = ends["victim"], ends["friend"]
        victim.connect("friend", 1, friend.endpoint)
        friend.connect("victim", 1, victim.endpoint)
        await until(lambda: bool(inbox.ups))
        intruders = [intruder(context, name, victim.endpoint) for name in NAMES]
        tags = [bytes([tag]) for tag in range(6)]
        for index in range(count):
            parts = [
                hostile(rng, tags, frames_of(rng) if rng.random() < 0.05 else [])
                for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))
            ]
            # The socket takes nothing from a second one of its friend's name.
            one = rng.choice(intruders)
            if not await send(one, parts):
                await send(intruders[-1], parts)
            if index % BURST == 0:
                await asyncio.sleep(0)
        seen = -1
        while seen != (seen := sum(victim.refused.values())):  # noqa: ASYNC110 - until all has been read
            await asyncio.sleep(0.3)
        header = Header(Address("victim", "a", 1), Address("friend", "b", 1))
        assert friend.send("victim", header, Stop(1.0)), "the friend's link is down"
        await until(lambda: bool(inbox.arrived))
        assert inbox.arrived == ["friend"], f"{len(inbox.arrived)} messages came through"
        assert inbox.ups == ["friend"], inbox.ups
        assert not inbox.downs, inbox.downs
        answered = sum(bool(one.poll(0)) for one in intruders)
        assert not answered, f"{answered} intruders were answered"
        refused = dict(victim.refused)
        victim.check()
        for one in intruders:
            one.close(0)
        for transport, _ in ends.values():
            await transport.close()
    context.term()
    return refused


def intruder(
    context: zmq.Context[zmq.Socket[bytes]], name: bytes, endpoint: str
) -> zmq.Socket[bytes]:
    found = context.socket(zmq.DEALER)
    found.setsockopt(zmq.LINGER, 0)
    found.setsockopt(zmq.ROUTING_ID, name)
    found.connect(endpoint)
    return found


async def send(wire: zmq.Socket[bytes], parts: list[bytes]) -> bool:
    """False: the pipe is full, and stays so."""
    for _ in range(TRIES):
        try:
            wire.send_multipart(parts, zmq.DONTWAIT)
            return True
        except zmq.Again:
            if wire.getsockopt(zmq.ROUTING_ID) == NAMES[0]:
                return False
            await asyncio.sleep(0.001)
    return False


def main(words: list[str]) -> int:
    parser = parser_of("wire", ABOUT)
    parser.add_argument("--count", type=int, default=1_000_000, help="for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(words)
    report = Report("wire", as_json=found.json, seed=found.seed)
    begin_s = time.monotonic()
    outcome = attack_decoders(found.count, found.seed)
    report.add(
        at="decoders", strings=found.count, seconds=time.monotonic() - begin_s, found=str(outcome)
    )
    for kind in KINDS:
        begin_s = time.monotonic()
        asyncio.run(attack(kind, found.count, found.seed))
        report.add(at=kind, strings=found.count, seconds=time.monotonic() - begin_s, found="")
    begin_s = time.monotonic()
    refused = asyncio.run(attack_socket(found.count, found.seed))
    report.add(
        at="node socket",
        strings=found.count,
        seconds=time.monotonic() - begin_s,
        found=str(refused),
    )
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
