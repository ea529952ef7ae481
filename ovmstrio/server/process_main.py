"""Entry point of a server that has its process to itself: garbage collector, malloc and watchdog settings."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.server.end_watchdog import SHUTDOWN_WATCHDOG
from ovmstrio.server.gc_tuning import freeze_gc
from ovmstrio.server.malloc_trim import configure_malloc, trim_freed_memory
from ovmstrio.server.server import serve_plan

if TYPE_CHECKING:
    from ovmstrio.server.plan import Plan
    from ovmstrio.server.restart import InPlaceRestart
    from ovmstrio.server.running import Running
    from ovmstrio.server.worker_context import WorkerProcessContext

# Garbage collector


# Process

_SWITCH_SECONDS: Final = 0.001
"""GIL switch interval; the default of 5 ms delays the event loop while a thread runs Python."""

Show = Callable[["Running"], Awaitable[None]]
"""Runs next to a server that accepts connections."""


class _StartReport:
    def __init__(self, started: Callable[[Running], None]) -> None:
        self._started = started

    def started(self, value: Any = None) -> None:
        self._started(value)


@contextmanager
def tuned_process(plan: Plan, *, handle_signals: bool) -> Iterator[None]:
    """Tune a process that belongs to the server, within the block.

    A signal bounds the life of the process to the drain plus 30 s, even if a thread is stuck.
    """
    configure_malloc()
    sys.setswitchinterval(_SWITCH_SECONDS)
    if not handle_signals:
        yield
        return
    SHUTDOWN_WATCHDOG.enable(plan.settings.drain_delay + plan.settings.drain_seconds)
    try:
        yield
    finally:
        SHUTDOWN_WATCHDOG.disable()


async def serve_in_own_process(
    plan: Plan,
    worker_context: WorkerProcessContext | None = None,
    *,
    show: Show | None = None,
    handle_signals: bool = True,
    restart: InPlaceRestart | None = None,
) -> bool:
    """Serve a plan in this process until a signal or the worker context ends it.

    Args:
        plan: the plan.
        worker_context: context of a worker process, or None.
        show: runs next to the server once it accepts connections.
        handle_signals: whether SIGINT and SIGTERM drain the server, and stop it the second time.
        restart: is requested by SIGHUP; None if the process cannot execute its command again.

    Returns:
        True if all calls ended within the drain.

    Raises:
        ExceptionGroup: as :func:`ovmstrio.server.server.serve_plan`.
    """
    with tuned_process(plan, handle_signals=handle_signals):
        async with trio.open_nursery() as nursery:

            def begin(running: Running) -> None:
                nursery.start_soon(freeze_gc, running.plane.registry)
                nursery.start_soon(trim_freed_memory, running.plane.registry.wait_change)
                if show is not None:
                    nursery.start_soon(show, running)

            is_gentle = await serve_plan(
                plan, worker_context, handle_signals=handle_signals, restart=restart, task_status=_StartReport(begin)
            )
            nursery.cancel_scope.cancel()
    return is_gentle
