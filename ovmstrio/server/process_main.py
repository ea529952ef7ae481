"""Entry point of a server that has its process to itself: garbage collector, malloc and watchdog settings."""

from __future__ import annotations

import gc
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.server.malloc_trim import give_back_freed_memory, keep_freed_memory
from ovmstrio.server.server import serve_plan
from ovmstrio.server.signals import END_WATCHDOG

if TYPE_CHECKING:
    from ovmstrio.server.plan import Plan
    from ovmstrio.server.server import Running
    from ovmstrio.server.worker_context import Hosting
    from ovmstrio.serving.registry import Registry

__all__ = [
    "Show",
    "collect_rarely",
    "keep_imports",
    "own_process",
    "serve_in_own_process",
    "spare_imports",
    "spare_the_collector",
]

# Garbage collector

_SERVING_GC_THRESHOLD: Final = 20_000
"""Threshold of the youngest generation; a call creates a few dozen objects, few of them in cycles."""
_IMPORT_GC_THRESHOLD: Final = 200_000
"""Threshold while importing: nearly all imported objects stay."""


def spare_imports() -> None:
    """Raise the collector threshold during imports, until :func:`collect_rarely`."""
    gc.set_threshold(_IMPORT_GC_THRESHOLD, 20, 20)


def collect_rarely() -> None:
    """Raise the collector threshold for serving."""
    gc.set_threshold(_SERVING_GC_THRESHOLD, 20, 20)


def keep_imports() -> None:
    """Freeze the collector's objects in a process that has only imported modules.

    About 1 MB of them is garbage, which would take nearly 100 ms to find.
    """
    gc.freeze()


async def spare_the_collector(registry: Registry) -> None:
    """Freeze the objects of the start and raise the threshold after the first load.

    The default thresholds cost 10 to 20 % of a small call.  Collection happens during the load, while the event loop is
    idle.

    Cancellation: objects up to now are frozen all the same.
    """
    if not registry.has_loaded:
        _freeze()
        await registry.wait_loaded()
    _freeze()
    collect_rarely()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


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
def own_process(plan: Plan, *, handle_signals: bool) -> Iterator[None]:
    """Tune a process that belongs to the server, within the block.

    A signal bounds the life of the process to the drain plus 30 s, even if a thread is stuck.
    """
    keep_freed_memory()
    sys.setswitchinterval(_SWITCH_SECONDS)
    if not handle_signals:
        yield
        return
    END_WATCHDOG.enable(plan.settings.drain_delay + plan.settings.drain_seconds)
    try:
        yield
    finally:
        END_WATCHDOG.disable()


async def serve_in_own_process(
    plan: Plan, hosting: Hosting | None = None, *, show: Show | None = None, handle_signals: bool = True
) -> bool:
    """Serve a plan in this process until a signal or the worker context ends it.

    Args:
        plan: the plan.
        hosting: context of a worker process, or None.
        show: runs next to the server once it accepts connections.
        handle_signals: whether SIGINT and SIGTERM drain the server, and stop it the second time.

    Returns:
        Whether all calls ended within the drain.

    Raises:
        ExceptionGroup: as :func:`ovmstrio.server.server.serve_plan`.
    """
    with own_process(plan, handle_signals=handle_signals):
        async with trio.open_nursery() as nursery:

            def begin(running: Running) -> None:
                nursery.start_soon(spare_the_collector, running.plane.registry)
                nursery.start_soon(give_back_freed_memory, running.plane.registry.wait_change)
                if show is not None:
                    nursery.start_soon(show, running)

            is_gentle = await serve_plan(plan, hosting, handle_signals=handle_signals, task_status=_StartReport(begin))
            nursery.cancel_scope.cancel()
    return is_gentle
