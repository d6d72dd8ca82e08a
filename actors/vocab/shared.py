"""This file gives the rooms of one process that serve the same model one vocabulary together: one
of 150,000 tokens takes 140 MB, and most of a second to load.

It is kept as long as any of them holds it. Files that have changed are read anew.
"""

from __future__ import annotations

import threading
from pathlib import Path
from weakref import WeakValueDictionary

from actors.vocab.vocab import Vocab

Stamp = tuple[tuple[str, int, int], ...]

_lock = threading.Lock()
_known: WeakValueDictionary[tuple[str, Stamp], Vocab] = WeakValueDictionary()


def vocab_of(path: Path | str) -> Vocab:
    """As `Vocab.load`, which it raises as well. For any thread; who comes second waits for the
    first."""
    with _lock:
        key = str(path), stamp_of(Path(path))
        vocab = _known.get(key)
        if vocab is None:
            vocab = _known[key] = Vocab.load(path)
        return vocab


def stamp_of(path: Path) -> Stamp:
    """Of all files that a vocabulary is made of, so that it is another one when they are."""
    patterns = ("*.json", "**/*.jinja", "*.gguf")
    files = [file for pattern in patterns for file in path.glob(pattern)]
    found = sorted(files) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in found if file.is_file()]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)
