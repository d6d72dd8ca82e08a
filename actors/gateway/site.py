"""This file listens: the socket, and uvicorn's connections with the time limits they lack.

It does not know routes; `http.py` is the application. It takes uvicorn's connections but not its
server, which polls ten times a second and takes the process's signals.
Laws: a connection that sends nothing, sends its headers too slowly, or does not read what is left
when it ends, is cut after the settings' time; nothing here runs while nothing happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import resource
import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from h11 import IDLE
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from actors.gateway.access import Access, KeysWrong, read_keys
from actors.gateway.doors.full import Away, Full
from actors.gateway.errors import answer_http
from actors.gateway.http import App
from messages.config import GatewayConfig

if TYPE_CHECKING:
    from actors.gateway.actor import Gateway

BACKLOG = 2048
# Two thousand clients at once, taken in one turn, stopped the loop for longer than a node may be
# silent, and the gateway was killed for it.
ACCEPTS_A_TURN = 16
PEEK_BYTES = 64 << 10  # of a request that has come with its connection
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
RETRY_S = 1.0
HEADER_BYTES_MAX = 64 << 10
CLOSE_GRACE_S = 2.0
FILES_BESIDE = 1024  # idle connections, links, logs


LOOPBACK = ("127.", "::1", "localhost")


def access_of(config: GatewayConfig) -> Access:
    """Keys from files and the environment. Raises KeysWrong."""
    return Access(
        keys_of(config.api_key_file, "HISTRIO_API_KEYS"),
        keys_of(config.admin_key_file, "HISTRIO_ADMIN_KEYS"),
        metrics_open=config.metrics_open,
    )


def keys_of(path: str, variable: str) -> tuple[str, ...]:
    keys: tuple[str, ...] = ()
    if path:
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise KeysWrong(f"{path}: {reason}") from None
        keys += read_keys(text, path)
    if variable in os.environ:
        keys += read_keys(os.environ[variable], variable)
    return keys


def raise_file_limit(wanted: int) -> None:
    """Each connection is an open file, and many systems begin with 1,024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def tls_of(config: GatewayConfig) -> ssl.SSLContext | None:
    """Raises OSError (ssl.SSLError too) where the files cannot be used."""
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(config.tls_cert, config.tls_key or None)
    return context


class Times(NamedTuple):
    header_s: float
    keep_alive_s: float


class Connection(H11Protocol):
    """uvicorn's connection, with the time limits that it lacks: for the headers, and for a client
    that does not read what is left when its connection ends."""

    def __init__(
        self,
        times: Times,
        config: Config,
        server_state: ServerState,
        turn_away: Callable[[bytes], Away | None],
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state={})
        self.times = times
        self.turn_away = turn_away
        self.header_timer: asyncio.TimerHandle | None = None
        self.end_timer: asyncio.TimerHandle | None = None

    @property
    def is_between(self) -> bool:
        """No request is being served."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio only does this for sockets made with an explicit protocol. Without it a response
        # in two writes waits some 40 ms for the client's delayed acknowledgement.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.app_state = {"abort": transport.abort, "piece": self.write_piece}
        self.arm_header_timer()

    def write_piece(self, body: bytes) -> bool:
        """Part of a chunked body that has begun, past the layers that would frame it at five times
        the cost. False: the client has not taken what was written before."""
        cycle = self.cycle
        if cycle is not None and not cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return not self.flow.write_paused

    def connection_lost(self, exc: Exception | None) -> None:
        self.disarm_header_timer()
        if self.end_timer is not None:
            self.end_timer.cancel()
            self.end_timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_free and (away := self.turn_away(data)) is not None:
            self.end_away(away)
            return
        super().data_received(data)
        if not self.is_between:
            self.disarm_header_timer()
        elif self.header_timer is None:
            self.arm_header_timer()

    @property
    def is_free(self) -> bool:
        """Nothing is being served, and what comes now is the beginning of a request."""
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        is_idle = self.conn.their_state is IDLE and not self.conn.trailing_data[0]
        return is_idle and not (self.flow.write_paused or self.transport.is_closing())

    def end_away(self, away: Away) -> None:
        """A whole request has come, and this is the answer."""
        self.disarm_header_timer()
        self._unset_keepalive_if_required()
        self.transport.write(away.data)
        if away.closes:
            self.transport.close()
            self.end_in_time()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.end_in_time()
        elif self.is_between and self.conn.trailing_data[0] and self.header_timer is None:
            self.arm_header_timer()  # the next request has begun to arrive already

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def arm_header_timer(self) -> None:
        self.header_timer = self.loop.call_later(self.times.header_s, self.end_headers_late)

    def disarm_header_timer(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def end_headers_late(self) -> None:
        self.header_timer = None
        if self.is_between and not self.transport.is_closing():
            self.refuse_raw(408, "The request did not arrive in time.")

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are not HTTP."""
        if self.is_between:
            self.refuse_raw(400, "This is not a valid HTTP request.")
        else:
            self.transport.close()

    def refuse_raw(self, status: int, message: str) -> None:
        """Answers without a request, and ends the connection."""
        body = answer_http(status, message).body
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        self.end_in_time()

    def end_in_time(self) -> None:
        """It is closing, and ends now also if the client does not take what is left."""
        if self.end_timer is None:
            self.end_timer = self.loop.call_later(self.times.keep_alive_s, self.transport.abort)


