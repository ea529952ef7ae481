"""Upper bound on the time between a signal and the end of the process.

A thread in a blocking ``read`` or ``write``, such as one on a stalled network file system, cannot be cancelled, and
the event loop waits for it.  The watchdog ends the process then, and prints where each thread is.
"""

from __future__ import annotations

import faulthandler
import os
import stat
from contextlib import suppress
from typing import Final

__all__ = ["END_WATCHDOG", "EndWatchdog"]

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
