"""Servers of plans in this process, which a test drains or which end with its block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.server.hosting import Hosting
from ovmstrio.server.life import serve_plan
from ovmstrio.server.plan import Plan
from ovmstrio.server.running import Running


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """A server that accepts connections; ``drain`` ends it gently."""

    plane: DataPlane
    grpc: list[str]
    rest: list[str]
    metrics: list[str]
    drain: Callable[[], None]


@asynccontextmanager
async def serving_plan(plan: Plan, *, drains: bool = False) -> AsyncIterator[ServedPlan]:
    """Serve a plan until the block ends, which cancels the server or drains it, and then it must end gently."""
    draining = trio.Event()
    results: list[bool] = []

    async def serve(*, task_status: trio.TaskStatus[Running]) -> None:
        hosting = Hosting(until=draining.wait)
        results.append(await serve_plan(plan, hosting, handle_signals=False, task_status=task_status))

    async with trio.open_nursery() as nursery:
        running = await nursery.start(serve)
        yield ServedPlan(running.plane, running.grpc, running.rest, running.metrics, draining.set)
        if drains:
            draining.set()
        else:
            nursery.cancel_scope.cancel()
    if drains:
        assert results == [True]
