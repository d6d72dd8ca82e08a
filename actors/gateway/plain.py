"""This file reads requests of the plainest form, at a fraction of what all of HTTP costs.

It is for a house that is full: who must be refused should cost next to nothing, so that those who
are being served do not notice. It does not know why, nor sockets.
Law: what is not of that form to the last byte is None here, and left to who reads all of HTTP. A
request is plain when it is a POST of HTTP/1.1 that has come as a whole with nothing behind it, its
body is of a stated length, and no header asks for more than an answer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

HEAD_BYTES_MAX = 8 << 10
# What frames the message in another way, changes the protocol, is for a web page or for a stream
# that has begun already.
NOT_PLAIN = frozenset(
    {b"transfer-encoding", b"expect", b"upgrade", b"origin", b"last-event-id", b"content-encoding"}
)
ONCE = frozenset(
    {b"host", b"content-length", b"connection", b"authorization", b"x-api-key", b"x-request-id"}
)
NAME = b"abcdefghijklmnopqrstuvwxyz0123456789-_"  # what a header's name is made of
VALID = b"\t\r\n" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))


class Plain(NamedTuple):
    path: str
    headers: dict[bytes, bytes]  # by their names in small letters
    closes: bool  # the connection ends with the answer


def read_plain(data: bytes, paths: Collection[bytes]) -> Plain | None:
    """A request to one of `paths`."""
    end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
    if end < 0 or not data.startswith(b"POST "):
        return None
    head = data[:end]
    if head.translate(None, VALID):
        return None
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ")
    if len(words) != 3 or words[1] not in paths or words[2] != b"HTTP/1.1":
        return None
    headers: dict[bytes, bytes] = {}
    for line in lines[1:]:
        name, mark, value = line.partition(b":")
        name = name.lower()
        if not mark or not name or name.strip(NAME) or b"\n" in value or b"\r" in value:
            return None
        if name in NOT_PLAIN or (name in ONCE and name in headers):
            return None
        headers[name] = value.strip(b" \t")
    connection = headers.get(b"connection", b"keep-alive").lower()
    length = headers.get(b"content-length", b"")
    if b"host" not in headers or connection not in (b"keep-alive", b"close"):
        return None
    if not length.isdigit() or len(length) > 9 or int(length) != len(data) - end - 4:
        return None
    return Plain(words[1].decode("ascii"), headers, connection == b"close")
