"""This file reads the input of a batch, and writes the lines of its output.

It does not know files, disks or how a line is run. Law: whatever the bytes, the result is lines or
errors that name a line, never both, at a cost linear in the length of the input.
"""

from __future__ import annotations

import re

import msgspec

from actors.gateway.batches.store import Line
from messages.batches import BatchError, BatchLine, LineError, LineResponse, LineResult

LINES_MAX = 50_000
ERRORS_MAX = 100
BLANK = re.compile(rb"\s*")


def read_lines(content: bytes, endpoint: str) -> tuple[list[Line], list[BatchError]]:
    lines: list[Line] = []
    errors: list[BatchError] = []
    seen: set[str] = set()
    for index, text in enumerate(content.split(b"\n"), start=1):
        if BLANK.fullmatch(text):
            continue
        if len(errors) == ERRORS_MAX:
            break
        if len(lines) == LINES_MAX:
            message = f"A batch may have at most {LINES_MAX} requests."
            errors.append(BatchError(code="too_many_tasks", message=message, line=index))
            break
        found = read_line(text, endpoint, index)
        if isinstance(found, BatchError):
            errors.append(found)
        elif found.custom_id in seen:
            message = "The `custom_id` of a line is used by another one."
            errors.append(
                BatchError(
                    code="duplicate_custom_id", message=message, param="custom_id", line=index
                )
            )
        else:
            seen.add(found.custom_id)
            lines.append(Line(len(lines), found.custom_id, bytes(found.body)))
    if not lines and not errors:
        errors.append(BatchError(code="empty_file", message="The input file has no requests."))
    return ([], errors) if errors else (lines, [])


def read_line(text: bytes, endpoint: str, index: int) -> BatchLine | BatchError:
    try:
        line = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = re.sub(r" - at `.*`$", "", str(error)).replace("`", "")
        message = f"The line is not a request: {reason}."
        return BatchError(code="invalid_json_line", message=message, line=index)
    if line.url != endpoint:
        message = f"The `url` of a line must be the batch's endpoint, `{endpoint}`."
        return BatchError(code="mismatched_endpoint", message=message, param="url", line=index)
    if not bytes(line.body).startswith(b"{"):
        message = "The `body` of a line must be an object."
        return BatchError(code="invalid_request", message=message, param="body", line=index)
    return line


def answered(line_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    response = LineResponse(status_code=status, request_id=request_id, body=msgspec.Raw(body))
    return msgspec.json.encode(
        LineResult(id=line_id, custom_id=custom_id, response=response, error=None)
    )


def not_run(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    error = LineError(code=code, message=message)
    return msgspec.json.encode(
        LineResult(id=line_id, custom_id=custom_id, response=None, error=error)
    )


_decoder = msgspec.json.Decoder(BatchLine)
