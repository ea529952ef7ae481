"""Rate limits for log lines and spans caused by clients, so that clients cannot fill logs and traces.

The first fault of a kind is logged; repetitions within a window are counted and logged as one line.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.core.errors import MissingScope
from ovmstrio.core.events import current_event
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from structlog.typing import FilteringBoundLogger

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.core.errors import ServerError

log = structlog.get_logger(__name__)

_REPORT_SECONDS: Final = 1.0
_FAILURE_METHODS: Final = frozenset({"critical", "error", "exception", "fatal", "warn", "warning"})
_AFTER_CALLS: Final = frozenset(
    {"request failed", "request failed with several errors", "rpc handler failed", "rpc handler sent no reply"}
)
"""Events of front ends about requests whose call has ended; they have a common limit."""
_WINDOW_SECONDS: Final = 60.0
_MOST: Final = 1_000
_OTHERS: Final = "others"


class RateLimit:
    """Limit of events per second; counts the events beyond it.  Concurrent use may exceed it by a few events.

    Args:
        most: largest number per second.
    """

    __slots__ = ("_count", "_most", "_second", "left_out")

    def __init__(self, most: float) -> None:
        self._most = most
        self._second = self._count = self.left_out = 0

    def allows(self) -> bool:
        """Count an event; return whether it is within the limit."""
        second = int(perf_counter())
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        if self._count > self._most:
            self.left_out += 1
            return False
        return True

    def take_left_out(self) -> int:
        """Return and reset the number of events beyond the limit."""
        count, self.left_out = self.left_out, 0
        return count


# Lines of failing calls


class FailureLines:
    """Limit of log lines about failing calls, by service; limits while :meth:`run` runs."""

    def __init__(self) -> None:
        self._most = math.inf
        self._limits: dict[str, RateLimit] = {}

    def limit(self, _: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Drop a warning or error of a call beyond the limit of its service (structlog processor)."""
        if self._most == math.inf or method not in _FAILURE_METHODS:
            return event
        call = current_event.get()
        if call is None and event.get("event") not in _AFTER_CALLS:
            return event
        name = "" if call is None else call.name
        limit = self._limits.get(name) or self._limits.setdefault(name, RateLimit(self._most))
        if not limit.allows():
            raise structlog.DropEvent
        return event

    async def run(self, most: int) -> None:
        """Allow ``most`` lines per second and service, and log how many were left out; runs until cancelled.

        Cancellation: logs what was left out.
        """
        self._most = most
        try:
            while True:
                await trio.sleep(_REPORT_SECONDS)
                self._report()
        finally:
            self._most = math.inf
            self._report()
            self._limits.clear()

    def _report(self) -> None:
        for name, limit in tuple(self._limits.items()):
            if count := limit.take_left_out():
                log.warning("failures not logged", service=name, count=count)


FAILURE_LINES: Final = FailureLines()


@dataclass(slots=True)
class _Window:
    level: int
    until: float
    repeated: int = 0


class LogRateLimiter:
    """Rate limiter by peer and kind of fault; limits while :meth:`log_repetitions` runs.

    Args:
        limit: maximum number of windows; further peers are counted together.
    """

    def __init__(
        self, log: FilteringBoundLogger, *, window_seconds: float = _WINDOW_SECONDS, limit: int = _MOST
    ) -> None:
        self._log = log
        self._window_seconds = window_seconds
        self._most = limit
        self._windows: dict[tuple[str, str, str], _Window] = {}
        self._has_windows = trio.Event()
        self._is_limiting = False

    def log_fault(self, event: str, *, peer: str, kind: str = "", level: int = logging.INFO, **facts: Any) -> None:
        """Log a fault, or count it if the window of the peer is open.

        Args:
            event: constant event text.
            peer: ``host:port`` or host; ports are ignored.
            kind: distinguishes faults with the same event; low cardinality.
            level: level of the lines.
            facts: fields of the first line.
        """
        if not self._is_limiting:
            self._log.log(level, event, peer=peer, **facts)
            return
        host = _host_of(peer)
        window = self._windows.get((host, event, kind))
        if window is None and len(self._windows) >= self._most:
            host = _OTHERS
            window = self._windows.get((host, event, kind))
        if window is not None:
            window.repeated += 1
            return
        self._windows[host, event, kind] = _Window(level, trio.current_time() + self._window_seconds)
        self._has_windows.set()
        self._log.log(level, event, peer=peer, **facts)

    async def log_repetitions(self) -> None:
        """Log the repetitions at the end of each window; runs until cancelled.

        Cancellation: logs all open windows.
        """
        self._is_limiting = True
        try:
            while True:
                if not self._windows:
                    self._has_windows = trio.Event()
                    await self._has_windows.wait()
                # Windows have equal length, so the oldest ends first.
                await trio.sleep_until(next(iter(self._windows.values())).until)
                self._log_until(trio.current_time())
        finally:
            self._is_limiting = False
            self._log_until(math.inf)

    def _log_until(self, now: float) -> None:
        over = [key for key, window in self._windows.items() if window.until <= now]
        for key in over:
            host, event, kind = key
            window = self._windows.pop(key)
            if window.repeated:
                facts = {"fault": event, "peer": host, "times": window.repeated, "seconds": self._window_seconds}
                self._log.log(window.level, "fault repeated", **facts, **({"kind": kind} if kind else {}))


def _host_of(peer: str) -> str:
    host = peer.rpartition(":")[0]
    # The colons of a bare IPv6 address are not a port separator.
    return host if host and (":" not in host or host.endswith("]")) else peer


# Denied admin changes

_REFUSED: Final = "change refused"
_MAX_WINDOWS: Final = 200
_MAX_CHARACTERS: Final = 200


class DeniedChangeLog(LogRateLimiter):
    """Log of denied admin changes: one line per minute, client host, caller, change and reason."""

    def __init__(self) -> None:
        super().__init__(log, limit=_MAX_WINDOWS)

    def log_denied(
        self,
        change: str,
        error: ServerError,
        *,
        client: ClientAddress,
        caller: str = "",
        about: str = "",
        facts: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Log a denied change.

        Args:
            change: kind of change; low cardinality.
            error: the reason.
            client: address of the client.
            caller: name of the caller, or empty.
            about: details such as a path.
            facts: fields of the first line.
        """
        caller = caller or (error.caller if isinstance(error, MissingScope) else "")
        host, reason = str(client), cut(error.message, 2 * _MAX_CHARACTERS)
        fields = {"change": change, "caller": caller, "client": host, **facts, "reason": reason}
        if about and about != change:
            fields["about"] = cut(about, _MAX_CHARACTERS)
        kind = " ".join((type(error).__name__, change, *((f"of {caller}",) if caller else ())))
        self.log_fault(_REFUSED, peer=host, kind=kind, level=logging.WARNING, **fields)
