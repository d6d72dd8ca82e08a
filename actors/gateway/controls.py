"""This file is what an operator sees of the server through the gateway, and does to it.

It does not know calls or protocols; `http.py` and `doors/control.py` ask here.
"""

from __future__ import annotations

from actors.runtime.context import Context, Ref, Reply
from messages import cache, gateway, metrics, scheduler
from messages.config import Paths
from messages.gateway import Abort
from messages.metrics import Page, Scrape
from messages.system import ActorRow, State

SCRAPE_TIMEOUT_S = 5.0
LOOK_TIMEOUT_S = 1.0  # `top` waits for 5 s
SERVING = (State.RUNNING, State.DRAINING)


class Controls:
    def __init__(self, context: Context, paths: Paths, needed: tuple[str, ...]) -> None:
        self.context = context
        self.needed = needed  # the parts without which nothing can be generated
        self.scheduler: Ref[scheduler.In] = context.peer(paths.scheduler)
        self.cache: Ref[cache.In] = context.peer(paths.cache)
        self._metrics: Ref[metrics.In] = context.peer(paths.metrics)
        self._others: list[Ref[gateway.In]] = [
            context.peer(path) for path in paths.gateways if path != context.address.path
        ]

    def actor_rows(self) -> list[ActorRow]:
        """Where all actors are and whether they run, by this node's directory."""
        return self.context.actors()

    async def look(self) -> list[ActorRow]:
        """And what they all do; where the root does not answer, what they last did."""
        return await self.context.look(timeout_s=LOOK_TIMEOUT_S)

    def missing(self) -> list[str]:
        """The needed parts that do not run, by the tree's own directory."""
        states = {row.path: row.state for row in self.actor_rows()}
        return [path for path in self.needed if states.get(path) not in SERVING]

    def impaired(self) -> list[str]:
        """What does not run, though this gateway can do without: other front ends, metrics."""
        ours = {*self.needed, self.context.address.path}
        rows = self.actor_rows()
        return [row.path for row in rows if row.state not in SERVING and row.path not in ours]

    def ask_restart(self, path: str) -> bool:
        """False: there is no such actor."""
        if all(row.path != path for row in self.actor_rows()):
            return False
        self.context.ask_restart(path)
        return True

    def abort_elsewhere(self, prefix: str) -> None:
        """Tells the other gateways to end the requests of that name."""
        for other in self._others:
            other.tell(Abort(prefix))

    async def scrape(self) -> str | None:
        """The metrics as text; None when the metrics actor does not answer."""
        outcome = await self.context.ask(self._metrics, Scrape(), timeout_s=SCRAPE_TIMEOUT_S)
        if isinstance(outcome, Reply) and isinstance(outcome.message, Page):
            return outcome.message.text
        return None
