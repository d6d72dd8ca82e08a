"""This file is the supervision tree and the placement, as data: the one file that names every room.

It does not know how actors are started, watched or restarted; `actors/runtime` does. Placement is
the last column of `PLACEMENTS`, and nothing in a room changes with it.
"""

from __future__ import annotations

from actors.runtime.spec import Child, Node, NodeKind, Strategy, Supervisor
from messages.config import Config, Paths

# Which node each actor lives on, by placement. `main` is the root's own loop.
#
# `processes` keeps the parts that can die of device trouble (the worker) and those whose death
# would lose the cached prefixes (scheduler and cache) apart from those that hold clients'
# connections; the root's process supervises and does nothing else: it has nothing to die of.
PLACEMENTS: dict[str, dict[str, str]] = {
    "inline": {},
    "threads": {"scheduler": "engine", "cache": "engine", "worker": "worker"},
    "processes": {
        "metrics": "front",
        "detokenizer": "front",
        "router": "front",
        "tokenizer": "front",
        "gateway": "front",
        "scheduler": "engine",
        "cache": "engine",
        "worker": "worker",
    },
}

KINDS = {"threads": NodeKind.THREAD, "processes": NodeKind.PROCESS}


def build(config: Config) -> tuple[Supervisor, tuple[Node, ...]]:
    """The tree for a settled config, and the nodes it needs beside `main`.

    Without HTTP (`gateway.http` false: the Engine) the gateway stays in the caller's process, since
    the caller reads its streams.
    """
    places = dict(PLACEMENTS[config.runtime.placement])
    if not config.gateway.http:
        places.pop("gateway", None)
    paths = Paths()
    timeout_s = config.runtime.start_timeout_s

    def child(name: str, factory: str, **arguments: object) -> Child:
        return Child(
            name=name,
            factory=factory,
            arguments=arguments,  # type: ignore[arg-type]
            node=places.get(name, "main"),
            start_timeout_s=timeout_s,
        )

    replica = Supervisor(
        name="replica",
        strategy=Strategy.REST_FOR_ONE,
        children=(
            child(
                "worker",
                "actors.worker.actor:Worker",
                model=config.model,
                cache=config.cache,
                scheduler=config.scheduler,
                worker=config.worker,
                paths=paths,
            ),
            child("cache", "actors.cache.actor:Cache", cache=config.cache, paths=paths),
            child(
                "scheduler",
                "actors.scheduler.actor:Scheduler",
                scheduler=config.scheduler,
                cache=config.cache,
                paths=paths,
            ),
        ),
    )
    root = Supervisor(
        name="root",
        children=(
            child("metrics", "actors.metrics.actor:Metrics", paths=paths),
            replica,
            child(
                "detokenizer",
                "actors.detokenizer.actor:Detokenizer",
                model=config.model,
                paths=paths,
            ),
            child("router", "actors.router.actor:Router", paths=paths),
            child(
                "tokenizer",
                "actors.tokenizer.actor:Tokenizer",
                model=config.model,
                tokenizer=config.tokenizer,
                paths=paths,
            ),
            child(
                "gateway",
                "actors.gateway.actor:Gateway",
                model=config.model,
                gateway=config.gateway,
                paths=paths,
            ),
        ),
    )
    kind = KINDS.get(config.runtime.placement, NodeKind.THREAD)
    names = dict.fromkeys(places.values())
    return root, tuple(Node(name=name, kind=kind) for name in names if name != "main")
