"""This file is the names of pipes: who is at the other end, as ZMQ's routing id says it.

It does not know sockets. Laws: what is read has exactly the name that it was read from; of names
that others chose a bounded number is kept.
"""

from __future__ import annotations

from typing import NamedTuple

ROUTES_MAX = 1024


class Route(NamedTuple):
    """One pipe of one life of a node."""

    node: str
    incarnation: int
    pipe: int

    @property
    def name(self) -> bytes:
        return f"{self.node}#{self.incarnation}/{self.pipe}".encode()


class Routes:
    """Those that were read, since each frame begins with one."""

    def __init__(self) -> None:
        self._known: dict[bytes, Route] = {}

    def __len__(self) -> int:
        return len(self._known)

    def read(self, name: bytes) -> Route | None:
        """None: no name of ours."""
        route = self._known.get(name)
        if route is None:
            try:
                node, _, rest = name.decode().rpartition("#")
                incarnation, _, pipe = rest.partition("/")
                route = Route(node, int(incarnation), int(pipe))
            except ValueError:
                return None
            # `int` reads "01" and "+1" too: another's name would count as the pipe of a known peer.
            if name != route.name:
                return None
            if len(self._known) >= ROUTES_MAX:
                self._known.clear()
            self._known[name] = route
        return route
