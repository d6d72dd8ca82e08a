"""This file is the supervision tree and the placement, as data: the one file that names every room.

It does not know how actors are started, watched or restarted; `actors/runtime` does. Placement is
the last column of `PLACEMENTS`, and nothing in a room changes with it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

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


# With several front ends each is a process of its own, `front0` and so on. What they share is kept
# out of them, so that none of them is missed by the others.
SHARED = {"metrics": "metrics", "router": "engine"}


def paths_of(front_count: int) -> tuple[Paths, ...]:
    """Where each front end finds everybody. One alone has the short names."""
    if front_count == 1:
        return (Paths(),)
    names = [f"fronts/{index}" for index in range(front_count)]
    gateways = tuple(f"{name}/gateway" for name in names)
    detokenizers = tuple(f"{name}/detokenizer" for name in names)
    return tuple(
        Paths(
            tokenizer=f"{name}/tokenizer",
            detokenizer=detokenizer,
            gateway=gateway,
            gateways=gateways,
            detokenizers=detokenizers,
        )
        for name, gateway, detokenizer in zip(names, gateways, detokenizers, strict=True)
    )


def build(config: Config) -> tuple[Supervisor, tuple[Node, ...]]:
    """The tree for a settled config, and the nodes it needs beside `main`.

    Without HTTP (`gateway.http` false: the Engine) the gateway stays in the caller's process, since
    the caller reads its streams; there is one front end then.
    """
    places = dict(PLACEMENTS[config.runtime.placement])
    front_count = max(1, config.runtime.front_ends) if config.gateway.http else 1
    if not config.gateway.http:
        places.pop("gateway", None)
    timeout_s = config.runtime.start_timeout_s
    apart = front_count > 1 and "gateway" in places
    nodes = dict.fromkeys(places.values())
    if apart:
        places |= SHARED
        del nodes["front"]
        fronts = [f"front{index}" for index in range(front_count)]
        nodes = dict.fromkeys([*fronts, *nodes, *SHARED.values()])

    def child(
        name: str,
        factory: str,
        node: str | None = None,
        is_prepared: bool = False,
        **arguments: object,
    ) -> Child:
        return Child(
            name=name,
            factory=factory,
            arguments=arguments,  # type: ignore[arg-type]
            node=node or places.get(name, "main"),
            start_timeout_s=timeout_s,
            is_prepared=is_prepared,
        )

    is_prepared = config.runtime.hot_spare

    def front(paths: Paths, node: str | None) -> tuple[Child, ...]:
        return (
            child(
                "detokenizer",
                "actors.detokenizer.actor:Detokenizer",
                node,
                is_prepared,
                model=config.model,
                paths=paths,
            ),
            child(
                "tokenizer",
                "actors.tokenizer.actor:Tokenizer",
                node,
                is_prepared,
                model=config.model,
                tokenizer=config.tokenizer,
                paths=paths,
            ),
            child(
                "gateway",
                "actors.gateway.actor:Gateway",
                node,
                model=config.model,
                gateway=msgspec.structs.replace(
                    config.gateway,
                    shares_port=front_count > 1,
                    places=config.scheduler.running_max + config.scheduler.queued_max,
                    slots=config.scheduler.running_max,
                ),
                paths=paths,
            ),
        )

    every = paths_of(front_count)
    shared = (
        child("metrics", "actors.metrics.actor:Metrics", paths=every[0]),
        replica_of(config, child, every[0]),
    )
    router = child("router", "actors.router.actor:Router", paths=every[0])
    if front_count == 1:
        detokenizer, *others = front(every[0], None)
        root = Supervisor(name="root", children=(*shared, detokenizer, router, *others))
    else:
        branches = tuple(
            Supervisor(name=str(index), children=front(paths, fronts[index] if apart else None))
            for index, paths in enumerate(every)
        )
        together = Supervisor(name="fronts", children=branches, starts_together=True)
        root = Supervisor(name="root", children=(*shared, router, together))
    kind = KINDS.get(config.runtime.placement, NodeKind.THREAD)
    return root, tuple(Node(name=name, kind=kind) for name in nodes if name != "main")


def replica_of(config: Config, child: Callable[..., Child], paths: Paths) -> Supervisor:
    """The model and who decides what it computes: without the worker the other two start afresh."""
    return Supervisor(
        name="replica",
        strategy=Strategy.REST_FOR_ONE,
        children=(
            child(
                "worker",
                "actors.worker.actor:Worker",
                is_prepared=config.runtime.hot_spare,
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
