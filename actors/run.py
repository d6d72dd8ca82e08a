"""This file brings a tree up and takes it down: settle the settings, start, wait, drain, stop.

It does not know what the actors do, nor how anything is shown: whoever calls it hands in `show`.
Used by the command line (`serve`) and by `actors/engine.py`. Law: once the tree was started it is
stopped before `serve` returns, but for a second signal, which ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from actors import plugins, source, tree
from actors.resolve import Machine, Settled, resolve
from actors.runtime.log import Logs, make_run_log_dir
from actors.runtime.system import MAIN, StartFailed, System
from actors.settings import FLAGS, SettingsError
from messages.config import Config, GatewayConfig
from messages.system import Cause, Reason, State

Show = Callable[[str], None]
SHOW_EVERY_S = 0.1
SLOW_S = 1.0
STOPPED, FAILED = 0, 1


class CannotListen(Exception):
    """The address is not to be had. The message names it, and says what can be done."""


def settle(config: Config, show: Show) -> Settled:
    """Finds the model (fetching it if need be), a directory for the run's logs, and a port.

    Raises: SettingsError or source.SourceError, the user's fault: a name that no seam has, a file
    that is not to be read, no such model, or it is incomplete; CannotListen, found before anything
    that takes time.
    """
    check_names(config)
    if config.gateway.http:
        check_files(config.gateway)
        check_address(config.gateway.host, config.gateway.port)
    found = source.locate(config.model.path, show, weights=config.model.load_format != "dummy")
    return resolve(
        config,
        Machine(
            core_count=core_count(),
            model_path=str(found.path),
            model_name=found.name,
            log_dir=str(make_run_log_dir(Path(config.log.dir) if config.log.dir else None)),
            free_port=free_port(config.gateway.host) if config.gateway.http else 0,
            drawn_seed=secrets.randbelow(2**31 - 1) + 1,
            gpu_count=gpu_count(),
        ),
    )


def check_names(config: Config) -> None:
    """Raises SettingsError where a setting names what is neither built in nor installed."""
    for key, why in plugins.unknown(config):
        flag = next(flag.flag for flag in FLAGS if flag.key == key)
        raise SettingsError(f"{flag}: {why}")


def check_files(gateway: GatewayConfig) -> None:
    """Raises SettingsError where a file that the gateway will need cannot be used."""
    for flag, path in (
        ("--api-key-file", gateway.api_key_file),
        ("--admin-key-file", gateway.admin_key_file),
        ("--tls-cert", gateway.tls_cert),
        ("--tls-key", gateway.tls_key),
    ):
        if path and not os.access(path, os.R_OK):
            raise SettingsError(f"{flag} {path}: it cannot be read")
    for variable in ("HISTRIO_API_KEYS", "HISTRIO_ADMIN_KEYS"):
        if not os.environ.get(variable, "any").strip(" ,\n"):
            raise SettingsError(f"{variable} is set and holds no key: unset it, or give one")
    if gateway.batch_dir:
        try:
            Path(gateway.batch_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SettingsError(f"--batch-dir {gateway.batch_dir}: {error.strerror}") from None
        if not os.access(gateway.batch_dir, os.W_OK):
            raise SettingsError(f"--batch-dir {gateway.batch_dir}: it cannot be written to")
    if gateway.tls_key and not gateway.tls_cert:
        raise SettingsError("--tls-key needs --tls-cert")
    if gateway.tls_cert:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(gateway.tls_cert, gateway.tls_key or None)
        except OSError as error:
            reason = error.strerror or "not a certificate with its key"
            raise SettingsError(f"--tls-cert {gateway.tls_cert}: {reason}") from None


def check_address(host: str, port: int) -> None:
    """Raises CannotListen where the gateway could not listen now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        advice = {
            errno.EADDRINUSE: "stop what listens there, or choose another --port",
            errno.EACCES: "choose a --port above 1023",
        }.get(getattr(error, "errno", 0), "choose another --host or --port")
        raise CannotListen(f"cannot listen on {host}:{port}: {reason}; {advice}") from None


