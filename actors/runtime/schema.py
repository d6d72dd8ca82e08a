"""This file gives the hash that tells whether two nodes have the same messages.

It does not know any message: it hashes the text of `messages/`, so that it is the same for a node
that has loaded few of them. All processes of a run are of one version, and this proves it.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import resources


@functools.cache  # of what this process has loaded, whatever becomes of the files
def hash_messages() -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    files = (file for file in resources.files("messages").iterdir() if file.name.endswith(".py"))
    for file in sorted(files, key=lambda file: file.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.digest()
