"""The signals that end a server, at the first gently, and the one that renews its processes."""

from __future__ import annotations

import faulthandler
import os
import signal
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Final

import structlog
import trio

__all__ = ["END_WATCHDOG", "EndWatchdog", "obey_renewals", "obey_signals"]

# ----------------------------------------------------------------------
# Upper bound on the time between a signal and the end of the process
# ----------------------------------------------------------------------

MARGIN_SECONDS: Final = 30.0
"""Time for unloading after the drain; more than a parent process gives its workers."""
_AT_ONCE_SECONDS: Final = 15.0
_MAX_SECONDS: Final = 10_000_000.0
"""Limit of the timer; a drain may have no bound."""


class EndWatchdog:
    """Ends the process with exit code 1 when its shutdown exceeds a bound.

    The timer is that of :mod:`faulthandler`: it needs neither the event loop nor the interpreter's lock.
    """

    def __init__(self) -> None:
        self._drain_seconds: float | None = None
        self._margin_seconds = MARGIN_SECONDS
        self._output: int | None = None
        self._was_enabled = False
        self._is_running = False

    def enable(self, drain_seconds: float, margin_seconds: float = MARGIN_SECONDS) -> None:
        """Bound the shutdown of this process; without this call :meth:`start` does nothing.

        Args:
            drain_seconds: longest time of a drain.
            margin_seconds: what the process gets in addition.
        """
        self._drain_seconds, self._margin_seconds = drain_seconds, margin_seconds
        self._was_enabled = True

    def disable(self) -> None:
        """Stop the timer; the process goes on."""
        self._drain_seconds = None
        self._is_running = False
        faulthandler.cancel_dump_traceback_later()

    def start(self) -> None:
        """Start the timer of a drain, unless a timer runs already."""
        if self._drain_seconds is not None and not self._is_running:
            self._start(self._drain_seconds + self._margin_seconds)

    def start_at_once(self) -> None:
        """Start the timer of a stop without a drain; a timer that runs is replaced."""
        if self._drain_seconds is not None:
            self._start(min(_AT_ONCE_SECONDS, self._margin_seconds))

    def bound_exit(self) -> None:
        """Start the timer of the interpreter's shutdown, which waits for threads, if a server has run."""
        if self._was_enabled:
            self._start(min(_AT_ONCE_SECONDS, self._margin_seconds))

    def _start(self, seconds: float) -> None:
        self._is_running = True
        # This runs in signal handlers, whose errors would end the event loop.
        with suppress(OSError):
            if self._output is None:
                self._output = _open_output()
            faulthandler.dump_traceback_later(min(seconds, _MAX_SECONDS), exit=True, file=self._output)


def _open_output() -> int:
    """Open standard error for writes that do not block, for a full pipe would keep the process from its end."""
    with suppress(OSError):
        mode = os.fstat(2).st_mode
        if stat.S_ISREG(mode) or stat.S_ISSOCK(mode):
            return os.dup(2)
        return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


END_WATCHDOG: Final = EndWatchdog()
"""The watchdog of this process."""


# ----------------------------------------------------------------------
# The signals that end a server, at the first gently, and the one that renews its processes
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


async def obey_signals(
    drain: Callable[[], Awaitable[None]],
    everything: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Drain at the first signal, stop at once at the second.

    Args:
        drain: ends the server gently.
        everything: what is cancelled to stop at once.
        task_status: is told once signals are heard.

    Ownership: the task that drains.
    Cancellation: at any checkpoint, the drain's too; signals have their usual effect again.
    """
    with trio.open_signal_receiver(*_SIGNALS) as signals:
        _start_watchdog_at_signals()
        task_status.started()
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if nursery.child_tasks:
                    END_WATCHDOG.start_at_once()
                    log.warning("stopping at once", signal=signal.Signals(number).name)
                    everything.cancel()
                    return
                log.info("draining", signal=signal.Signals(number).name)
                nursery.start_soon(drain)


def _start_watchdog_at_signals() -> None:
    """Start the watchdog in the signal handlers, because a stuck event loop does not receive the signals."""
    for number in _SIGNALS:
        receive = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None, receive: Any = receive) -> None:
            END_WATCHDOG.start()
            receive(number, frame)

        signal.signal(number, handle)


async def obey_renewals(
    renew: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Renew at each SIGHUP, one time after the other.

    Args:
        renew: starts the processes of a server anew.
        task_status: is told once the signal is heard.

    Cancellation: at any checkpoint, the renewal's too; the signal has its usual effect again.
    """
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            log.info("renewing processes")
            await renew()
