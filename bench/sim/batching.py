"""This file is the client of a batch in a simulated world: it uploads, asks, looks, and judges.

It does not know faults. A gateway that dies is asked again, or another one: what it has been told
is kept on the disk. Laws: a batch that was taken ends, whatever dies meanwhile, and also when the
server itself ends before it and is started anew; each line has one result, the right one or a
failure that something explains, and what has been done stays done; none expires within a day,
whatever is done to the wall clock; what has ended is there in the next run as it was.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec

from actors.gateway.errors import Refused
from actors.gateway.record import LOSSES_MAX
from bench.sim.bodies import body_of, path_of
from bench.sim.calling import answer_of
from bench.sim.scenario import Ask
from bench.sim.site import Exchange

FILES, BATCHES = "/v1/files", "/v1/batches"
BOUNDARY = "lines"
LOOK_S = 3.0
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
# A line may end so, where something has gone wrong meanwhile, or shortly before.
LOSSES = ("interrupted",)
PATIENCE_S = 30.0


class Line(NamedTuple):
    """One of its requests, as `answer_of` takes a client."""

    ask: Ask
    rights: list[Any]


class Ended(Exception):
    """There is nobody any more to ask."""


class Batch:
    def __init__(self, client: Any) -> None:
        self.client = client
        self.ask: Ask = client.ask
        self.world = client.world
        oracle = self.world.oracle
        self.lines = [
            Line(ask, [oracle.right(ask, choice) for choice in range(ask.choice_count)])
            for ask in self.ask.lines
        ]
        self.visits = 0
        self.batch_id = ""  # once it is told
        self.began_s = 0.0
        self.done_count = 0  # lines, at the last look
        self.is_cancelled = False  # or was asked to be
        self.ended: dict[str, Any] | None = None
        self.found: list[dict[str, Any]] = []  # its results

    async def run(self) -> bool:
        """Whether it was judged: False where there was nobody to ask."""
        try:
            file_id = (await self.door("POST", FILES, form(self.input()), FORM))["id"]
            self.began_s = self.world.loop.time()
            body = {
                "input_file_id": file_id,
                "endpoint": path_of(self.ask.lines[0]),
                "completion_window": "24h",
            }
            batch = await self.door("POST", BATCHES, msgspec.json.encode(body))
            self.batch_id = batch["id"]
            await self.see_end()
        except Ended:
            return False
        return True

    async def see_end(self) -> None:
        """Raises Ended."""
        batch = await self.wait()
        self.assert_end(batch)
        results = await self.results(batch)
        self.judge(batch, results)
        self.ended, self.found = batch, results
        seen = self.world.seen
        seen["a batch came to its end"] += not self.is_cancelled
        seen["a batch was cancelled"] += batch["status"] == "cancelled"
        if any(at_s > self.began_s and "gateway" in path for at_s, path, _ in self.world.deaths):
            seen["a batch went on after a gateway died"] += not self.is_cancelled

    async def go_on(self) -> None:
        """In the next run of the server, which has it as the last one left it."""
        seen = self.world.seen
        batch = await self.look()
        if self.ended is None:
            seen["a batch went on in the next run"] += batch["status"] in RUNNING
            await self.see_end()
            return
        assert batch == self.ended, f"{batch} was {self.ended}"
        assert await self.results(batch) == self.found, f"other results of {self.batch_id}"
        seen["what a batch came to was there in the next run"] += 1

    def input(self) -> bytes:
        rows = [
            {"custom_id": ask.name, "method": "POST", "url": path_of(ask),
             "body": msgspec.Raw(body_of(ask))}
            for ask in self.ask.lines
        ]  # fmt: skip
        return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)

    async def wait(self) -> dict[str, Any]:
        """Until it has ended; some are cancelled meanwhile."""
        looks = 0
        while True:
            await asyncio.sleep(LOOK_S)
            batch = await self.look()
            if batch["status"] not in RUNNING:
                return batch
            looks += 1
            if self.ask.after % 5 < 2 and looks == 1 + self.ask.after % 2:
                self.is_cancelled = True
                try:
                    await self.door("POST", f"{BATCHES}/{self.batch_id}/cancel")
                except Refused as refused:  # it has ended just now
                    assert "cannot be cancelled" in refused.problem.message, refused.problem

    async def look(self) -> dict[str, Any]:
        batch = await self.door("GET", f"{BATCHES}/{self.batch_id}")
        counts = batch["request_counts"]
        done = counts["completed"] + counts["failed"]
        assert done >= self.done_count, f"{done} of {self.done_count} results are left: {batch}"
        self.done_count = done
        return batch

    async def results(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        found = []
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is not None:
                content = await self.content(f"{FILES}/{batch[name]}/content")
                found += [msgspec.json.decode(row) for row in content.splitlines()]
        return found

    # Laws

    def assert_end(self, batch: dict[str, Any]) -> None:
        ends = ("completed", "cancelled") if self.is_cancelled else ("completed",)
        assert batch["status"] in ends, batch
        counts = batch["request_counts"]
        done = counts["completed"] + counts["failed"]
        is_all = batch["status"] == "completed"
        assert counts["total"] == len(self.lines) or not is_all, batch
        assert done == counts["total"] if is_all else done <= counts["total"], batch

    def judge(self, batch: dict[str, Any], results: list[dict[str, Any]]) -> None:
        counts = batch["request_counts"]
        names = [row["custom_id"] for row in results]
        assert len(set(names)) == len(names), f"a line has two results: {names}"
        assert len(names) == counts["completed"] + counts["failed"], (names, counts)
        by_name = {line.ask.name: line for line in self.lines}
        for row in results:
            line, response = by_name[row["custom_id"]], row["response"]
            if response["status_code"] == 200:
                answer = answer_of(line)
                answer.take_body(response["body"])
                answer.assert_whole()
                continue
            error = response["body"]["error"]
            is_explained = self.is_explained(error["code"])
            assert is_explained, f"{line.ask.name} of a batch: {error}"

    def is_explained(self, code: str) -> bool:
        """Whether a line that came to nothing had a reason for it."""
        shape, judge, now_s = self.world.scenario.shape, self.world.judge, self.world.loop.time()
        began_s = self.began_s
        if code == "grammar_timeout" and shape.compile_s > shape.grammar_timeout_s:
            return True
        if code == "repeatedly_interrupted":
            return len(judge.deaths(began_s - LOOK_S, now_s)) >= LOSSES_MAX
        return code in LOSSES and judge.trouble_before(now_s) > began_s - PATIENCE_S

    # Doors

    async def door(
        self, method: str, path: str, body: bytes = b"", media: str = "application/json"
    ) -> dict[str, Any]:
        """What some gateway answers. Raises Refused, Ended."""
        found: dict[str, Any] = msgspec.json.decode(await self.content(path, method, body, media))
        return found

    async def content(
        self, path: str, method: str = "GET", body: bytes = b"", media: str = "application/json"
    ) -> bytes:
        while True:
            self.visits += 1
            life = await self.world.gateway(self.ask.front + self.visits)
            if life is None:
                raise Ended
            exchange = Exchange(method, path, body, {"content-type": media})
            await self.world.site(life).serve(exchange)
            if exchange.is_complete and exchange.status == 200:
                return exchange.body
            if exchange.is_complete and exchange.status != 503:
                raise Refused(exchange.problem())
            await asyncio.sleep(1.0)


FORM = f"multipart/form-data; boundary={BOUNDARY}"


def form(lines: bytes) -> bytes:
    parts = (("purpose", b"batch"), ('file"; filename="lines.jsonl', lines))
    body = b"".join(
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n'.encode()
        + content + b"\r\n"
        for name, content in parts
    )  # fmt: skip
    return body + f"--{BOUNDARY}--\r\n".encode()
