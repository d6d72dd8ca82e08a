"""This file reads the metadata at the head of a GGUF file: names to numbers, texts and lists.

It does not know tensors, and so it costs a tenth of a second where a full reader costs two. It
stays apart from `kernels/load`: starting a tokenizer must not import torch.
Laws: nothing is read past the end of the file; a damaged file is a ModelError that names it.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any


class ModelError(Exception):
    """The model's files cannot be used. The text names the file and what is wrong with it."""


# GGUF value types 0 to 12: struct codes of the fixed-size ones; 8 is a text, 9 a list.
FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
VERSIONS = (2, 3)


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs of a GGUF file (little-endian, versions 2 and 3).

    Raises ModelError if the file is no GGUF, of another version, or cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return Reader(path, data).pairs()
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelError(f"{path}: not a GGUF file ({error})") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error


class Reader:
    """A position in the head of one file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def pairs(self) -> dict[str, Any]:
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (it does not begin with GGUF)")
        self.at = 4
        version = self.number("I")
        if version not in VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version} is not known (only 2 and 3)")
        self.number("Q")  # how many tensors
        found: dict[str, Any] = {}
        for _ in range(self.number("Q")):
            key = self.text()
            found[key] = self.value(self.number("I"))
        return found

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            return self.values()
        if kind in FIXED:
            return self.number(FIXED[kind])
        raise ModelError(f"{self.path}: damaged metadata (value type {kind} at byte {self.at})")

    def values(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == TEXT:
            return self.texts(count)
        if kind in FIXED:
            code = struct.Struct(f"<{self.fitting(count)}{FIXED[kind]}")
            return list(code.unpack(self.take(code.size)))
        return [self.value(kind) for _ in range(self.fitting(count))]

    def texts(self, count: int) -> list[str]:
        # The vocabulary's lists: a tight loop over one buffer.
        data, at, end = self.data, self.at, len(self.data)
        length_of = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(self.fitting(count)):
            if at + 8 > end:
                raise self.cut()
            (length,) = length_of(data, at)
            at += 8
            if length > end - at:
                raise self.cut()
            found.append(data[at : at + length].decode("utf-8", "replace"))
            at += length
        self.at = at
        return found

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{code}", self.take(size))[0]

    def take(self, byte_count: int) -> bytes:
        if byte_count > len(self.data) - self.at:
            raise self.cut()
        taken = self.data[self.at : self.at + byte_count]
        self.at += byte_count
        return taken

    def fitting(self, count: int) -> int:
        """A list has at least one byte an entry: a larger count is damage, not a reason to loop."""
        if count > len(self.data) - self.at:
            raise self.cut()
        return count

    def cut(self) -> ModelError:
        return ModelError(f"{self.path}: the file is cut short in its metadata (byte {self.at})")
