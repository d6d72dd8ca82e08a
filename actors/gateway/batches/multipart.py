"""This file takes a multipart/form-data body apart.

It does not know what the parts are for. Laws: the cost is linear in the length of the body;
whatever the bytes, the result is parts or `Refused`.
"""

from __future__ import annotations

from email.message import Message
from typing import NamedTuple

from actors.gateway.errors import invalid

PARTS_MAX = 32
HEAD_BYTES_MAX = 8192


class Part(NamedTuple):
    name: str
    filename: str | None
    content: bytes


def boundary_of(content_type: str) -> bytes:
    """Raises Refused where it is none of ours."""
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_param("boundary")
    is_form = message.get_content_type() == "multipart/form-data"
    if not is_form or not isinstance(boundary, str) or not 0 < len(boundary) <= 200:
        raise invalid("The body must be a form (`Content-Type: multipart/form-data`).", None)
    return boundary.encode("utf-8", "replace")


def split_form(body: bytes, boundary: bytes) -> list[Part]:
    """Raises Refused: the client's fault."""
    mark = b"\r\n--" + boundary
    start = len(mark) - 2
    if not body.startswith(mark[2:]):
        raise invalid("The form does not begin with its boundary.", None)
    parts: list[Part] = []
    while body[start : start + 2] != b"--":
        if body[start : start + 2] != b"\r\n":
            raise invalid("The form is malformed.", None)
        end = body.find(mark, start)
        if end < 0:
            raise invalid("The form has no end.", None)
        if len(parts) == PARTS_MAX:
            raise invalid(f"The form may have at most {PARTS_MAX} parts.", None)
        parts.append(split_part(body, start + 2, end))
        start = end + len(mark)
    return parts


def split_part(body: bytes, start: int, end: int) -> Part:
    blank = body.find(b"\r\n\r\n", start, min(end, start + HEAD_BYTES_MAX))
    if blank < 0:
        raise invalid("A part of the form has no head.", None)
    for line in body[start:blank].split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            message = Message()
            message["content-disposition"] = value.decode("utf-8", "replace").strip()
            name = message.get_param("name", header="content-disposition")
            filename = message.get_filename()
            if isinstance(name, str):
                return Part(name, filename, body[blank + 4 : end])
    raise invalid("A part of the form has no name.", None)
