"""Bound of the time that a shutdown of the process takes."""

from __future__ import annotations

import faulthandler
import os
import stat
from contextlib import suppress
from typing import Final

_STOP_SECONDS: Final = 15.0


MARGIN_SECONDS: Final = 30.0
"""Time for unloading after the drain; longer than a parent process gives its workers."""


_MAX_SECONDS: Final = 10_000_000.0
"""Limit of the timer; a drain may be unbounded."""


class ShutdownWatchdog:
    """Watchdog that ends the process with exit code 1 when shutdown takes too long.

    Uses the timer of :mod:`faulthandler`, which needs neither the event loop nor the GIL.
    """

    def __init__(self) -> None:
        self._drain_seconds: float | None = None
        self._margin_seconds = MARGIN_SECONDS
        self._output: int | None = None
        self._was_enabled = False
        self._is_running = False

    def enable(self, drain_seconds: float, margin_seconds: float = MARGIN_SECONDS) -> None:
        """Enable the watchdog of this process; :meth:`start` does nothing otherwise."""
        self._drain_seconds, self._margin_seconds = drain_seconds, margin_seconds
        self._was_enabled = True

    def disable(self) -> None:
        """Stop the timer."""
        self._drain_seconds = None
        self._is_running = False
        faulthandler.cancel_dump_traceback_later()

    def start(self) -> None:
        """Start the timer of a drain, unless a timer is running."""
        if self._drain_seconds is not None and not self._is_running:
            self._start(self._drain_seconds + self._margin_seconds)

    def start_for_stop(self) -> None:
        """Start or replace the timer for a stop without drain."""
        if self._drain_seconds is not None:
            self._start(min(_STOP_SECONDS, self._margin_seconds))

    def start_for_exit(self) -> None:
        """Start the timer for the interpreter's exit, which waits for threads, if a server has run."""
        if self._was_enabled:
            self._start(min(_STOP_SECONDS, self._margin_seconds))

    def _start(self, seconds: float) -> None:
        self._is_running = True
        # Runs in signal handlers, whose errors would end the event loop.
        with suppress(OSError):
            if self._output is None:
                self._output = _open_output()
            faulthandler.dump_traceback_later(min(seconds, _MAX_SECONDS), exit=True, file=self._output)


def _open_output() -> int:
    """Open standard error non-blocking, as a full pipe would block the exit."""
    with suppress(OSError):
        mode = os.fstat(2).st_mode
        if stat.S_ISREG(mode) or stat.S_ISSOCK(mode):
            return os.dup(2)
        return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


SHUTDOWN_WATCHDOG: Final = ShutdownWatchdog()
"""Watchdog of this process."""
