"""A server that does not share its process with other code."""

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

# ----------------------------------------------------------------------
# What Python's cyclic collector is spared while a server starts, and once everything is loaded
# ----------------------------------------------------------------------

_OBJECTS_A_COLLECTION: Final = 20_000
"""How many objects may come before the youngest are looked at; a call makes a few dozen, few of them in cycles."""
_OBJECTS_OF_IMPORTS: Final = 200_000
"""How many may come before a process that begins looks at them: those that imports make, of which nearly all stay."""


def spare_imports() -> None:
    """Keep the collector from what imports make, until :func:`collect_rarely`."""
    gc.set_threshold(_OBJECTS_OF_IMPORTS, 20, 20)


def collect_rarely() -> None:
    """Have the collector look at new objects less often than by default."""
    gc.set_threshold(_OBJECTS_A_COLLECTION, 20, 20)


def keep_imports() -> None:
    """Keep the collector for ever from what there is, in a process that has imported things and done nothing else.

    About a megabyte of it is garbage, which would take nearly a tenth of a second to find.
    """
    gc.freeze()


async def spare_the_collector(registry: Registry) -> None:
    """Keep the collector from what was made at the start, and from looking at every few calls.

    By default it takes a tenth to a fifth of the time of a small call.  What is there while models load is looked
    through by then, as nobody waits for the event loop and OpenVINO goes on.

    Cancellation: until the first load has ended; what is there by now is spared all the same.
    """
    if not registry.has_loaded:
        _freeze()
        await registry.wait_loaded()
    _freeze()
    collect_rarely()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


# ----------------------------------------------------------------------
# A server that does not share its process with other code
# ----------------------------------------------------------------------

_SWITCH_SECONDS: Final = 0.001
"""How long a thread that runs Python keeps the event loop waiting for the interpreter's lock; 0.005 by default."""

Show = Callable[["Running"], Awaitable[None]]
"""Runs next to a server that accepts connections."""


class _Report:
    """Task status of a server that may end before it has started."""

    def __init__(self, started: Callable[[Running], None]) -> None:
        self._started = started

    def started(self, value: Any = None) -> None:
        """Report the start."""
        self._started(value)


@contextmanager
def own_process(plan: Plan, *, handle_signals: bool) -> Iterator[None]:
    """Tune the process for a server that does not share it, for the time of the block.

    A signal bounds the life of the process to the drain and 30 seconds more, even if a thread is stuck.
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
    """Serve a plan in this process until a signal or the hosting ends it.

    Args:
        plan: what to serve.
        hosting: how this process takes part in a server of several.
        show: runs next to the server once the server accepts connections.
        handle_signals: whether SIGINT and SIGTERM drain the server, and stop it at once the second time.

    Returns:
        Whether all calls ended within the drain.

    Raises:
        ExceptionGroup: as :func:`ovmstrio.server.server.serve_plan`.

    Ownership: the server and its worker processes, which have ended when this returns.

    Cancellation: ends everything at once, without drain.
    """
    with own_process(plan, handle_signals=handle_signals):
        async with trio.open_nursery() as nursery:

            def begin(running: Running) -> None:
                nursery.start_soon(spare_the_collector, running.plane.registry)
                nursery.start_soon(give_back_freed_memory, running.plane.registry.wait_change)
                if show is not None:
                    nursery.start_soon(show, running)

            is_gentle = await serve_plan(plan, hosting, handle_signals=handle_signals, task_status=_Report(begin))
            nursery.cancel_scope.cancel()
    return is_gentle
