"""This file is the one place that says how a failure looks to a client: status, type, code, param.

It does not know what failed: it is given a `Problem`, or a refusal that HTTP itself makes.
Law: every error of every route, plain or inside a stream, is one JSON object
`{"error": {"message", "type", "param", "code"}}`, or what the route's dialect has for it; its
message names no path, class or traceback.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from messages.anthropic import AnthropicError, AnthropicErrorReply
from messages.ollama import OllamaErrorReply
from messages.openai import Error, ErrorReply
from messages.types import Fault, Problem

STATUS = {
    Fault.INVALID: 400,
    Fault.NOT_FOUND: 404,
    Fault.TOO_LARGE: 413,
    Fault.OVERLOADED: 503,
    Fault.UNAVAILABLE: 503,
    Fault.INTERNAL: 500,
}
TYPE = {
    Fault.INVALID: "invalid_request_error",
    Fault.NOT_FOUND: "invalid_request_error",
    Fault.TOO_LARGE: "invalid_request_error",
    Fault.OVERLOADED: "overloaded_error",
    Fault.UNAVAILABLE: "service_unavailable_error",
    Fault.INTERNAL: "server_error",
}
CODE = {
    Fault.TOO_LARGE: "request_too_large",
    Fault.OVERLOADED: "overloaded",
    Fault.UNAVAILABLE: "unavailable",
    Fault.INTERNAL: "internal_error",
}
# Refusals that only HTTP knows, by status.
HTTP_CODE = {
    400: "bad_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
}


class Refused(Exception):
    """The call cannot be served; `problem` is what its client shall read."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class Answer(NamedTuple):
    """An error as HTTP sends it."""

    status: int
    body: bytes
    retry_after_s: int | None = None


def invalid(message: str, param: str | None, code: str | None = None) -> Refused:
    """The request is wrong, and `param` says where."""
    return Refused(Problem(fault=Fault.INVALID, message=message, param=param, code=code))


def unavailable(message: str, *, code: str | None = None) -> Problem:
    """A part is down or leaving; the client may try again."""
    return Problem(fault=Fault.UNAVAILABLE, message=message, code=code, retry_after_s=1.0)


# A field in a message: in quotes, or bare where nothing else is spelt so.
FIELD = re.compile(r"`(?P<path>[^`]+)`|\b[a-z]+_[a-z_]+\b")


def respelled(problem: Problem, spelling: Mapping[str, str]) -> Problem:
    """As a dialect says it that spells our fields so. A place within a field is kept
    where the dialect has that field somewhere else, and dropped where it has another one."""
    if not spelling:
        return problem

    def spelled(path: str) -> str:
        first = re.split(r"[.\[]", path, maxsplit=1)[0]
        name = spelling.get(first)
        if name is None:
            return path
        return name + path[len(first) :] if name.endswith(first) else name

    def spelled_in(match: re.Match[str]) -> str:
        path = match["path"]
        return spelling.get(match[0], match[0]) if path is None else f"`{spelled(path)}`"

    param = None if problem.param is None else spelled(problem.param)
    message = FIELD.sub(spelled_in, problem.message)
    return msgspec.structs.replace(problem, param=param, message=message)


CLOSING = unavailable("The server is shutting down.")


def answer(problem: Problem) -> Answer:
    """The plain response of a failure."""
    retry_after_s = problem.retry_after_s
    if retry_after_s is None and STATUS[problem.fault] == 503:
        retry_after_s = 1.0
    return Answer(
        STATUS[problem.fault],
        body(problem),
        None if retry_after_s is None else max(1, math.ceil(retry_after_s)),
    )


def answer_http(status: int, message: str) -> Answer:
    """A refusal that HTTP itself makes: unknown path, wrong method, time-out, encoding."""
    code = HTTP_CODE.get(status)
    error = Error(message=message, type="invalid_request_error", code=code)
    return Answer(status, msgspec.json.encode(ErrorReply(error=error)))


def body(problem: Problem) -> bytes:
    """The error object; inside a stream it is the data of one event."""
    error = Error(
        message=problem.message,
        type=TYPE[problem.fault],
        param=problem.param,
        code=problem.code or CODE.get(problem.fault),
    )
    return msgspec.json.encode(ErrorReply(error=error))


# The same in other dialects, which a path belongs to


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def is_ollama(path: str) -> bool:
    return path.startswith("/api/")


def voiced(path: str, status: int, body: bytes) -> tuple[int, bytes]:
    """An error of OpenAI's shape as the dialect of `path` has it."""
    if is_anthropic(path):
        error = msgspec.json.decode(body, type=ErrorReply).error
        return anthropic_status(status, error), anthropic_body(status, error)
    if is_ollama(path):
        error = msgspec.json.decode(body, type=ErrorReply).error
        return status, ollama_body(error.message)
    return status, body


ANTHROPIC_TYPE = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def anthropic_status(status: int, error: Error) -> int:
    return 529 if status == 503 and error.type == TYPE[Fault.OVERLOADED] else status


def anthropic_body(status: int, error: Error) -> bytes:
    """The field goes before the message, as there is no other place for it."""
    status = anthropic_status(status, error)
    kind = ANTHROPIC_TYPE.get(status, "invalid_request_error" if status < 500 else "api_error")
    message, param = error.message, error.param
    if param and param not in message:
        message = f"{param}: {message}"
    return msgspec.json.encode(
        AnthropicErrorReply(error=AnthropicError(type=kind, message=message))
    )


def anthropic_problem(problem: Problem) -> bytes:
    """Inside a stream."""
    error = msgspec.json.decode(body(problem), type=ErrorReply).error
    return anthropic_body(STATUS[problem.fault], error)


def ollama_body(message: str) -> bytes:
    """The same inside a stream."""
    return msgspec.json.encode(OllamaErrorReply(error=message))
