"""This file says, of a tree, what each process in reserve can load before it is needed.

It does not know processes, nor when they are made.
"""

from __future__ import annotations

import msgspec

from actors.runtime import spec
from actors.runtime.launch import Preload, Prepare


def encoded(child: spec.Child) -> dict[str, bytes]:
    return {name: msgspec.msgpack.encode(v) for name, v in child.arguments.items()}


def preloads_of(tree: spec.Supervisor, nodes: tuple[spec.Node, ...]) -> dict[str, Preload]:
    """For each process, the modules of the actors that live there, and what is prepared."""
    modules: dict[str, dict[str, None]] = {
        node.name: {} for node in nodes if node.kind is spec.NodeKind.PROCESS
    }
    prepares: dict[str, tuple[Prepare, ...]] = {}

    def walk(branch: spec.Supervisor, prefix: str) -> None:
        for child in branch.children:
            path = prefix + child.name
            if isinstance(child, spec.Supervisor):
                walk(child, f"{path}/")
            elif child.node in modules:
                modules[child.node][child.factory.partition(":")[0]] = None
                if child.is_prepared:
                    known = prepares.get(child.node, ())
                    prepares[child.node] = (*known, Prepare(path, child.factory, encoded(child)))

    walk(tree, "")
    return {name: Preload(tuple(found), prepares.get(name, ())) for name, found in modules.items()}
