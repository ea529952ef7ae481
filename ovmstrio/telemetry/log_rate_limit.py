"""Faults of peers: the first of its kind is a line of its own, those that follow are a number.

Who can be reached by anybody must not let anybody fill its log.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import trio

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["RepeatedFaults"]

_WINDOW_SECONDS: Final = 60.0
_MOST: Final = 1_000
_OTHERS: Final = "others"


@dataclass(slots=True)
class _Window:
    """A while in which one kind of fault of one peer is counted."""

    level: int
    until: float
    repeated: int = 0


class RepeatedFaults:
    """Tells what a peer does for the first time at once, and its repetitions as a count a window.

    Args:
        log: where the lines go.
        window_seconds: for how long repetitions are counted before they are told.
        most: how many peers and kinds are told apart at a time; what comes beyond is counted together.
    """

    def __init__(
        self, log: FilteringBoundLogger, *, window_seconds: float = _WINDOW_SECONDS, most: int = _MOST
    ) -> None:
        self._log = log
        self._window_seconds = window_seconds
        self._most = most
        self._windows: dict[tuple[str, str, str], _Window] = {}
        self._some = trio.Event()

    def tell(self, event: str, *, peer: str, kind: str = "", level: int = logging.INFO, **facts: Any) -> None:
        """Log a fault, or count it if the same peer is known for it already.

        Args:
            event: what happened, in words that are always the same.
            peer: ``host:port`` or the host alone; ports of one host are one peer.
            kind: tells faults of one event from each other; of few values.
            level: of its lines.
            facts: of the first line.
        """
        host = _host_of(peer)
        window = self._windows.get((host, event, kind))
        if window is None and len(self._windows) >= self._most:
            host = _OTHERS
            window = self._windows.get((host, event, kind))
        if window is not None:
            window.repeated += 1
            return
        self._windows[host, event, kind] = _Window(level, trio.current_time() + self._window_seconds)
        self._some.set()
        self._log.log(level, event, peer=peer, **facts)

    async def sum_up(self) -> None:
        """Tell of repetitions whenever a window is over, for ever.

        Cancellation: at any time; what has been counted is told before this ends.
        """
        try:
            while True:
                if not self._windows:
                    self._some = trio.Event()
                    await self._some.wait()
                # Windows are equally long, so that the oldest is over first.
                await trio.sleep_until(next(iter(self._windows.values())).until)
                self._tell_until(trio.current_time())
        finally:
            self._tell_until(math.inf)

    def _tell_until(self, now: float) -> None:
        over = [key for key, window in self._windows.items() if window.until <= now]
        for key in over:
            host, event, kind = key
            window = self._windows.pop(key)
            if window.repeated:
                facts = {"fault": event, "peer": host, "times": window.repeated, "seconds": self._window_seconds}
                self._log.log(window.level, "fault repeated", **facts, **({"kind": kind} if kind else {}))


def _host_of(peer: str) -> str:
    host = peer.rpartition(":")[0]
    # The colons of a bare IPv6 address are no port's.
    return host if host and (":" not in host or host.endswith("]")) else peer
