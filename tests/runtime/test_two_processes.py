"""This file tests the link between two real processes: streams, death, and hanging."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from actors.runtime.process import ChildProcess, spawn_node
from actors.runtime.rundir import RunDir
from actors.runtime.transport.zmq import ZmqTransport
from messages.system import Cause, NodeBoot, Reason, Stop
from tests.runtime.nodes import DEADLINE_S, Recorder, header_to

HANG_S = 0.6


class Two:
    """This process as `main`, and a child that repeats what it gets."""

    def __init__(self, run: RunDir, hang_s: float) -> None:
        self.run = run
        self.recorder = Recorder()
        self.transport = ZmqTransport(
            "main",
            1,
            run=run.run,
            run_dir=run.path,
            token=run.token,
            heartbeat_s=0.1,
            hang_s=hang_s,
        )
        self.child: ChildProcess

    async def spawn(self, incarnation: int) -> None:
        boot = NodeBoot(
            "echo",
            incarnation,
            self.run.run,
            str(self.run.path),
            "main",
            1,
            self.transport.endpoint,
            heartbeat_s=0.1,
            hang_s=DEADLINE_S,  # it accuses nobody: this process is the busy one in tests
        )
        self.child = await spawn_node(
            boot, token=self.run.token, entry="tests.runtime.children:chatty"
        )
        self.transport.connect("echo", incarnation, self.child.endpoint)
        await self.recorder.until(lambda: ("echo", incarnation) in self.recorder.ups)

    async def death(self) -> Reason:
        async with asyncio.timeout(DEADLINE_S):
            return await self.child.exited


@asynccontextmanager
async def two(hang_s: float = DEADLINE_S) -> AsyncIterator[Two]:
    with tempfile.TemporaryDirectory(prefix="hz") as directory:
        world = Two(RunDir.create(Path(directory)), hang_s)
        await world.transport.start(world.recorder)
        await world.spawn(1)
        try:
            yield world
        finally:
            world.child.kill()
            await world.death()
            world.transport.check()
            await world.transport.close()
            world.run.close()
        assert os.listdir(directory) == []


async def test_a_stream_goes_there_and_back_in_order() -> None:
    async with two() as world:
        sent = 0
        while sent < 5000:
            if world.transport.send("echo", header_to("main", sent), Stop(float(sent))):
                sent += 1
            else:
                await asyncio.sleep(0)
        await world.recorder.until(lambda: len(world.recorder.arrived) == 5000)
        assert world.recorder.numbers == list(range(5000))
        assert world.recorder.downs == []


async def test_what_was_sent_to_the_dead_is_not_given_to_the_next_life() -> None:
    async with two() as world:
        os.kill(world.child.pid, signal.SIGSTOP)  # so that it takes nothing more
        for number in range(500):
            assert world.transport.send("echo", header_to("main", number), Stop())
        os.kill(world.child.pid, signal.SIGKILL)
        assert (await world.death()).signal == signal.SIGKILL
        arrived = len(world.recorder.arrived)
        world.transport.disconnect("echo")
        assert world.transport.counts.lost > 0
        await world.spawn(2)
        assert world.transport.send("echo", header_to("main", 1000), Stop())
        await world.recorder.until(lambda: 1000 in world.recorder.numbers)
        assert world.recorder.numbers[arrived:] == [1000]


async def test_a_stopped_process_is_called_hung() -> None:
    async with two(HANG_S) as world:
        os.kill(world.child.pid, signal.SIGSTOP)
        await world.recorder.until(lambda: bool(world.recorder.downs))
        assert world.recorder.downs[0][1].cause is Cause.HUNG
        assert not world.child.exited.done()


async def test_a_process_whose_loop_spins_is_called_hung() -> None:
    # ZMQ's own heartbeats would go on for ever: its threads are alive.
    async with two(HANG_S) as world:
        world.transport.send("echo", header_to("main", 1), Stop(-1.0))
        await world.recorder.until(lambda: bool(world.recorder.downs))
        assert world.recorder.downs[0][1].cause is Cause.HUNG


async def test_a_child_that_ends_well_says_goodbye() -> None:
    async with two() as world:
        world.transport.disconnect("echo")
        reason = await world.death()
        assert reason.exit_code == 0
        assert world.recorder.downs == []
