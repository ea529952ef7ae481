"""Server start for the commands: in one process, or with several workers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

from ovmstrio.server.gc_tuning import set_serving_gc_threshold
from ovmstrio.server.plan import with_service_manager
from ovmstrio.server.process_main import serve_in_own_process, tuned_process
from ovmstrio.server.readiness_file import ReadinessFile
from ovmstrio.server.restart import InPlaceRestart
from ovmstrio.server.signals import handle_stop_signals

if TYPE_CHECKING:
    from ovmstrio.server.plan import Plan
    from ovmstrio.server.process_main import Show


async def serve_in_processes(plan: Plan, *, show: Show | None = None, handle_signals: bool = True) -> bool:
    """Serve a plan until a signal ends the server, in as many processes as planned.

    Supports service manager notifications and socket activation.  After SIGHUP, a server of one process drains and
    executes its command again.

    Args:
        plan: the plan; an automatic number of processes is measured first.
        show: runs next to a single-process server once it accepts connections.
        handle_signals: whether SIGINT and SIGTERM drain the server, and stop it the second time.

    Returns:
        True if all calls ended within the drain.

    Raises:
        ConfigError: an inherited socket has an unknown protocol.
        ExceptionGroup: as :func:`ovmstrio.server.server.serve_plan`.
    """
    restart = InPlaceRestart.from_environ(os.environ) if handle_signals else None
    plan = with_service_manager(plan, os.environ)
    with tuned_process(plan, handle_signals=handle_signals):
        if not plan.root and not plan.settings.workers:
            chosen = await _choose_processes(plan, handle_signals=handle_signals)
            if chosen is None:
                return True
            plan = chosen
        if plan.processes > 1:
            if restart is not None:
                restart.cancel()
            from ovmstrio.workers.supervisor import serve_with_workers  # noqa: PLC0415 - only needed with workers

            set_serving_gc_threshold()
            return await serve_with_workers(plan, handle_signals=handle_signals)
    gently = await serve_in_own_process(plan, show=show, handle_signals=handle_signals, restart=restart)
    if restart is not None and restart.is_requested:
        restart.execute()
    return gently


async def _choose_processes(plan: Plan, *, handle_signals: bool) -> Plan | None:
    """Return the plan with a number of processes, or None if a signal ended the server meanwhile."""
    from ovmstrio.workers.auto_workers import choose_workers  # noqa: PLC0415 - only for a plan that leaves it open

    # Removes the file of a killed server, which would report this one as ready during the measurement.
    ReadinessFile(plan.readiness_file)
    ended, chosen = trio.Event(), None
    async with trio.open_nursery() as nursery:

        async def end() -> None:
            ended.set()
            plan.notifier.stop()
            nursery.cancel_scope.cancel()

        if handle_signals:
            await nursery.start(handle_stop_signals, end, nursery.cancel_scope)
        chosen = await choose_workers(plan)
        nursery.cancel_scope.cancel()
    return None if ended.is_set() else chosen
