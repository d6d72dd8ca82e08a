"""This file looks for circles of actors that would wait for each other's mailboxes.

It does not know actors or nodes. The system asks it whenever one has come into service: a tree that
could stand still for ever is refused as it is wired, not found out under load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def wait_cycle(
    peers: Mapping[str, Collection[str]], waiting: Collection[str]
) -> tuple[str, ...] | None:
    """Finds a circle of actors that may all wait for each other, or None.

    `peers[a]` are the paths that `a` sends to, on whatever node; only an edge into one of `waiting`
    (mailboxes with `Full.WAIT`) can make its sender wait.
    """
    done: set[str] = set()
    for start in peers:
        trail: list[str] = []
        stack: list[tuple[str, int]] = [(start, 0)]
        while stack:
            path, depth = stack.pop()
            del trail[depth:]
            if path in trail:
                return (*trail[trail.index(path) :], path)
            if path in done:
                continue
            trail.append(path)
            targets = [t for t in peers.get(path, ()) if t in waiting]
            if not targets:
                done.add(path)
            stack += [(t, depth + 1) for t in targets]
        done.update(p for p in trail)
    return None
