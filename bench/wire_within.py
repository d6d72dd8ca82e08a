"""This file strikes from within at what stands behind a socket: links, a node's inbox, a node.

It knows the runtime, no room. A case is one hostile strike; after it the laws must hold: who has
not shown the run's token changes nothing and is told nothing; a link keeps its laws whatever its
peer sends; an actor handles what its union allows and nothing else, in one life. `wire.py` runs it.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq

from actors.runtime import Actor
from actors.runtime.codec import Decoder, Unreadable
from actors.runtime.frame import PROTOCOL, Ack, AnyFrame, Bye, Data, Hello, Identity, Probe, Stage
from actors.runtime.link import Arrived, Gone, Link, Up
from actors.runtime.schema import hash_messages
from actors.runtime.spec import Child, Supervisor
from actors.runtime.system import System
from actors.runtime.transport.routes import ROUTES_MAX
from actors.runtime.transport.zmq import ZmqTransport
from bench.forge import Forge
from messages.base import Address, Header, Lane, Message
from messages.system import Reason, RootIn

TOKEN = b"s" * 32
WRONG_TOKENS = (b"", b"s", b"s" * 31, b"s" * 33, b"S" * 32, bytes(32))
BATCH = 256  # strikes between two turns of the loop
PATIENCE_S = 20.0  # for what must come over a socket


class Breach(Exception):
    """A law that did not hold."""


def demand(holds: bool, law: str, *facts: object) -> None:
    if not holds:
        raise Breach(f"{law}: {facts!r}"[:2000])


def identity(node: str, **changes: Any) -> Identity:
    fields = {"incarnation": 2, "run": "r", "token": TOKEN, "schema": b"h", **changes}
    return Identity(node=node, **fields)


def hello(of: Identity, *, to_incarnation: int = 2, session: int = 1, **more: Any) -> Hello:
    fields = {"protocol": PROTOCOL, **more}
    return Hello(
        schema=of.schema,
        run=of.run,
        token=of.token,
        node=of.node,
        incarnation=of.incarnation,
        session=session,
        to_incarnation=to_incarnation,
        **fields,
    )


class Links:
    """Strangers call; and a peer that has shown its token goes mad."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self._rng = rng
        self._frames = Forge([Hello, Data, Ack, Probe, Bye], rng, untouched=0.6)
        self._decoder = msgspec.msgpack.Decoder(AnyFrame)
        self._stranger = self._fresh()
        self._mad = self._agreed()

    def _fresh(self) -> Link:
        link = Link(identity("a"), "b", 2, session=1, now_s=0.0)
        link.poll(0.0)  # its hello
        return link

    def _agreed(self) -> Link:
        link = self._fresh()
        link.receive(hello(identity("b"), heard_session=1, stage=Stage.AGREED), None, 0.0)
        demand(link.is_up, "a valid hello agrees")
        for number in range(self._rng.randrange(4)):
            link.send(Header(Address("b", "x", 1)), bytes(number), 0.0)
        return link

    def strike(self) -> None:
        rng = self._rng
        if rng.random() < 0.1:
            self._call_wrongly()
            return
        try:
            frame = self._decoder.decode(self._frames.strike())
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return
        if rng.random() < 0.5:
            link = self._stranger
            events = link.receive(frame, b"body", 1.0)
            demand(not events and link.stage is Stage.CALLING, "a stranger is not heard", frame)
            demand(link.poll(1.0) is None, "a stranger is not answered", frame)
            link.check()
            return
        link = self._mad
        link.receive(frame, b"body", 1.0)
        for _ in range(8):
            link.poll(1.0)
        link.check()
        if link.reason is not None or rng.random() < 0.01:
            self._mad = self._agreed()

    def _call_wrongly(self) -> None:
        """A hello with the token, or nearly, of who does not belong to this link."""
        rng = self._rng
        link = self._fresh()
        wrong: dict[str, Any] = rng.choice(
            (
                {"token": rng.choice(WRONG_TOKENS)},
                {"incarnation": rng.choice((0, 1, 3))},
                {"run": rng.choice(("", "R", "rr"))},
                {"schema": rng.choice((b"", b"H"))},
            )
        )
        more: dict[str, Any] = {} if rng.random() < 0.8 else {"to_incarnation": 1}
        call = hello(identity("b", **wrong), heard_session=1, stage=Stage.AGREED, **more)
        events = link.receive(call, None, 1.0)
        demand(
            not link.is_up and not any(isinstance(e, Up | Arrived) for e in events), "wrong", call
        )
        # With the token, another version or run is told why; without it, nothing is said.
        told = bool(events) and isinstance(events[0], Gone)
        demand(told == bool(wrong.keys() & {"run", "schema"}), "who is told", call)
        demand((link.poll(1.0) is None) != told, "who is answered", call)

    async def open(self) -> None: ...
    async def settle(self) -> None: ...
    async def close(self) -> None: ...