def core_count() -> int:
    """Cores that this process may use; a container's quota counts, rounded up."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        if quota != "max":
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def gpu_count() -> int:
    """NVIDIA devices of this machine; asking torch would take a second and half a gigabyte."""
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:  # the gateway will say what is wrong with the host
            return 0
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def build(config: Config, *, terminal: TextIO | None = None) -> Iterator[System]:
    """The system of a settled config, not started; call it on the loop that will be the root's.

    Its log goes to the run's directory. With a `terminal` this is a program of its own, not a part
    of one: the log is shown there too, and takes what libraries say.
    """
    root, nodes = tree.build(config)
    runtime = config.runtime
    logs = Logs(
        node=MAIN,
        directory=Path(config.log.dir),
        level=config.log.level,
        terminal=terminal,
        file_bytes_max=config.log.file_bytes_max,
        files_max=config.log.files_max,
    )
    if terminal is not None:
        logs.adopt_stdlib()
    system = System(
        root,
        nodes=nodes,
        seed=runtime.seed,
        encode_always=runtime.encode_always,
        heartbeat_s=runtime.heartbeat_s,
        hang_s=runtime.hang_s,
        log=logs.log_for(),
        log_dir=Path(config.log.dir),
        log_level=config.log.level,
        log_terminal=terminal is not None,
        log_file_bytes_max=config.log.file_bytes_max,
        log_files_max=config.log.files_max,
        check=runtime.check,
        spares=runtime.spares or runtime.hot_spare,
        spare_after_s=runtime.spare_after_s,
    )
    try:
        yield system
    finally:
        logs.close()


async def start(system: System, show: Show) -> None:
    """Starts all actors, showing each as it comes into service. Raises StartFailed."""
    watching = asyncio.ensure_future(show_start(system, show))
    try:
        await system.start()
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def show_start(system: System, show: Show) -> None:
    """Until cancelled. A poll, but only while starting: nothing of it is left in service."""
    seen: dict[str, tuple[float, State | None]] = {}
    try:
        while True:
            show_changes(system, seen, show)
            await asyncio.sleep(SHOW_EVERY_S)
    finally:
        show_changes(system, seen, show)


def show_changes(system: System, seen: dict[str, tuple[float, State | None]], show: Show) -> None:
    """One line for each actor that came into service since the last call, and one for each that
    takes its time. `seen`: since when, and what was last said."""
    now_s = time.monotonic()
    for row in system.actors():
        since_s, said = seen.get(row.path, (now_s, None))
        if row.state is State.RUNNING and said is not State.RUNNING:
            said = State.RUNNING
            show(f"{row.path} is up ({now_s - since_s:.1f} s, {row.node}, pid {row.pid})")
        elif row.state is State.STARTING and said is None and now_s - since_s >= SLOW_S:
            said = State.STARTING
            show(f"{row.path} is starting")
        seen[row.path] = since_s, said


async def serve(config: Config, show: Show, ready: Callable[[], None]) -> int:
    """Runs the tree until a signal, or until it gives up. Returns the exit code."""
    with build(config, terminal=sys.stderr) as system, signals() as first:
        starting = asyncio.ensure_future(start(system, show))
        await either(starting, first)
        if not starting.done():
            show("interrupted while starting")
            starting.cancel()
            await asyncio.wait({starting})
            await system.stop()
            return 128 + first.result()
        try:
            starting.result()
        except StartFailed as failure:
            show(f"{failure.path} did not start: {explained(failure.reason)}")
            return FAILED
        system.freeze()
        ready()
        return await serve_until_end(system, config, first, show)


async def serve_until_end(
    system: System, config: Config, first: asyncio.Future[int], show: Show
) -> int:
    ended = asyncio.ensure_future(system.wait())
    await either(ended, first)
    if ended.done():
        show(f"gave up: {explained(ended.result())}")
        await system.stop()
        return FAILED
    show(f"draining, for {config.runtime.drain_s:g} s at most (once more to end at once)")
    await system.drain(config.runtime.drain_s)
    await system.stop()
    await asyncio.wait({ended})
    show("stopped")
    return STOPPED


async def either(one: asyncio.Future[Any], other: asyncio.Future[Any]) -> None:
    """Until one of the two is done."""
    await asyncio.wait({one, other}, return_when=asyncio.FIRST_COMPLETED)


@contextlib.contextmanager
def signals() -> Iterator[asyncio.Future[int]]:
    """The first SIGINT or SIGTERM completes the future; the second ends the process at once.

    Children die with their parent, so nothing needs to be told to them. The handlers stay: whoever
    calls this ends the process soon after, and until its very end a second signal means the same.
    (Those of a loop would be taken back with it, and leave the system's default.)
    """
    loop = asyncio.get_running_loop()
    first: asyncio.Future[int] = loop.create_future()
    is_told = False

    def arrived(number: int, frame: object) -> None:
        nonlocal is_told
        if is_told:
            os._exit(128 + number)
        is_told = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to drain
            loop.call_soon_threadsafe(first.set_result, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, arrived)
    yield first


def explained(reason: Reason) -> str:
    """A death as a person reads it, the cause last.

    Of a process that ended, its last lines are all that is known. The traceback of an actor is for
    whoever mends it: the log has it.
    """
    text = reason.detail or reason.cause.value
    if reason.signal is not None:
        text += f" (signal {reason.signal})"
    elif reason.exit_code is not None:
        text += f" (exit code {reason.exit_code})"
    if reason.cause is Cause.CRASHED:
        return text
    return "\n".join([*(f"  {line}" for line in reason.last_lines), text])
