"""This file is what must hold in every simulated world: after each message, and when all is quiet.

It does not know what was done to the world. What one actor must keep, its own `check` asserts after
each of its messages; here is what only a look at all of them can tell.
"""

from __future__ import annotations

from typing import Any

from actors.gateway.actor import Gateway
from actors.runtime.life import Life
from actors.runtime.node import Node
from messages.system import State


def lives_of(nodes: list[Node]) -> dict[str, Life]:
    """All lives by path. Asserts that no path has two."""
    found: dict[str, Life] = {}
    for node in nodes:
        for path, life in node.lives.items():
            assert path not in found, f"{life.address} and {found[path].address} both live"
            assert not life.is_dead, f"{life.address} is dead and listed"
            found[path] = life
    return found


def check_always(system: Any, nodes: list[Node]) -> None:
    """After each message between nodes."""
    lives = lives_of(nodes)
    for path, life in lives.items():
        leaf = system.leaves[path]
        born = life.address.incarnation
        assert born <= leaf.incarnation, f"{life.address} was never ordered"
    gateway, scheduler = lives.get("gateway"), lives.get("replica/scheduler")
    if gateway is None or scheduler is None or scheduler.state is State.STARTING:
        return
    records = gateway.actor.ledger.records  # type: ignore[attr-defined]
    for name, request in scheduler.actor.schedule.live.items():  # type: ignore[attr-defined]
        record = records.get(name)
        if record is not None:
            assert request.attempt <= record.attempt, f"{name}: attempt {request.attempt} runs"


def open_things(system: Any, nodes: list[Node]) -> list[str]:
    """What is still open, busy or held. Empty in a quiet world."""
    lives = lives_of(nodes)
    found = [
        f"{path} is {'gone' if path not in lives else lives[path].state}"
        for path in system.leaves
        if path not in lives or lives[path].state is not State.RUNNING
    ]
    for leaf in system.leaves.values():
        life = lives.get(leaf.path)
        if life is not None and life.address.incarnation != leaf.incarnation:
            found.append(f"{life.address} lives, the root knows #{leaf.incarnation}")
    for node in nodes:
        if len(node.questions):
            found.append(f"{node.name}: {len(node.questions)} questions")
        if node.host.kept:
            found.append(f"{node.name}: mailboxes kept for {list(node.host.kept)}")
    for path, life in lives.items():
        if len(life.mailbox) or life.mailbox.parked:
            found.append(f"{path}: {len(life.mailbox)} messages")
        if len(life.timers):
            found.append(f"{path}: {len(life.timers)} timers")
        if life.jobs or life.spawned or life.blocked_count or life.current is not None:
            found.append(f"{path}: at work")
        for name, count in held_by(path, life.actor).items():
            if count:
                found.append(f"{path}: {count} {name}")
    return found


def held_by(path: str, actor: Any) -> dict[str, int]:
    """What a room holds for requests."""
    match path:
        case "gateway":
            assert isinstance(actor, Gateway)
            return {
                "calls": len(actor.calls),
                "streams": len(actor.streams),
                "records": len(actor.ledger),
                "parts down": len(actor.down),
            }
        case "tokenizer":
            return {"prompts": len(actor.pending), "bytes": actor.pending_bytes}
        case "detokenizer":
            return {"outputs": len(actor.outputs)}
        case "replica/scheduler" if hasattr(actor, "schedule"):
            schedule = actor.schedule
            return {
                "requests": len(schedule.live),
                "slots taken": schedule.config.running_max - len(schedule._free_slots),
                "steps in flight": len(schedule.flights),
                "reserved pages": len(schedule.reserve),
                "retiring": len(schedule.retiring),
                "questions to the cache": len(schedule.admission.asking),
                "waiting": len(list(schedule.admission.waiting())),
            }
        case "replica/cache" if hasattr(actor, "ledger"):
            counts = actor.ledger.counts()
            return {
                "pages leased": counts.leased,
                "pages reserved": counts.reserved,
                "leases": len(actor.ledger._leases),
                "pages announced": len(actor.ledger._pending),
            }
        case "replica/worker":
            return {"steps": len(actor.steps)}
    return {}
