"""Public bug reports, asked of a real server with a random model, as `bench cases` does.

Those that need a model that speaks, or that measure times, are for the bench; docs/cases.md says
where each is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest

from bench import cases
from bench.cases import asking
from bench.cases.asking import Peer
from bench.cases.table import SETTINGS
from tests.house.server import WAIT_S, Server
from tests.house.tiny import VOCAB

NAMES = ("B035", "B043", "B045", "B047", "B051", "B073", "B143", "B151", "B153", "B161")
EOS = 2


@pytest.fixture(scope="module")
def peer(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    words = ("--placement", "inline", *SETTINGS["plain"])
    server = Server(tiny, tmp_path_factory.mktemp("logs"), *words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "ALIVE_S", WAIT_S)  # how soon is for the bench
        patch.setattr(asking, "IDLE_S", WAIT_S)
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


def test_health_answers_while_prompts_are_cut_and_computed(peer: Peer) -> None:
    """B093, B169: in a thread of its own, so that no size of a prompt holds up anything else."""
    near = peer.comp_body([300] * (peer.context_len - 8), max_tokens=2)
    texts = ("a" * 1_000_000, "\u4e00" * 300_000, " " * 1_000_000, "word " * 1_000_000)
    bodies = [near] * 32 + [peer.comp_body(text, max_tokens=2) for text in texts]
    with ThreadPoolExecutor(len(bodies)) as pool:
        asked = [pool.submit(peer.post, "/v1/completions", body) for body in bodies]
        healths = [peer.get("/health").status]
        while wait(asked, 0.02).not_done:
            healths.append(peer.get("/health").status)
        statuses = [future.result().status for future in asked]
    assert set(healths) == {200}
    assert statuses == [200] * 32 + [400] * len(texts)
    peer.expect_idle()
