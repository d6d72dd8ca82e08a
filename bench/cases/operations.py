"""This file has the cases of running a server: errors, sizes, slow senders, costly bodies."""

from __future__ import annotations

import gzip
import json
import socket
import time
from typing import Any

from bench.cases.asking import (
    CHAT,
    COMPLETION,
    Failed,
    Peer,
    Reply,
    Watch,
    each_at_once,
    expect,
    stream_beside,
)
from bench.cases.table import case

SOCKETS = 100
COMPILED_S = 15.0  # the grammar's time-out of this server, and some


@case("B157", "unknown model")
def unknown_model(peer: Peer) -> None:
    for path in (CHAT, COMPLETION):
        body = peer.chat_body("x") if path == CHAT else peer.comp_body("x")
        for stream in (False, True):
            for name in ("no-such-adapter", "", "../etc"):
                reply = peer.post(path, {**body, "model": name, "stream": stream})
                error = reply.expect_refused(404)
                expect(error["code"] == "model_not_found", error)
        del body["model"]
        peer.post(path, body).expect_refused(400, param="model")
    peer.get("/v1/models/nope").expect_refused(404)


@case("B099", "schemas that are costly to compile")
def costly_schemas(peer: Peer) -> None:
    def nested(depth: int) -> dict[str, Any]:
        if not depth:
            return {"type": "integer"}
        each = [{f"k{i}": nested(depth - 1)} for i in range(4)]
        return {"oneOf": [{"type": "object", "properties": part} for part in each]}

    wide = {f"p{i}": {"type": "string"} for i in range(5000)}
    item = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    costly = (
        nested(8),
        nested(6),
        {"type": "object", "properties": wide},
        {"type": "array", "maxItems": 100_000, "items": item},
    )
    with stream_beside(peer) as gaps:
        with Watch(peer) as watch:
            for reply in each_at_once(lambda value: ask_schema(peer, value), costly):
                expect(reply.status in (200, 400), f"status {reply.status}: {reply.raw[:200]!r}")
                expect(reply.seconds < COMPILED_S, f"an answer took {reply.seconds:.1f} s")
            good = ask_schema(peer, item)
            expect(good.status == 200, f"a good schema: {good.status}")
            expect(good.seconds < COMPILED_S, f"a good schema took {good.seconds:.1f} s")
        watch.expect_healthy(1.0)
    expect(max(gaps) < 2, f"the stream beside stood still for {max(gaps):.1f} s")


def ask_schema(peer: Peer, schema: dict[str, Any]) -> Reply:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return peer.chat("hi", max_tokens=20, response_format=form)


@case("B183", "very large body")
def large_body(peer: Peer) -> None:
    with Watch(peer) as watch:
        for size in (10 << 20, 60 << 20):
            raw = b'{"model":"' + b"x" * size
            try:
                reply = peer.post(CHAT, raw)
            except Failed:  # cut while it was still sending: as good as told
                continue
            reply.expect_refused(413)
        with peer.connect() as link:
            head = f"POST {peer.base}{CHAT} HTTP/1.1\r\nhost: x\r\n"
            head += "content-type: application/json\r\ncontent-length: 99999999999\r\n\r\n{"
            link.sendall(head.encode())
            answer = link.recv(4096)
            expect(b" 413 " in answer, f"Content-Length 99999999999: {answer[:60]!r}")
        bomb = gzip.compress(b" " * (50 << 20))
        reply = peer.request("POST", CHAT, bomb, content_encoding="gzip")
        expect(reply.status in (400, 413, 415), f"gzip bomb: {reply.status}")
    watch.expect_healthy(1.0)


@case("B185", "slow senders", settings="limits", slow=True)
def slow_senders(peer: Peer) -> None:
    before = peer.connection_count()
    head = f"POST {peer.base}{COMPLETION} HTTP/1.1\r\nhost: x\r\n".encode()
    body = head + b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
    slow_heads = [peer.connect() for _ in range(SOCKETS)]
    slow_bodies = [peer.connect() for _ in range(SOCKETS)]
    idle = [peer.connect() for _ in range(SOCKETS)]
    for link in slow_heads:
        link.sendall(head[:20])
    for link in slow_bodies:
        link.sendall(body)
    until_s = time.monotonic() + 12
    at = 20
    while time.monotonic() < until_s:
        time.sleep(1)
        at += 1
        for link in slow_heads:
            send_one(link, head[at : at + 1])
        for link in slow_bodies:
            send_one(link, b" ")
        reply = peer.comp("x", max_tokens=1)
        reply.expect_ok()
        expect(reply.seconds < 5, f"a normal request took {reply.seconds:.1f} s")
    for name, links in (("headers", slow_heads), ("body", slow_bodies), ("nothing", idle)):
        left = sum(not is_ended(link) for link in links)
        expect(left == 0, f"{left} senders of {name} are still connected")
    for link in (*slow_heads, *slow_bodies, *idle):
        link.close()
    until_s = time.monotonic() + 10
    while peer.connection_count() > before + 3 and time.monotonic() < until_s:
        time.sleep(0.2)
    after = peer.connection_count()
    expect(after <= before + 3, f"{before} connections before, {after} after")


def send_one(link: socket.socket, data: bytes) -> None:
    try:
        link.sendall(data)
    except OSError:
        pass


def is_ended(link: socket.socket) -> bool:
    """Whether the server has ended the connection; reads what it said."""
    link.settimeout(0.2)
    try:
        while link.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@case("B189", "costly shapes of small bodies")
def costly_bodies(peer: Peer) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    name = peer.model.encode()
    bias = {str(token): 1 for token in range(peer.vocab_size)}
    turns = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(2001)]
    # Many parts of a short text: what they cost is reading them, not the model's work.
    parts = [{"type": "text", "text": text} for text in ("x", *[""] * 20_000)]
    with Watch(peer) as watch:
        for raw in (
            b'{"model":"' + name + b'","messages":' + deep + b"}",
            b'{"model":"' + name + b'","prompt":"x","zzz":' + deep + b"}",
            json.dumps(peer.chat_body("x", logit_bias=bias, max_tokens=1)).encode(),
            json.dumps({**peer.chat_body("x", max_tokens=1), "messages": turns}).encode(),
            json.dumps(peer.chat_body(parts, max_tokens=1)).encode(),
        ):
            for path in (CHAT, COMPLETION):
                reply = peer.post(path, raw)
                if reply.status != 200:
                    reply.expect_refused()
                expect(reply.seconds < 20, f"{raw[:60]!r} took {reply.seconds:.1f} s")
    watch.expect_healthy(1.0)


@case("B191", "errors have their status and shape")
def error_shapes(peer: Peer) -> None:
    peer.get("/v1/nonsense").expect_refused(404)
    peer.get("/nonsense").expect_refused(404)
    for path in (CHAT, COMPLETION):
        peer.get(path).expect_refused(405)
        peer.request("DELETE", path).expect_refused(405)
        peer.post(path, b"{not json").expect_refused(400)
        peer.post(path, b"").expect_refused(400)
    peer.request("POST", "/v1/models", b"{}").expect_refused(405)
    peer.request("POST", CHAT, b"x=1", content_type="application/x-www-form-urlencoded")
    with peer.connect() as link:
        link.sendall(b"\x00\x01nonsense\r\n\r\n")
        answer = link.recv(4096)
        expect(b" 400 " in answer, f"bytes that are no HTTP: {answer[:60]!r}")
