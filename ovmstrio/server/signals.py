"""Signal handling: drain, immediate stop and rolling restart, with a bounded shutdown time."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, Final

import structlog
import trio

from ovmstrio.server.end_watchdog import SHUTDOWN_WATCHDOG
from ovmstrio.telemetry.log_writer import FileSink

# Shutdown watchdog


# Signals

log = structlog.get_logger(__name__)

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


async def handle_stop_signals(
    drain: Callable[[], Awaitable[None]],
    everything: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Drain at the first signal and stop at the second.

    Args:
        drain: drains the server.
        everything: is cancelled to stop at once.
        task_status: reports that signals are handled.
    """
    with trio.open_signal_receiver(*_SIGNALS) as signals:
        _start_watchdog_at_signals()
        task_status.started()
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if nursery.child_tasks:
                    SHUTDOWN_WATCHDOG.start_for_stop()
                    log.warning("stopping at once", signal=signal.Signals(number).name)
                    everything.cancel()
                    return
                log.info("draining", signal=signal.Signals(number).name)
                nursery.start_soon(drain)


def _start_watchdog_at_signals() -> None:
    """Start the watchdog in the signal handlers, as a stuck event loop does not receive signals."""
    for number in _SIGNALS:
        receive = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None, receive: Any = receive) -> None:
            SHUTDOWN_WATCHDOG.start()
            receive(number, frame)

        signal.signal(number, handle)


async def handle_reopen_signals(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Open all log files again at each SIGUSR1, as after their rotation."""
    with trio.open_signal_receiver(signal.SIGUSR1) as signals:
        task_status.started()
        async for _ in signals:
            FileSink.reopen_all()
            # This line opens the file of --log-path.
            log.info("log files reopened")


async def handle_restart_signals(
    renew: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a rolling restart at each SIGHUP; a closed terminal, which sends SIGHUP too, drains the server."""
    had_terminal, is_ignored = _has_terminal(), signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        # A restart in place blocks the signal until it is handled again.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        task_status.started()
        async for _ in signals:
            if had_terminal and not _has_terminal():
                had_terminal = False
                # The command nohup ignores the signal.
                if not is_ignored:
                    signal.raise_signal(signal.SIGTERM)
                continue
            log.info("rolling restart started")
            await renew()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
