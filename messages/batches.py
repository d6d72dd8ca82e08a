"""This file holds the public HTTP schemas of OpenAI's files and batches.

It does not know how they are kept or run (`actors/gateway/batches/`, `actors/gateway/doors/`); only
the gateway imports it. The rules are those of `messages/openai.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from messages.openai import NOT_GIVEN

ExpireSeconds = Annotated[int, msgspec.Meta(ge=3600, le=2_592_000)]


class FileObject(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class ExpiresAfter(msgspec.Struct, kw_only=True, frozen=True):
    anchor: Literal["created_at"]
    seconds: ExpireSeconds


class BatchBody(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None  # of the files that the batch makes


class BatchLine(msgspec.Struct, kw_only=True, frozen=True):
    """One line of an input file."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: str
    body: msgspec.Raw = NOT_GIVEN


class BatchError(msgspec.Struct, kw_only=True, frozen=True):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class Counts(msgspec.Struct, kw_only=True, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class BatchObject(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class LineResponse(msgspec.Struct, kw_only=True, frozen=True):
    status_code: int
    request_id: str
    body: Any


class LineError(msgspec.Struct, kw_only=True, frozen=True):
    code: str
    message: str


class LineResult(msgspec.Struct, kw_only=True, frozen=True):
    """One line of an output or an error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None
