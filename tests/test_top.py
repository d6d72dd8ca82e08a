"""What `top` makes of a server's own words."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

import app
from actors import top

ROW: dict[str, Any] = {
    "path": "replica/worker",
    "state": "running",
    "node": "worker",
    "pid": 12,
    "incarnation": 2,
    "restarts": 1,
    "mailbox_depth": 3,
    "handled_count": 99,
    "busy_with": "Step",
    "busy_s": 0.25,
    "handle_p50_s": 0.0005,
}
METRICS = """\
# HELP histrio_pages Pages of the KV pool, by state.
# TYPE histrio_pages gauge
histrio_pages{actor="replica/cache",state="free"} 75
histrio_pages{actor="replica/cache",state="leased"} 25
histrio_generated_tokens_total{node="a"} 100
histrio_generated_tokens_total{node="b"} 20
histrio_requests_running 4
"""


def reading(at_s: float, tokens: float) -> top.Reading:
    series = {"histrio_generated_tokens_total": tokens, "histrio_requests_running": 4.0}
    return top.Reading(at_s, True, [ROW], series, {"free": 75.0, "leased": 25.0})


def test_series_are_summed_over_their_labels() -> None:
    series, pages = top.series_of(METRICS)
    assert series["histrio_generated_tokens_total"] == 120
    assert series["histrio_requests_running"] == 4
    assert pages == {"free": 75, "leased": 25}


def test_a_screen_has_load_pages_and_a_row_an_actor() -> None:
    first, pages, _, head, row = top.screen(reading(1.0, 100), None)
    assert "ready" in first and "4 running" in first and "tok/s" not in first
    assert pages == "KV pages: 100  free 75%  leased 25%"
    assert head.split() == list(top.COLUMNS)
    cells = "replica/worker running worker 12 2 1 3 99 0.50 ms - Step 0.2 s"
    assert row.split() == cells.split()


def test_what_was_seen_a_while_ago_says_so() -> None:
    assert top.cells(ROW | {"age_s": 0.2})[-1] == "Step 0.2 s"
    assert top.cells(ROW | {"age_s": None})[-1] == "Step 0.2 s"
    assert top.cells(ROW | {"age_s": 4.2})[-1] == "Step 0.2 s (4 s ago)"
    assert top.cells(ROW | {"age_s": 4.2, "busy_with": None})[-1] == "(4 s ago)"


def test_rates_are_differences_and_never_negative() -> None:
    first, *_ = top.screen(reading(3.0, 300), reading(1.0, 100))
    assert "100 generated tok/s" in first
    first, *_ = top.screen(reading(3.0, 10), reading(1.0, 100))
    assert "0 generated tok/s" in first


@pytest.fixture
def server() -> Iterator[str]:
    """Answers as a server with a key does; `/ready` is 503."""

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/actors": json.dumps([ROW]), "/metrics": METRICS}
            allowed = self.headers["authorization"] == "Bearer k"
            status = 401 if not allowed else 200 if self.path in known else 503
            self.send_response(status)
            self.end_headers()
            self.wfile.write(known.get(self.path, "").encode())

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Door) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


def test_one_screen_of_a_server(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["top", "--once", "--url", server, "--key", "k"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("NOT READY") and "replica/worker" in out


def test_a_key_that_is_wanted_is_asked_for(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["top", "--once", "--url", server]) == 1
    assert "--key" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["top", "--url", "http://127.0.0.1:9"]) == 1
    assert "--url" in capsys.readouterr().err
