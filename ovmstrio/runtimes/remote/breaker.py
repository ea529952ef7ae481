"""When an address is left alone: a state machine without a clock of its own.

::

    closed ── so many failures in a row ──> open ── after so many seconds, one call ──> half open
      ^───────────────────────────── it succeeds ────────────────────────────────────────┤
                                           open <───────────────────── it fails ─────────┘
"""

from __future__ import annotations

__all__ = ["Breaker"]


class Breaker:
    """Counts failures of one address, and says whether it may be called.

    Args:
        failures: so many in a row open the circuit; 0 for never.
        open_seconds: how long it is open before one call may try whether it still has to be.
    """

    __slots__ = ("_failures", "_in_row", "_is_trying", "_open_seconds", "_opened")

    def __init__(self, failures: int, open_seconds: float) -> None:
        self._failures = failures
        self._open_seconds = open_seconds
        self._in_row = 0
        self._opened: float | None = None
        self._is_trying = False

    @property
    def failures_in_row(self) -> int:
        """How many calls have failed since the last one that succeeded."""
        return self._in_row

    def seconds_left(self, now: float) -> float:
        """Tell for how long no call may be made; 0 if one may, or if that depends on a call that is under way."""
        return 0.0 if self._opened is None else max(0.0, self._opened + self._open_seconds - now)

    def allows(self, now: float) -> bool:
        """Tell whether a call may be made."""
        if self._opened is None:
            return True
        return not self._is_trying and now >= self._opened + self._open_seconds

    def begin(self) -> None:
        """Note that a call is made, which is allowed; while the circuit is not closed, it is the only one."""
        self._is_trying = self._opened is not None

    def succeed(self) -> None:
        """Note that the address has answered: the circuit is closed."""
        self._in_row = 0
        self._opened = None
        self._is_trying = False

    def fail(self, now: float) -> None:
        """Note that the address has failed a call."""
        self._in_row += 1
        if self._is_trying or (self._failures and self._in_row >= self._failures):
            self._opened = now
        self._is_trying = False

    def abandon(self) -> None:
        """Note that a call ended without saying anything of the address; another one may try."""
        self._is_trying = False
