"""This file tests the ZMQ transport against its traps, each with real sockets."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from actors.runtime import rundir
from actors.runtime.frame import PROTOCOL, Data, Hello
from actors.runtime.link import Limits
from actors.runtime.schema import hash_messages
from actors.runtime.transport.zmq import BULK_HWM, COPY_BYTES_MAX, ZmqTransport
from messages.base import Message
from messages.system import Cause, Reason, Stop
from tests.runtime.nodes import DEADLINE_S, Recorder, header_to, until

TOKEN = b"t" * 32


class Blob(Message, frozen=True):
    data: bytes


class World:
    """The nodes of one test, in one loop, with sockets in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.transports: list[ZmqTransport] = []
        self.intruders: list[zmq.Socket[bytes]] = []

    def make(self, node: str, incarnation: int = 1, **options: object) -> ZmqTransport:
        options = {"run": "r", "token": TOKEN, "heartbeat_s": 0.05, "hang_s": DEADLINE_S, **options}
        transport = ZmqTransport(node, incarnation, run_dir=self.directory, **options)  # type: ignore[arg-type]
        self.transports.append(transport)
        return transport

    async def start(
        self, node: str, incarnation: int = 1, **options: object
    ) -> tuple[ZmqTransport, Recorder]:
        transport, recorder = self.make(node, incarnation, **options), Recorder()
        await transport.start(recorder)
        return transport, recorder

    async def pair(
        self, **options: object
    ) -> tuple[ZmqTransport, Recorder, ZmqTransport, Recorder]:
        a, at_a = await self.start("a", **options)
        b, at_b = await self.start("b", **options)
        a.connect("b", 1, b.endpoint)
        b.connect("a", 1, a.endpoint)
        await at_a.until(lambda: bool(at_a.ups))
        await at_b.until(lambda: bool(at_b.ups))
        return a, at_a, b, at_b

    def intrude(self, target: ZmqTransport, name: bytes, *frames: bytes) -> None:
        """Somebody of the same user who found the socket."""
        intruder = zmq.Context.instance().socket(zmq.DEALER)
        intruder.setsockopt(zmq.LINGER, 2000)
        intruder.setsockopt(zmq.ROUTING_ID, name)
        intruder.connect(target.endpoint)
        intruder.send_multipart(frames)
        self.intruders.append(intruder)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="hz") as directory:
        world = World(Path(directory))
        yield world
        for intruder in world.intruders:
            intruder.close(0)
        for transport in world.transports:
            transport.check()
            await transport.close()
        assert os.listdir(directory) == []


async def test_messages_arrive_both_ways_in_order(world: World) -> None:
    a, at_a, b, at_b = await world.pair()
    for number in range(300):
        assert a.send("b", header_to("b", number), Stop(float(number)))
        assert b.send("a", header_to("a", number), Stop(float(number)))
    await at_b.until(lambda: len(at_b.arrived) == 300)
    await at_a.until(lambda: len(at_a.arrived) == 300)
    assert at_b.numbers == at_a.numbers == list(range(300))
    assert msgspec.msgpack.decode(at_b.arrived[7][2], type=Stop) == Stop(7.0)


async def test_a_large_body_arrives_whole(world: World) -> None:
    a, _, _, at_b = await world.pair()
    data = random.Random(0).randbytes(3 << 20)
    assert a.send("b", header_to("b", 1), Blob(data))
    await at_b.until(lambda: bool(at_b.arrived))
    assert msgspec.msgpack.decode(at_b.arrived[0][2], type=Blob).data == data


async def test_small_bodies_are_copied_and_large_ones_handed_through(world: World) -> None:
    a, _, _, at_b = await world.pair()
    kinds: list[type] = []
    take = at_b.arrive
    at_b.arrive = lambda node, header, body: (  # type: ignore[method-assign]
        kinds.append(type(body)),
        take(node, header, body),
    )[1]
    a.send("b", header_to("b", 1), Blob(bytes(1000)))
    a.send("b", header_to("b", 2), Blob(bytes(COPY_BYTES_MAX)))
    await at_b.until(lambda: len(at_b.arrived) == 2)
    assert kinds == [bytes, memoryview]


async def test_send_without_a_link_is_refused_at_once(world: World) -> None:
    a, _ = await world.start("a")
    assert not a.send("b", header_to("b", 1), Stop())
    a.connect("b", 1, a.endpoint.replace("a.1", "b.1"))  # bound by nobody
    assert not a.send("b", header_to("b", 1), Stop())


