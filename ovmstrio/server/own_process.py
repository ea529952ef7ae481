"""A server that has its process for itself, as the commands run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.server.collector import collect_rarely, spare_the_collector
from ovmstrio.server.end_watchdog import END_WATCHDOG
from ovmstrio.server.freed_memory import give_back_freed_memory, keep_freed_memory
from ovmstrio.server.life import serve_plan
from ovmstrio.server.readiness_file import ReadinessFile
from ovmstrio.server.signals import obey_signals
from ovmstrio.server.systemd import managed

if TYPE_CHECKING:
    from ovmstrio.server.hosting import Hosting
    from ovmstrio.server.plan import Plan
    from ovmstrio.server.running import Running

__all__ = ["serve_in_own_process"]

_SWITCH_SECONDS: Final = 0.001
"""How long a thread that runs Python keeps the event loop waiting for the interpreter's lock; 0.005 by default."""

Show = Callable[["Running"], Awaitable[None]]


class _Report:
    """Takes the report of a server that has started; one that ends before makes none."""

    def __init__(self, started: Callable[[Running], None]) -> None:
        self._started = started

    def started(self, value: Any = None) -> None:
        """Take it."""
        self._started(value)


async def serve_in_own_process(
    plan: Plan, hosting: Hosting | None = None, *, show: Show | None = None, handle_signals: bool = True
) -> bool:
    """Serve a plan until it is told to end, with what a process that does nothing else can be tuned to.

    A service manager is told how the server does, and may have opened its sockets.

    Args:
        plan: what to serve, and in how many processes.
        hosting: how this process takes part in a server of several.
        show: is run beside the server once that accepts connections.
        handle_signals: whether SIGINT and SIGTERM drain, and stop at once the second time.

    Returns:
        Whether the server ended gently.

    Raises:
        ConfigError: the process has inherited a socket of which nobody says what is spoken there.
        ExceptionGroup: as :func:`ovmstrio.server.life.serve_plan`.

    Ownership: the server, and worker processes, which have ended when this returns.

    Cancellation: ends everything at once, without drain.

    A signal bounds the life of the process to the drain and 30 seconds more, even if a thread is stuck.
    """
    if hosting is None:
        plan = managed(plan, os.environ)
    if not handle_signals:
        return await _serve(plan, hosting, show, handle_signals=False)
    END_WATCHDOG.enable(plan.settings.drain_delay + plan.settings.drain_seconds)
    try:
        return await _serve(plan, hosting, show, handle_signals=True)
    finally:
        END_WATCHDOG.disable()


async def _serve(plan: Plan, hosting: Hosting | None, show: Show | None, *, handle_signals: bool) -> bool:
    keep_freed_memory()
    sys.setswitchinterval(_SWITCH_SECONDS)
    if hosting is None and not plan.root and not plan.settings.workers:
        chosen = await _with_workers(plan, handle_signals=handle_signals)
        if chosen is None:
            return True
        plan = chosen
    if plan.processes > 1 and hosting is None:
        from ovmstrio.server.workers.parent import serve_with_workers  # noqa: PLC0415 - a server of one needs none of it

        collect_rarely()
        return await serve_with_workers(plan, handle_signals=handle_signals)
    async with trio.open_nursery() as nursery:

        def begin(running: Running) -> None:
            nursery.start_soon(spare_the_collector, running.plane.registry)
            nursery.start_soon(give_back_freed_memory, running.plane.registry.wait_change)
            if show is not None:
                nursery.start_soon(show, running)

        gently = await serve_plan(plan, hosting, handle_signals=handle_signals, task_status=_Report(begin))
        nursery.cancel_scope.cancel()
    return gently


async def _with_workers(plan: Plan, *, handle_signals: bool) -> Plan | None:
    """Decide how many processes serve a plan that leaves it open; None if the server was told to end meanwhile.

    Raises:
        ExceptionGroup: of ``OSError``, the folder of sequences cannot be read.

    Cancellation: at once; what measures is killed.
    """
    from ovmstrio.server.workers.choosing import choose_workers  # noqa: PLC0415 - where that is left open

    # One that a server has left that was killed would say all the while that this one is ready.
    ReadinessFile(plan.readiness_file)
    told, chosen = trio.Event(), None
    async with trio.open_nursery() as nursery:

        async def end() -> None:
            told.set()
            plan.notifier.stop()
            nursery.cancel_scope.cancel()

        if handle_signals:
            await nursery.start(obey_signals, end, nursery.cancel_scope)
        chosen = await choose_workers(plan)
        nursery.cancel_scope.cancel()
    return None if told.is_set() else chosen