class Listener:
    """The listening socket: a helping of those who come each turn of the loop.

    While the house is full, a request that has come with its connection is answered before asyncio
    knows of either: most of what a refusal costs would be the making of the connection.
    """

    def __init__(
        self, bound: socket.socket, full: Full, make: Callable[[], Connection], **options: Any
    ) -> None:
        self.bound = bound
        self.full = full
        self.make = make
        self.options = options  # of TLS
        self.loop = asyncio.get_running_loop()
        self.is_plain = options.get("ssl") is None
        self.greetings: set[asyncio.Task[None]] = set()  # connections that are being made
        self.retry: asyncio.TimerHandle | None = None
        self.open()

    def open(self) -> None:
        self.retry = None
        self.loop.add_reader(self.bound, self.accept)

    def close(self) -> None:
        """Harmless a second time."""
        if self.bound.fileno() < 0:
            return
        if self.retry is not None:
            self.retry.cancel()
        self.loop.remove_reader(self.bound)
        self.bound.close()
        for greeting in self.greetings:
            greeting.cancel()

    def accept(self) -> None:
        is_full = self.is_plain and self.full.is_full
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = self.bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                # It stays readable, and would be tried again in every turn.
                self.loop.remove_reader(self.bound)
                self.retry = self.loop.call_later(RETRY_S, self.open)
                return
            sock.setblocking(False)
            if is_full and self.ends_away(sock):
                sock.close()
                continue
            greeting = self.loop.create_task(self.greet(sock))
            self.greetings.add(greeting)
            greeting.add_done_callback(functools.partial(self.greeted, sock))

    def ends_away(self, sock: socket.socket) -> bool:
        """Whether it is answered already, and the connection ends with that."""
        try:
            data = sock.recv(PEEK_BYTES, socket.MSG_PEEK)
        except OSError:  # nothing has come yet, or it has left
            return False
        away = self.full.turn_away(data)
        if away is None:
            return False
        try:
            sock.recv(len(data))
            is_sent = sock.send(away.data) == len(away.data)
        except OSError:
            return True
        return away.closes or not is_sent

    async def greet(self, sock: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(self.make, sock, **self.options)
        except OSError:  # a client that has left, is late, or speaks no TLS
            sock.close()

    def greeted(self, sock: socket.socket, greeting: asyncio.Task[None]) -> None:
        self.greetings.discard(greeting)
        if greeting.cancelled():
            sock.close()


class Site:
    """The listening socket, and the connections it has made."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.app = App(gateway, access_of(gateway.config))
        self.state = ServerState()
        self.listener: Listener | None = None

    async def open(self) -> tuple[str, int]:
        """Binds, and serves from now on. Returns where. Raises OSError that names the address."""
        config = self.gateway.config
        tls = tls_of(config)
        raise_file_limit(config.open_max + FILES_BESIDE)
        if self.app.access.is_open and not config.host.startswith(LOOPBACK):
            self.gateway.context.log.warning("anyone who reaches this address may use it: no keys")
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            bound = socket.create_server(
                (config.host, config.port),
                family=family,
                backlog=BACKLOG,
                reuse_port=config.shares_port,  # the kernel deals connections out
            )
        except OSError as error:
            where = f"{config.host}:{config.port}"
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(error.errno, f"cannot listen on {where}: {reason}") from error
        uvicorn = Config(
            self.app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=max(1, round(config.keep_alive_s)),
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
        )
        uvicorn.load()
        times = Times(config.header_timeout_s, config.keep_alive_s)
        bound.setblocking(False)
        host, port = bound.getsockname()[:2]
        try:
            await self.app.batches.open()
        except BaseException:
            bound.close()
            raise
        # Nothing waits from here until the gateway is in service: a call taken before that would
        # never hear from the tokenizer. Who connects earlier waits in the kernel's queue.
        self.listener = Listener(
            bound,
            self.app.full,
            lambda: Connection(times, uvicorn, self.state, self.app.full.turn_away),
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else max(0.1, config.header_timeout_s),
        )
        return host, port

    async def close(self) -> None:
        """Stops listening, lets the responses that have their end go out, then cuts the rest."""
        if self.listener is None:
            return
        self.listener.close()
        for connection in list(self.state.connections):
            connection.shutdown()
        await self.app.batches.close()
        if self.state.tasks:
            await asyncio.wait(self.state.tasks, timeout=CLOSE_GRACE_S)
        self.cut()

    def cut(self) -> None:
        """Stops listening and ends every connection at once."""
        self.app.full.close()
        self.app.batches.cut()
        self.app.resumes.close()
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        for connection in list(self.state.connections):
            connection.transport.abort()
