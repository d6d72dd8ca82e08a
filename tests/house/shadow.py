"""The shadow worker lives with the simulation, in `bench/sim`; tests know it by this name."""

from __future__ import annotations

from bench.sim.shadow import ShadowWorker, Tenant, continuation, next_token

__all__ = ["ShadowWorker", "Tenant", "continuation", "next_token"]