async def test_a_deadline_is_carried_over(world: World) -> None:
    a, _, _, at_b = await world.pair()
    now_s = asyncio.get_running_loop().time()
    a.send("b", header_to("b", 1, deadline_s=now_s + 100), Stop())
    await at_b.until(lambda: bool(at_b.arrived))
    deadline_s = at_b.arrived[0][1].deadline_s
    assert deadline_s is not None and now_s + 99 < deadline_s < now_s + 130


async def test_a_stuck_peer_fills_the_window_and_loses_nothing(world: World) -> None:
    # A ROUTER or DEALER alone would have accepted without end, or dropped.
    count_max = BULK_HWM * 4
    a, _, b, at_b = await world.pair(limits=Limits(count_max=count_max))
    # b's loop does not run while this loop does not yield.
    accepted = 0
    while a.send("b", header_to("b", accepted), Stop()):
        accepted += 1
        assert accepted <= count_max
    assert accepted == count_max
    assert a.counts.full == 1
    await at_b.until(lambda: len(at_b.arrived) == accepted)
    assert at_b.numbers == list(range(accepted))
    assert a.counts.resent == 0
    await until(lambda: a.send("b", header_to("b", accepted), Stop()))
    b.check()


async def test_other_callbacks_run_while_a_flood_arrives(world: World) -> None:
    a, _, _, at_b = await world.pair()
    for number in range(3000):
        assert a.send("b", header_to("b", number), Stop())
    seen: list[int] = []

    def look() -> None:
        seen.append(len(at_b.arrived))
        if len(at_b.arrived) < 3000:
            loop.call_soon(look)

    loop = asyncio.get_running_loop()
    loop.call_soon(look)
    await at_b.until(lambda: len(at_b.arrived) == 3000)
    assert max(later - earlier for earlier, later in zip(seen, seen[1:], strict=False)) <= 256


async def test_an_error_of_the_receiver_does_not_strand_what_follows(world: World) -> None:
    # The descriptor is edge-triggered: whoever leaves the loop early must come back by himself.
    a, _, _, at_b = await world.pair()
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def fail(node: str, header: object, body: bytes) -> None:
        if len(at_b.arrived) == 1:
            raise RuntimeError("a receiver's bug")

    at_b.on_arrive = fail
    for number in range(10):
        a.send("b", header_to("b", number), Stop())
    await at_b.until(lambda: len(at_b.arrived) == 10)
    assert [type(error) for error in errors] == [RuntimeError]


async def test_a_receiver_that_answers_within_the_call_is_served(world: World) -> None:
    a, at_a, b, at_b = await world.pair()
    at_b.on_arrive = lambda node, header, body: (
        b.send("a", header_to("a", header.question or 0), Stop()) and None
    )
    for number in range(500):
        a.send("b", header_to("b", number), Stop())
    await at_a.until(lambda: len(at_a.arrived) == 500)
    assert at_a.numbers == list(range(500))


async def test_a_successor_gets_nothing_that_was_sent_to_its_predecessor(world: World) -> None:
    # A DEALER by default delivers what it had queued to whoever binds the path next.
    a, at_a, b, _ = await world.pair()
    await die(b)
    for number in range(100):
        a.send("b", header_to("b", number), Stop())
        if a._peers["b"].stuck is not None:
            break  # nobody is there, and ZMQ takes no more
        await asyncio.sleep(0.005)
    assert a._peers["b"].stuck is not None
    successor, at_successor = await world.start("b", 2)
    os.link(successor._path, b._path)  # it even answers at the old address
    os.link(rundir.beat_path(successor._path), rundir.beat_path(b._path))
    successor.connect("a", 1, a.endpoint)
    await until(lambda: sum(successor.refused.values()) + successor.counts.stale > 0)
    assert at_successor.arrived == []
    a.connect("b", 2, successor.endpoint)
    await at_a.until(lambda: ("b", 2) in at_a.ups)
    await at_successor.until(lambda: bool(at_successor.ups))
    assert at_successor.arrived == []
    assert a.send("b", header_to("b", 99), Stop())
    await at_successor.until(lambda: bool(at_successor.arrived))
    assert at_successor.numbers == [99]
    for path in (b._path, rundir.beat_path(b._path)):
        path.unlink()


