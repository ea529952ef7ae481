"""Rate limit for log lines caused by clients, so that clients cannot fill the log.

The first fault of a kind is logged; repetitions within a window are counted and logged as one line.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.core.errors import MissingScope
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Mapping

    from structlog.typing import FilteringBoundLogger

    from ovmstrio.core.connection import ClientAddress
    from ovmstrio.core.errors import ServerError

_WINDOW_SECONDS: Final = 60.0
_MOST: Final = 1_000
_OTHERS: Final = "others"


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

    def tell(self, event: str, *, peer: str, kind: str = "", level: int = logging.INFO, **facts: Any) -> None:
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

log = structlog.get_logger(__name__)

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
        self.tell(_REFUSED, peer=host, kind=kind, level=logging.WARNING, **fields)
