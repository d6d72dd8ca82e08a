"""What the tests of the whole house share: a tiny model on disk, and real servers over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.house.server import ROOT, Server
from tests.house.tiny import make_model


@pytest.fixture(scope="session", autouse=True)
def one_authority() -> Iterator[None]:
    """Every HTTP client reads the certificates of all authorities before it asks for a plain page:
    most of what a test costs. Here they are one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(ROOT / "tests/gateway/tls/cert.pem"))
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random Llama."""
    return make_model(tmp_path_factory.mktemp("house") / "tiny-llama")


@pytest.fixture
def serve(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers that end with the test: `serve("--placement", "inline")`."""
    servers: list[Server] = []

    def start(*words: str, model: Path = tiny, **options: Any) -> Server:
        servers.append(Server(model, tmp_path / f"logs-{len(servers)}", *words, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module", params=["inline", "threads", "processes"])
def server(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One running server in each placement, shared by the tests of a module."""
    found = Server(tiny, tmp_path_factory.mktemp("logs"), "--placement", request.param)
    try:
        yield found.wait_ready()
    finally:
        found.close()
