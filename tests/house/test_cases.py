"""Public bug reports, asked of a real server with a random model, as `bench cases` does.

Those that need a model that speaks, or that measure times, are for the bench; docs/cases.md says
where each is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench import cases
from bench.cases.asking import Peer
from bench.cases.table import SETTINGS
from tests.house.server import Server
from tests.house.tiny import VOCAB

NAMES = ("B035", "B043", "B045", "B047", "B051", "B073", "B143", "B151", "B153", "B161")
EOS = 2


@pytest.fixture(scope="module")
def peer(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    words = ("--placement", "inline", *SETTINGS["plain"])
    server = Server(tiny, tmp_path_factory.mktemp("logs"), *words)
    try:
        pids = [server.wait_ready().process.pid, *(child.pid for child in server.children())]
        yield Peer(server.url, vocab_size=VOCAB, eos_id=EOS, pids=pids)
    finally:
        server.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_case_holds_and_the_server_lives(peer: Peer, name: str) -> None:
    (each,) = cases.choose(name, slow=True)
    assert each.settings == "plain"
    each.run(peer)
    peer.expect_alive()
    assert all(psutil.pid_exists(process.pid) for process in peer.processes)