# A node's inbox


class Ear:
    """What comes out of a transport."""

    def __init__(self) -> None:
        self.ups: list[str] = []
        self.downs: list[str] = []
        self.bodies: list[bytes] = []

    def arrive(self, node: str, header: Header, body: Message | bytes | memoryview) -> None:
        assert not isinstance(body, Message)
        self.bodies.append(bytes(body))

    def link_up(self, node: str, incarnation: int) -> None:
        self.ups.append(node)

    def link_down(self, node: str, reason: Reason) -> None:
        self.downs.append(f"{node}: {reason.detail}")


class Inbox:
    """Of node `a`, which is linked to `b`; the strikes come by other pipes than the one of `b`."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self._rng = rng
        self.a, self.b = self._transport("a", folder), self._transport("b", folder)
        self.at_a, self.at_b = Ear(), Ear()
        self._frames = Forge([Hello, Data, Ack, Probe, Bye], rng, untouched=0.5)

    def _transport(self, node: str, folder: Path) -> ZmqTransport:
        return ZmqTransport(node, 2, run="r", run_dir=folder, token=TOKEN)

    async def open(self) -> None:
        await self.a.start(self.at_a)
        await self.b.start(self.at_b)
        self.a.connect("b", 2, self.b.endpoint)
        self.b.connect("a", 2, self.a.endpoint)
        await until(lambda: bool(self.at_a.ups and self.at_b.ups))
        self.before = self.state()

    def state(self) -> tuple[object, ...]:
        """All of the link to `b` that a frame could change."""
        peer = self.a._peers["b"]
        link = peer.link
        return (
            link.stage,
            link.reason,
            link.peer_session,
            link._received,
            link._acked,
            link._next_seq,
            link._hello_due,
            link._answer_due,
            link._gap_due,
            link.window_count,
            peer.pipe_in,
            len(self.at_a.bodies),
            len(self.at_a.downs),
            len(self.at_a.ups),
        )

    def name(self) -> bytes:
        """A routing id: whatever the caller likes, but not that of a pipe that there is."""
        rng = self._rng
        pipe = self.a._peers["b"].pipe_in
        texts = (
            f"b#2/0{pipe}",
            f"b#2/+{pipe}",
            f"b#2/ {pipe}",
            f"b#+2/{pipe}",
            f"b#2/{chr(0x0660 + (pipe or 0) % 10)}",
            f"b#2/{rng.randrange(50, 1 << 40)}",
            f"b#1/{pipe}",
            f"b#3/{pipe}",
            f"c#2/{pipe}",
            f"a#2/{pipe}",
            "#/",
            "",
            "b#2/-1",
            "b#2/" + "9" * 5000,
        )
        return rng.choice(texts).encode() if rng.random() < 0.9 else rng.randbytes(9)

    def frames(self) -> list[bytes]:
        """What follows the name."""
        rng = self._rng
        if rng.random() < 0.5:
            head = self._frames.strike()
        else:
            head = msgspec.msgpack.encode(self._plausible())
        count = rng.choice((1, 1, 2, 2, 2, 3))
        return [head, *(rng.randbytes(rng.choice((0, 5, 100))) for _ in range(count - 1))]

    def _plausible(self) -> AnyFrame:
        """The very next frame of the peer, or a hello that is wrong in one thing alone."""
        rng = self._rng
        link = self.a._peers["b"].link
        session = link.peer_session or 0
        schema = hash_messages()
        right = identity("b", schema=schema)
        return rng.choice(
            (
                Data(link._received + 1, 0, Header(Address("a", "", 2), lane=Lane.CONTROL)),
                Ack(link._next_seq - 1),
                Probe(1),
                Bye(session),
                hello(identity("b", schema=schema, token=rng.choice(WRONG_TOKENS))),
                hello(identity("b", schema=schema, incarnation=1), session=session + 1),
                hello(right, to_incarnation=1, session=session + 1),
                hello(right, session=session - 1),
            )
        )

    def strike(self) -> None:
        name, frames = self.name(), self.frames()
        self.a._take([zmq.Frame(name), *map(zmq.Frame, frames)])
        state = self.state()
        demand(state == self.before, "the link is as it was", state, self.before, name, frames)
        self.a.check()

    async def settle(self) -> None:
        await asyncio.sleep(0)  # heartbeats

    async def close(self) -> None:
        """The peer is still served, then all ends."""
        sent = self.b.send("a", Header(Address("a", "x", 1)), Reading(7))
        demand(sent, "the peer may still send", self.at_b.downs)
        await until(lambda: bool(self.at_a.bodies))
        demand(len(self.at_a.bodies) == 1, "one message came", len(self.at_a.bodies))
        demand(len(self.a._routes) <= ROUTES_MAX, "names are not kept without end")
        await self.a.close()
        await self.b.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what ZMQ's threads do makes no event here
            await asyncio.sleep(0.0005)


# A node with an actor


class Reading(Message, frozen=True):
    number: int


class Saying(Message, frozen=True):
    words: tuple[str, ...] = ()
    data: bytes = b""
    weight: float | None = None


class Witness(Actor):
    """Counts what it was given."""

    accepts = Reading | Saying

    def __init__(self) -> None:
        self.count = 0

    async def on_start(self) -> bytes:
        return b""

    def on_reading(self, message: Reading) -> None:
        self.count += 1

    def on_saying(self, message: Saying) -> None:
        self.count += 1


class Nodes:
    """Behind a link that is agreed: a peer of this run that sends rubbish."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self._rng = rng
        self._bodies = Forge([Reading | Saying], rng, untouched=0.1)
        self._reader = msgspec.msgpack.Decoder(Reading | Saying)
        self._root = Decoder(RootIn)
        self.expected = 0

    async def open(self) -> None:
        silent = structlog.make_filtering_bound_logger(logging.CRITICAL)
        log = structlog.wrap_logger(structlog.PrintLogger(io.StringIO()), wrapper_class=silent)
        child = Child(name="witness", factory="bench.wire_within:Witness")
        self._system = System(Supervisor(name="root", children=(child,)), log=log)
        await self._system.start()
        found = self._system.local("witness")
        assert found is not None
        self._witness: Any = found

    def header(self) -> Header:
        rng = self._rng
        node, path = rng.choice(("main",) * 6 + ("n", "")), rng.choice(("witness",) * 6 + ("", "x"))
        return Header(
            Address(node, path, rng.choice((1, 1, 1, 1, 0, 2, -1, 2**63 - 1))),
            rng.choice((None, Address("peer", "x", 1), Address("main", "witness", 1))),
            rng.choice((Lane.USER,) * 5 + tuple(Lane)),
            rng.choice((None, None, None, float("inf"), float("nan"), -1.0, 1e308)),
            rng.choice((None, None, 0, 1, -1, 2**63 - 1)),
            rng.random() < 0.1,
            rng.choice((None, "", "r")),
            rng.random() < 0.2,
            rng.choice((0, 0, 0, 1, -1, 2**63 - 1)),
        )

    def strike(self) -> None:
        header, body = self.header(), self._bodies.strike()
        node = self._system.node
        if header.target.node == "main" and not header.target.path and self._is_report(body):
            return  # what a peer of this run reports is believed
        self.expected += self._is_for_witness(header, body)
        node.arrive("peer", header, body)

    def _is_report(self, body: bytes) -> bool:
        try:
            self._root.decode(body)
        except Unreadable:
            return False
        return True

    def _is_for_witness(self, header: Header, body: bytes) -> bool:
        is_late = header.deadline_s is not None and header.deadline_s <= self._system.node.time()
        if header.target != Address("main", "witness", 1) or header.is_answer or is_late:
            return False
        if header.lane is not Lane.USER:
            return False
        try:
            self._reader.decode(body)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return False
        return True

    async def settle(self) -> None:
        """The actor has handled what it was to be given, and nothing else, in its first life."""
        for _ in range(20):
            await asyncio.sleep(0)
        demand(self._witness.count == self.expected, "handled", self._witness.count, self.expected)
        demand(self._system.local("witness") is self._witness, "its life is the first")
        self._system.check()

    async def close(self) -> None:
        await self._system.stop()


# The run


async def attack(kind: str, count: int, seed: int) -> None:
    """Strikes so often at one of KINDS. Raises Breach at the first law that does not hold."""
    rng = random.Random(f"{kind}/{seed}")
    with tempfile.TemporaryDirectory(prefix="hz") as folder:
        target = KINDS[kind](rng, Path(folder))
        await target.open()
        for number in range(count):
            try:
                target.strike()
                if number % BATCH == BATCH - 1 or number == count - 1:
                    await target.settle()
            except Exception as error:
                raise Breach(f"{kind}, case {number} of seed {seed}: {error!r}") from error
        await target.close()


KINDS: dict[str, Any] = {"link": Links, "inbox": Inbox, "node": Nodes}
