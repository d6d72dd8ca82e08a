"""This file is what must hold in every simulated world: after each message, and when all is quiet.

It does not know what was done to the world. What one actor must keep, its own `check` asserts after
each of its messages; here is what only a look at all of them can tell.
"""

from __future__ import annotations

from typing import Any

from actors.gateway.actor import Gateway
from actors.runtime.life import Life
from actors.runtime.node import Node
from actors.runtime.supervisor import Branch
from bench.sim.site import SimSite
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
    scheduler = lives.get("replica/scheduler")
    if scheduler is None or scheduler.state is State.STARTING:
        return
    live = scheduler.actor.schedule.live  # type: ignore[attr-defined]
    for gateway in gateways_of(lives):
        for name, record in gateway.recovery.ledger.records.items():
            request = live.get(name)
            if request is not None:
                assert request.attempt <= record.attempt, f"{name}: attempt {request.attempt} runs"


def all_run(system: Any, nodes: list[Node]) -> bool:
    """The life that the root knows of each actor is in service."""
    lives = lives_of(nodes)
    return all(
        leaf.path in lives
        and lives[leaf.path].state is State.RUNNING
        and lives[leaf.path].address.incarnation == leaf.incarnation
        for leaf in system.leaves.values()
    )


def gateways_of(lives: dict[str, Life]) -> list[Gateway]:
    return [life.actor for life in lives.values() if isinstance(life.actor, Gateway)]


def what_is_left_of(call_id: str, nodes: list[Node]) -> list[str]:
    """Where the requests of a call are still known."""
    lives = lives_of(nodes)
    found = [
        f"{name} is {record.stage.value} in the gateway"
        for gateway in gateways_of(lives)
        for name, record in gateway.recovery.ledger.records.items()
        if record.call_id == call_id
    ]
    scheduler = lives.get("replica/scheduler")
    if scheduler is not None and hasattr(scheduler.actor, "schedule"):
        live = scheduler.actor.schedule.live
        found += [f"{name} runs" for name in live if name.rpartition(".")[0] == call_id]
    return found


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
        found += [
            f"{node.name}: {len(peer.waiting)} and {len(peer.held)} messages wait for {peer.name}"
            for peer in node.peers._peers.values()
            if peer.waiting or peer.held
        ]
        found += [
            f"{node.name}: {list(starting)} start on {name}"
            for name, starting in node.starting.items()
            if starting
        ]
    found += [
        f"the system's {table}: {list(getattr(system, table))}"
        for table in ("_starting", "_ends", "_drains")
        if getattr(system, table)
    ]
    for branch in branches_of(system.root):
        if branch._busy or branch._dead or branch._tasks:
            found.append(f"supervisor {branch.path or 'root'}: at work on {list(branch._busy)}")
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


def branches_of(root: Branch) -> list[Branch]:
    """All supervisors, the root first."""
    found = [root]
    for child in root.children.values():
        if isinstance(child, Branch):
            found += branches_of(child)
    return found


def held_by(path: str, actor: Any) -> dict[str, int]:
    """What a room holds for requests."""
    if isinstance(actor, Gateway):
        site = actor.site
        kept = exchanges = made = written = batches = 0
        if isinstance(site, SimSite):
            site.app.resumes.check()
            kept, exchanges = len(site.app.resumes.kept), len(site.open)
            runner = site.app.batches.runner
            if runner is not None and site.app.batches.store is not None:
                runner.store.check()
                batches = runner.store.open_count()
            made, written = len(site.app.responses.tasks), len(site.app.responses.tapes.changed)
        return {
            "streams kept": kept,
            "exchanges": exchanges,
            "batches open": batches,
            "responses being made": made,
            "tapes being written": written,
            "calls": len(actor.calls.open),
            "streams": len(actor.calls.streams),
            "records": len(actor.recovery.ledger),
            "parts down": len(actor.recovery.down),
        }
    match path.rpartition("/")[2]:
        case "tokenizer":
            return {"prompts": len(actor.pending), "bytes": actor.pending_bytes}
        case "detokenizer":
            return {"outputs": len(actor.outputs)}
        case "scheduler" if hasattr(actor, "schedule"):
            schedule = actor.schedule
            return {
                "requests": len(schedule.live),
                "slots taken": len(schedule.running),
                "steps in flight": len(schedule.flights),
                "reserved pages": len(schedule.reserve),
                "retiring": len(schedule.leases.retiring),
                "questions to the cache": len(schedule.admission.asking),
                "waiting": len(list(schedule.admission.waiting())),
                "who waits behind another": len(schedule.admission._behind),
                "who has pages": len(schedule.admission._holders),
                "who waits for a grammar": len(actor.grammars),
                "grammars asked for": len(actor.grammars._asked),
                "messages to the cache": len(schedule.output.to_cache),
                "steps to be sent": len(schedule.output.steps),
            }
        case "cache" if hasattr(actor, "ledger"):
            counts = actor.ledger.counts()
            return {
                "pages leased": counts.leased,
                "pages reserved": counts.reserved,
                "leases": len(actor.ledger._leases),
                "pages announced": len(actor.ledger._pending),
            }
        case "worker":
            shadow = actor.shadow
            guides = 0 if shadow.constrainer is None else len(shadow.constrainer.guides)
            # A slot is emptied with the next step, and there may be none for a long while; but a
            # matcher without a tenant is one too many.
            return {"steps": len(actor.steps), "guides": max(0, guides - len(shadow.tenants))}
    return {}
