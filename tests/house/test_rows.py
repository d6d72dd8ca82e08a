"""What a server with processes says of its parts, whichever front end is asked: all of them work,
and what one last did before it stood still is shown as of its time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from actors import top
from tests.house.server import Server, eventually, stopped

REPLICA = ("replica/worker", "replica/scheduler", "replica/cache")


@pytest.fixture(scope="module", params=[1, 2], ids=["one front end", "two front ends"])
def house(
    request: pytest.FixtureRequest, tiny: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that has answered a few calls."""
    words = () if request.param == 1 else ("--front-ends", str(request.param))
    server = Server(tiny, tmp_path_factory.mktemp("rows"), *words)
    try:
        server.wait_ready()
        eventually(lambda: server.get("/health").json() == {"status": "ok"}, "all parts run")
        for prompt in ("x", "y", "z"):
            body = {"model": server.model(), "prompt": prompt, "max_tokens": 4}
            assert server.client().post("/completions", body=body, cast_to=object)
        yield server
    finally:
        server.close()


def own_rows(server: Server) -> dict[str, dict[str, dict[str, Any]]]:
    """`GET /actors` as each gateway answers it, by gateway: what it says of itself is of no age."""
    found: dict[str, dict[str, dict[str, Any]]] = {}

    def look() -> bool:
        rows = server.rows()
        gateways = {path for path in rows if path.endswith("gateway")}
        (own,) = (path for path in gateways if rows[path]["age_s"] == 0.0)
        found[own] = rows
        return set(found) == gateways

    eventually(look, "each gateway has answered")
    return found


def test_every_front_end_sees_what_all_parts_do(house: Server) -> None:
    def look() -> bool:  # a heartbeat may be on its way
        rows = [row for each in own_rows(house).values() for row in map(each.get, REPLICA)]
        return all(row["handled_count"] > 0 and row["handle_p50_s"] > 0.0 for row in rows if row)

    eventually(look, "the replica is seen at work")
    for rows in own_rows(house).values():
        assert all(row["age_s"] is not None for row in rows.values())
        assert all(rows[path]["handle_p99_s"] >= rows[path]["handle_p50_s"] for path in REPLICA)


def test_the_terminal_and_the_page_show_it_too(house: Server) -> None:
    def look() -> bool:
        cells = {row["path"]: top.cells(row) for row in top.read(house.url, None).actors}
        handled, p50 = top.COLUMNS.index("HANDLED"), top.COLUMNS.index("P50")
        return all(int(cells[path][handled]) and cells[path][p50] != "-" for path in REPLICA)

    eventually(look, "top has them")
    page = house.get("/").text
    for path in REPLICA:
        row = page.partition(f"<td>{path}</td>")[2].partition("</tr>")[0]
        assert " ms</td>" in row


def test_metrics_have_the_handlers_and_the_mailboxes_of_all_parts(house: Server) -> None:
    for path in REPLICA:
        label = f'{{actor="{path}"}}'
        name = f"histrio_handler_seconds_count{label}"
        eventually(lambda name=name: house.metric(name) > 0, f"{name} is counted")
        assert f"histrio_mailbox_depth{label} " in house.get("/metrics").text


def test_a_part_that_stands_still_is_shown_as_of_its_time(house: Server) -> None:
    pid = house.pid_of("replica/worker")
    before = house.rows()["replica/worker"]

    def age_s() -> float:
        found: float | None = house.rows()["replica/worker"]["age_s"]
        return found or 0.0

    with stopped(pid):
        eventually(lambda: age_s() > top.OLD_S, "its row gets old")
        row = house.rows()["replica/worker"]
        assert (row["pid"], row["state"]) == (pid, "running")
        assert row["handled_count"] >= before["handled_count"] > 0
        assert "s ago)" in top.doing_of(row)
        assert house.rows()["replica/scheduler"]["handled_count"] > 0
    eventually(lambda: 0.0 < age_s() < row["age_s"], "it is heard again")