async def test_many_lives_of_a_peer_each_hear_a_beginning_of_what_was_sent_to_them(
    world: World,
) -> None:
    rng = random.Random(5)
    a, at_a = await world.start("a", limits=Limits(count_max=64))
    number = 0
    for life in range(1, 25):
        b, at_b = await world.start("b", life)
        a.connect("b", life, b.endpoint)
        b.connect("a", 1, a.endpoint)
        await at_a.until(lambda life=life: ("b", life) in at_a.ups)  # type: ignore[misc]
        sent: list[int] = []
        for _ in range(rng.randrange(1, 8)):
            for _ in range(rng.randrange(40)):
                number += 1
                if a.send("b", header_to("b", number), Blob(bytes(rng.randrange(2000)))):
                    sent.append(number)
            await asyncio.sleep(0)
        if rng.random() < 0.3:  # some are let finish
            await at_b.until(lambda at_b=at_b, sent=sent: len(at_b.arrived) == len(sent))  # type: ignore[misc]
        await (die(b) if rng.random() < 0.7 else b.close())
        assert at_b.numbers == sent[: len(at_b.arrived)]
        a.check()
    assert a.counts.lost > 0 and a.counts.delivered == 0


async def test_an_earlier_life_cannot_speak_after_its_successor(world: World) -> None:
    a, at_a, b, _ = await world.pair()
    b._take = lambda frames: None  # type: ignore[method-assign]  # hears no goodbye
    successor, at_successor = await world.start("b", 2)
    successor.connect("a", 1, a.endpoint)
    a.connect("b", 2, successor.endpoint)
    await at_successor.until(lambda: bool(at_successor.ups))
    assert b.send("a", header_to("a", 1), Stop())
    await until(lambda: a.refused.get("stranger", 0) > 0)
    assert successor.send("a", header_to("a", 2), Stop())
    await at_a.until(lambda: bool(at_a.arrived))
    assert at_a.numbers == [2]


async def test_disconnect_tells_the_peer_and_connect_begins_again(world: World) -> None:
    a, at_a, b, at_b = await world.pair()
    a.send("b", header_to("b", 1), Stop())
    await at_b.until(lambda: bool(at_b.arrived))
    a.disconnect("b")
    await at_b.until(lambda: bool(at_b.downs))
    assert not b.send("a", header_to("a", 1), Stop())
    assert at_a.downs == []
    a.connect("b", 1, b.endpoint)
    b.connect("a", 1, a.endpoint)
    await at_a.until(lambda: len(at_a.ups) == 2)
    assert a.send("b", header_to("b", 2), Stop())
    await at_b.until(lambda: len(at_b.arrived) == 2)
    assert at_b.numbers == [1, 2]


async def test_one_end_that_begins_again_takes_the_other_with_it(world: World) -> None:
    # Sequence numbers start anew: without sessions b would take the messages for repetitions.
    a, at_a, b, at_b = await world.pair()
    for number in range(3):
        a.send("b", header_to("b", number), Stop())
    await at_b.until(lambda: len(at_b.arrived) == 3)
    fall_silently(a)
    a.disconnect("b")
    a.connect("b", 1, b.endpoint)
    await at_a.until(lambda: len(at_a.ups) == 2)
    await at_b.until(lambda: len(at_b.ups) == 2)
    assert [node for node, _ in at_b.downs] == ["a"]
    assert a.send("b", header_to("b", 3), Stop())
    assert b.send("a", header_to("a", 4), Stop())
    await at_b.until(lambda: len(at_b.arrived) == 4)
    await at_a.until(lambda: bool(at_a.arrived))
    assert at_b.numbers == [0, 1, 2, 3] and at_a.numbers == [4]


async def test_connect_twice_changes_nothing(world: World) -> None:
    a, at_a, b, _ = await world.pair()
    a.connect("b", 1, b.endpoint)
    assert a.send("b", header_to("b", 1), Stop())
    assert at_a.downs == []


@pytest.mark.parametrize("count", [5, BULK_HWM * 3])  # the pipe itself is full, or is not
async def test_a_pipe_that_swallows_everything_is_replaced(world: World, count: int) -> None:
    # What a ROUTER does to a second connection with the routing id of the first.
    limits = Limits(probe_s=0.01, repeat_s_max=0.02)
    a, _, b, at_b = await world.pair(limits=limits)
    peer = a._peers["b"]
    assert peer.dealer is not None
    hole = a._context.socket(zmq.ROUTER)
    hole.setsockopt(zmq.LINGER, 0)
    path = b._path.with_name("hole")
    hole.bind(f"ipc://{path}")
    peer.dealer.disconnect(b.endpoint)
    peer.dealer.connect(f"ipc://{path}")
    for number in range(count):
        assert a.send("b", header_to("b", number), Stop())
    await at_b.until(lambda: len(at_b.arrived) == count)
    assert at_b.numbers == list(range(count))
    assert at_b.downs == []
    hole.close(0)
    path.unlink(missing_ok=True)


