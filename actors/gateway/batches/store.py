"""This file keeps files and batches on a disk: SQLite for facts, a folder for bytes.

It does not know HTTP, models or who runs what; time is an argument, and ids are given. All of it is
blocking: its owner calls it in a thread. Several processes may have it open.
Laws: a line's result is written at most once; what was written survives a crash at any point; a
batch's status only goes forward; a file is whole before it is known.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from messages.batches import (
    BatchBody,
    BatchError,
    BatchErrors,
    BatchObject,
    Counts,
    FileObject,
)

WINDOW_S = 24 * 3600
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, expires_at INTEGER);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    status TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, metadata TEXT, errors TEXT,
    output_seconds INTEGER, output_file_id TEXT, error_file_id TEXT, in_progress_at INTEGER,
    finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER,
    cancelling_at INTEGER, cancelled_at INTEGER, total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body BLOB NOT NULL,
    result BLOB, is_failed INTEGER, PRIMARY KEY (batch_id, number)) WITHOUT ROWID;
"""
RUNNABLE = ("validating", "in_progress", "finalizing", "cancelling")
TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at")
CANCEL_TIMES = ("cancelling_at", "cancelled_at")


class Line(NamedTuple):
    number: int
    custom_id: str
    body: bytes


class BatchStore:
    """Opens (and makes) the folder. Raises OSError or sqlite3.Error where it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.files_folder = folder / "files"
        self.files_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.base = sqlite3.connect(
            folder / "batches.sqlite3", timeout=30.0, isolation_level=None, check_same_thread=False
        )
        self.base.row_factory = sqlite3.Row
        self.base.execute("PRAGMA journal_mode = WAL")
        self.base.execute("PRAGMA synchronous = NORMAL")
        self.base.executescript(SCHEMA)

    def close(self) -> None:
        self.base.close()

    # Files

    def add_file(
        self,
        file_id: str,
        chunks: Iterable[bytes],
        *,
        filename: str,
        purpose: str,
        now_s: int,
        expires_at: int | None = None,
    ) -> FileObject:
        path = self.path_of(file_id)
        half = path.with_suffix(".part")
        total = 0
        with half.open("wb") as out:
            for chunk in chunks:
                out.write(chunk)
                total += len(chunk)
        half.replace(path)
        self.base.execute(
            "INSERT OR REPLACE INTO files (id, bytes, created_at, filename, purpose, expires_at)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (file_id, total, now_s, filename, purpose, expires_at),
        )
        found = self.file(file_id, now_s)
        assert found is not None
        return found

    def file(self, file_id: str, now_s: int) -> FileObject | None:
        self.purge(now_s)
        row = self.base.execute("SELECT * FROM files WHERE id = ?", (file_id,)).fetchone()
        return None if row is None else file_of(row)

    def files(
        self, now_s: int, *, after: str | None, limit: int, purpose: str | None, newest_first: bool
    ) -> list[FileObject]:
        """One more than `limit` where there are more."""
        self.purge(now_s)
        where, values = page_where("files", after, newest_first)
        if purpose is not None:
            where += " AND purpose = ?"
            values.append(purpose)
        order = "DESC" if newest_first else "ASC"
        rows = self.base.execute(
            f"SELECT * FROM files WHERE {where} ORDER BY number {order} LIMIT ?",
            (*values, limit + 1),
        )
        return [file_of(row) for row in rows]

    def usage(self) -> tuple[int, int]:
        """How many files, and their bytes."""
        row = self.base.execute("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files").fetchone()
        return row[0], row[1]

    def delete_file(self, file_id: str) -> bool:
        found = self.base.execute("DELETE FROM files WHERE id = ?", (file_id,)).rowcount > 0
        if found:
            self.path_of(file_id).unlink(missing_ok=True)
        return found

    def purge(self, now_s: int) -> None:
        """Deletes what has expired."""
        rows = self.base.execute("SELECT id FROM files WHERE expires_at <= ?", (now_s,)).fetchall()
        for row in rows:
            self.delete_file(row["id"])

    def path_of(self, file_id: str) -> Path:
        """Only for ids that we made: they are safe as names."""
        assert file_id.replace("-", "").isalnum(), file_id
        return self.files_folder / file_id

    # Batches

    def add_batch(self, batch_id: str, body: BatchBody, owner: str, now_s: int) -> BatchObject:
        after = body.output_expires_after
        self.base.execute(
            "INSERT INTO batches (id, owner, status, endpoint, input_file_id, created_at,"
            " expires_at, metadata, output_seconds) VALUES (?, ?, 'validating', ?, ?, ?, ?, ?, ?)",
            (
                batch_id,
                owner,
                body.endpoint,
                body.input_file_id,
                now_s,
                now_s + WINDOW_S,
                None if body.metadata is None else json.dumps(body.metadata),
                None if after is None else after.seconds,
            ),
        )
        return self.known(batch_id)

    def batch(self, batch_id: str) -> BatchObject | None:
        row = self.base.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return None if row is None else batch_of(row)

    def known(self, batch_id: str) -> BatchObject:
        found = self.batch(batch_id)
        assert found is not None, batch_id
        return found

    def batches(self, *, after: str | None, limit: int) -> list[BatchObject]:
        """The newest first; one more than `limit` where there are more."""
        where, values = page_where("batches", after, True)
        rows = self.base.execute(
            f"SELECT * FROM batches WHERE {where} ORDER BY number DESC LIMIT ?",
            (*values, limit + 1),
        )
        return [batch_of(row) for row in rows]

    def open_count(self) -> int:
        row = self.base.execute(
            "SELECT COUNT(*) FROM batches WHERE status IN (?, ?, ?, ?)", RUNNABLE
        ).fetchone()
        count: int = row[0]
        return count

    def adopt(self, owner: str, owners: tuple[str, ...]) -> None:
        """Takes over what belongs to nobody who is there."""
        marks = ", ".join("?" * len(owners))
        self.base.execute(
            f"UPDATE batches SET owner = ? WHERE owner NOT IN ({marks})", (owner, *owners)
        )

    def next_batch(self, owner: str) -> BatchObject | None:
        """The oldest that there is something to do for."""
        row = self.base.execute(
            "SELECT * FROM batches WHERE owner = ? AND status IN (?, ?, ?, ?)"
            " ORDER BY number LIMIT 1",
            (owner, *RUNNABLE),
        ).fetchone()
        return None if row is None else batch_of(row)

    def move(self, batch_id: str, before: tuple[str, ...], status: str, now_s: int) -> bool:
        """To another status, where it has one of `before`."""
        marks = ", ".join("?" * len(before))
        return (
            self.base.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?"
                f" WHERE id = ? AND status IN ({marks})",
                (status, now_s, batch_id, *before),
            ).rowcount
            > 0
        )

    def fail(self, batch_id: str, errors: list[BatchError], now_s: int) -> None:
        text = msgspec.json.encode(errors).decode()
        self.base.execute("BEGIN IMMEDIATE")
        with self.base:
            self.base.execute("UPDATE batches SET errors = ? WHERE id = ?", (text, batch_id))
            self.move(batch_id, ("validating",), "failed", now_s)

    def start(self, batch_id: str, lines: Iterable[Line], now_s: int) -> None:
        """The input is valid: its lines are kept, so that the file may go."""
        self.base.execute("BEGIN IMMEDIATE")
        with self.base:
            self.base.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
            self.base.executemany(
                "INSERT INTO lines (batch_id, number, custom_id, body) VALUES (?, ?, ?, ?)",
                ((batch_id, *line) for line in lines),
            )
            self.base.execute(
                "UPDATE batches SET total = (SELECT COUNT(*) FROM lines WHERE batch_id = id)"
                " WHERE id = ?",
                (batch_id,),
            )
            self.move(batch_id, ("validating",), "in_progress", now_s)

    def take_line(self, batch_id: str, after: int) -> Line | None:
        """The next line without a result behind `after`, while the batch runs."""
        row = self.base.execute(
            "SELECT l.number, l.custom_id, l.body FROM lines l JOIN batches b ON b.id = l.batch_id"
            " WHERE l.batch_id = ? AND l.number > ? AND l.result IS NULL"
            " AND b.status = 'in_progress' ORDER BY l.number LIMIT 1",
            (batch_id, after),
        ).fetchone()
        return None if row is None else Line(row[0], row[1], bytes(row[2]))

    def put_result(self, batch_id: str, number: int, result: bytes, *, is_failed: bool) -> None:
        """A second result of one line is dropped."""
        column = "failed" if is_failed else "completed"
        self.base.execute("BEGIN IMMEDIATE")
        with self.base:
            is_first = self.base.execute(
                "UPDATE lines SET result = ?, is_failed = ?"
                " WHERE batch_id = ? AND number = ? AND result IS NULL",
                (result, is_failed, batch_id, number),
            ).rowcount
            if is_first:
                self.base.execute(
                    f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (batch_id,)
                )

    def undone(self, batch_id: str) -> list[Line]:
        """Lines without a result; their bodies left out."""
        rows = self.base.execute(
            "SELECT number, custom_id FROM lines WHERE batch_id = ? AND result IS NULL"
            " ORDER BY number",
            (batch_id,),
        )
        return [Line(row[0], row[1], b"") for row in rows]

    def results(self, batch_id: str, *, is_failed: bool) -> Iterator[bytes]:
        rows = self.base.execute(
            "SELECT result FROM lines WHERE batch_id = ? AND result IS NOT NULL AND is_failed = ?"
            " ORDER BY number",
            (batch_id, is_failed),
        )
        for row in rows:
            yield bytes(row[0]) + b"\n"

    def finish(
        self, batch_id: str, status: str, output_id: str, error_id: str, now_s: int
    ) -> BatchObject:
        """Writes the files of what there is, and ends the batch. A crash within has it done again,
        with the same ids."""
        seconds = self.base.execute(
            "SELECT output_seconds FROM batches WHERE id = ?", (batch_id,)
        ).fetchone()[0]
        expires_at = None if seconds is None else now_s + seconds
        ids: list[str | None] = []
        for file_id, is_failed, name in ((output_id, 0, "output"), (error_id, 1, "error")):
            has_any = self.base.execute(
                "SELECT 1 FROM lines WHERE batch_id = ? AND is_failed = ? LIMIT 1",
                (batch_id, is_failed),
            ).fetchone()
            ids.append(file_id if has_any else None)
            if has_any:
                self.add_file(
                    file_id,
                    self.results(batch_id, is_failed=bool(is_failed)),
                    filename=f"{batch_id}_{name}.jsonl",
                    purpose="batch_output",
                    now_s=now_s,
                    expires_at=expires_at,
                )
        self.base.execute("BEGIN IMMEDIATE")
        with self.base:
            self.base.execute(
                "UPDATE batches SET output_file_id = ?, error_file_id = ? WHERE id = ?",
                (*ids, batch_id),
            )
            self.move(batch_id, RUNNABLE, status, now_s)
            self.base.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
        return self.known(batch_id)

    def check(self) -> None:
        for row in self.base.execute("SELECT * FROM batches"):
            where = f"{row['id']} ({row['status']})"
            assert row["completed"] + row["failed"] <= row["total"], f"{where}: too many results"
            lines = self.base.execute(
                "SELECT COUNT(*), COUNT(result) FROM lines WHERE batch_id = ?", (row["id"],)
            ).fetchone()
            if row["status"] in RUNNABLE:
                done = row["completed"] + row["failed"]
                assert tuple(lines) == (row["total"], done), f"{where}: {tuple(lines)} lines"
            else:
                assert not lines[0], f"{where} has ended, and has lines"
        for row in self.base.execute("SELECT * FROM files"):
            path = self.path_of(row["id"])
            assert path.stat().st_size == row["bytes"], f"{row['id']} is not whole"


def page_where(table: str, after: str | None, newest_first: bool) -> tuple[str, list[Any]]:
    if after is None:
        return "1 = 1", []
    sign = "<" if newest_first else ">"
    return f"number {sign} (SELECT number FROM {table} WHERE id = ?)", [after]


def file_of(row: sqlite3.Row) -> FileObject:
    return FileObject(
        id=row["id"],
        bytes=row["bytes"],
        created_at=row["created_at"],
        filename=row["filename"],
        purpose=row["purpose"],
        expires_at=row["expires_at"],
    )


def batch_of(row: sqlite3.Row) -> BatchObject:
    errors = None
    if row["errors"] is not None:
        errors = BatchErrors(data=msgspec.json.decode(row["errors"], type=list[BatchError]))
    return BatchObject(
        id=row["id"],
        endpoint=row["endpoint"],
        input_file_id=row["input_file_id"],
        completion_window="24h",
        status=row["status"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        errors=errors,
        output_file_id=row["output_file_id"],
        error_file_id=row["error_file_id"],
        request_counts=Counts(total=row["total"], completed=row["completed"], failed=row["failed"]),
        metadata=None if row["metadata"] is None else json.loads(row["metadata"]),
        **{name: row[name] for name in (*TIMES, *CANCEL_TIMES)},
    )