async def test_a_hello_left_in_a_replaced_pipe_does_not_bring_it_back(world: World) -> None:
    a, at_a, b, _ = await world.pair()
    session = b._peers["a"].link.session
    late = hello_of_b(session=session, heard_session=a._peers["b"].link.session)
    world.intrude(a, b"b#1/0", msgspec.msgpack.encode(late))
    await until(lambda: a.refused.get("pipe", 0) > 0)
    assert b.send("a", header_to("a", 1), Stop())
    await at_a.until(lambda: bool(at_a.arrived))
    assert b.counts.resent == 0


async def test_a_silent_peer_is_called_hung(world: World) -> None:
    a, at_a, b, _ = await world.pair(hang_s=0.3)
    assert b._ticker is not None
    b._ticker.cancel()  # its loop does nothing any more; its ZMQ threads live on
    await at_a.until(lambda: bool(at_a.downs))
    assert at_a.downs[0][1].cause is Cause.HUNG
    assert not a.send("b", header_to("b", 1), Stop())


async def test_bulk_does_not_delay_heartbeats(world: World) -> None:
    # The inbox of b is not read at all, and its pipe is full; the heartbeats still pass.
    a, at_a, b, _ = await world.pair(limits=Limits(stall_s=1000.0))
    loop = asyncio.get_running_loop()
    loop.remove_reader(b._inbox.getsockopt(zmq.FD))
    b._read_inbox = lambda: None  # type: ignore[method-assign]
    while a.send("b", header_to("b", 0), Blob(bytes(10_000))):
        pass
    heard: list[float] = []
    hear = b._pulse.hear

    def count(peer: str, now_s: float) -> None:
        heard.append(now_s)
        hear(peer, now_s)

    b._pulse.hear = count  # type: ignore[method-assign]
    await until(lambda: len(heard) > 15)
    assert at_a.downs == []


async def test_sockets_are_open_to_this_user_alone(world: World) -> None:
    a, _ = await world.start("a")
    assert stat.S_IMODE(world.directory.lstat().st_mode) == 0o700
    for path in (a._path, rundir.beat_path(a._path)):
        assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0


async def test_a_second_bind_of_the_same_path_fails(world: World) -> None:
    # ZMQ itself lets the second one take the path from under the first.
    await world.start("a")
    second = world.make("a")
    with pytest.raises(FileExistsError):
        await second.start(Recorder())


async def test_a_path_too_long_for_a_socket_is_said_so(world: World) -> None:
    with pytest.raises(ValueError, match="too long for a socket"):
        ZmqTransport("a", 1, run="r", run_dir=world.directory / ("d" * 100), token=TOKEN)


async def test_any_name_makes_a_node(world: World) -> None:
    name = "worker/0 of the replica with a very long name" * 3
    a, at_a = await world.start(name)
    b, _ = await world.start("b")
    a.connect("b", 1, b.endpoint)
    b.connect(name, 1, a.endpoint)
    await at_a.until(lambda: bool(at_a.ups))


async def test_a_directory_open_to_others_is_not_trusted(world: World) -> None:
    a, _ = await world.start("a")
    world.directory.chmod(0o755)
    with pytest.raises(PermissionError):
        a.connect("b", 1, a.endpoint.replace("a.1", "b.1"))
    world.directory.chmod(0o700)
    with pytest.raises(ValueError, match="ipc"):
        a.connect("b", 1, "tcp://127.0.0.1:5555")


async def test_close_frees_everything_with_messages_under_way(world: World) -> None:
    a, _, b, _ = await world.pair()
    for _ in range(2000):
        a.send("b", header_to("b", 1), Blob(bytes(1000)))
    await a.close()
    await b.close()
    await a.close()  # idempotent; what is left is seen by the fixture


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.system, (f"touch {self.marker}",)


def hello_of_b(**changes: object) -> Hello:
    fields: dict[str, object] = {
        "protocol": PROTOCOL,
        "schema": hash_messages(),
        "run": "r",
        "token": TOKEN,
        "node": "b",
        "incarnation": 1,
        "session": 1,
        "to_incarnation": 1,
        **changes,
    }
    return Hello(**fields)  # type: ignore[arg-type]


async def test_hostile_frames_are_refused_counted_and_change_nothing(
    world: World, tmp_path: Path
) -> None:
    a, at_a, b, at_b = await world.pair()
    marker = tmp_path / "marker"
    rng = random.Random(1)
    nested = b"\x91" * 100_000
    header = msgspec.msgpack.encode(Data(1, 0, header_to("a", 666)))
    hostile = [
        (b"b#1/77", pickle.dumps(Evil(marker))),
        (b"b#1/78", nested),
        (b"b#1/86", b"\x93\x03\x01" + nested),  # a valid Probe, and a field too deep to skip
        (b"b#1/79", b"\xdd\xff\xff\xff\xff"),
        (b"b#1/80", b"\xc6\xff\xff\xff\xff" + bytes(100)),
        (b"b#1/81", header, b"body"),
        (b"b#1/82", msgspec.msgpack.encode(hello_of_b(token=b"guess"))),
        (b"b#1/83", msgspec.msgpack.encode([0, 1, "x"])),
        (b"nobody", header, b"body"),
        (b"c#1/1", header, b"body"),
        (b"b#2/1", header, b"body"),
        (b"b#1/84", *[b"x"] * 50),
        (b"\xff\xfe#1/1", header),
        (b"b#1/" + b"9" * 200, header),
        *((b"b#1/%d" % (100 + i), rng.randbytes(rng.randrange(1, 400))) for i in range(100)),
    ]
    for frames in hostile:
        world.intrude(a, *frames)
    await until(lambda: sum(a.refused.values()) + a.counts.refused >= len(hostile))
    assert at_a.arrived == [] and at_a.downs == []
    assert not marker.exists()
    a.check()
    troubles = a.troubles()
    assert troubles["refused"] == 1  # the token
    assert troubles["frame_unreadable"] > 100 and troubles["frame_stranger"] == 2
    assert troubles["frame_pipe"] == 2 and troubles["frame_route"] == 2
    assert b.send("a", header_to("a", 1), Stop())
    await at_a.until(lambda: bool(at_a.arrived))
    assert at_a.numbers == [1]
    assert at_b.downs == []


@pytest.mark.parametrize("alias", ["b#1/0{}", "b#1/+{}", "b#1/ {}", "b#+1/{}", "b#01/{}"])
async def test_a_name_that_reads_like_the_peers_is_not_its_pipe(world: World, alias: str) -> None:
    # ZMQ keeps a second one out who has the very same name; these numbers are equal as numbers.
    a, at_a, _, _ = await world.pair()
    name = alias.format(a._peers["b"].pipe_in).encode()
    next_one = Data(1, 0, header_to("a", 666))
    world.intrude(a, name, msgspec.msgpack.encode(next_one), msgspec.msgpack.encode(Stop()))
    await until(lambda: bool(a.refused or at_a.arrived))
    assert at_a.arrived == [] and a.refused == {"route": 1}


async def test_bytes_that_are_no_zmq_do_no_harm(world: World) -> None:
    a, at_a, b, _ = await world.pair()
    rng = random.Random(2)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32)
    properties = b"\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x06b#1/99"
    ready = b"\x05READY" + properties
    huge = b"\x02" + (1 << 30).to_bytes(8, "big") + bytes(1000)  # says a gigabyte will follow
    for data in (
        rng.randbytes(5000),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 10 + b"\x7f" * 5000,
        greeting + b"\x04" + bytes([len(ready)]) + ready + huge,
    ):
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(str(a._path))
            plain.sendall(data)
    assert b.send("a", header_to("a", 1), Stop())
    await at_a.until(lambda: bool(at_a.arrived))
    assert at_a.downs == []


async def test_a_frame_over_the_limit_cuts_its_sender_off(world: World) -> None:
    limits = Limits(bytes_max=100_000)
    a, at_a, b, at_b = await world.pair(limits=limits)
    assert not a.send("b", header_to("b", 1), Blob(bytes(200_000)))  # seen before it is sent
    world.intrude(a, b"b#1/9", bytes(3 << 20))
    assert b.send("a", header_to("a", 1), Stop())
    await at_a.until(lambda: bool(at_a.arrived))
    assert at_a.numbers == [1] and at_b.downs == []


def fall_silently(transport: ZmqTransport) -> None:
    """All its links are down, and nobody is told: as when the process was killed."""
    for peer in transport._peers.values():
        peer.link.reason = Reason(cause=Cause.EXITED)


async def die(transport: ZmqTransport) -> None:
    fall_silently(transport)
    await transport.close()
