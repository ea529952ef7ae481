"""Shutdown state shared by the connections of an HTTP front end."""

from __future__ import annotations

import math
from typing import Final, Protocol

import trio

from ovmstrio.transport.accept_loop import DeadlineSpread

IDLE_GRACE_SECONDS: Final = 1.0
"""Time that connections without a request get at shutdown, because a request may be in transit."""


class ShutdownState:
    """Shutdown state of a front end.

    Attributes:
        is_draining: responses announce the end of their connection.
        idle_until: trio time at which idle connections are closed.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.idle_until = math.inf
        self._spread = DeadlineSpread()

    def next_close_time(self) -> float:
        """Return when the next idle connection is closed; spread over time."""
        return self.idle_until + self._spread.next()

    def is_last(self, now: float, *, has_more: bool) -> bool:
        """Return whether a response is the last of its connection.

        Pipelined requests are answered until ``idle_until``.
        """
        return self.is_draining and (not has_more or now >= self.idle_until)


class ClosableConnection(Protocol):
    """Connection that can be shut down."""

    @property
    def has_request(self) -> bool:
        """True if an unanswered request has arrived, at least in part."""
        ...

    def apply_shutdown_deadline(self) -> None:
        """Apply the changed shutdown deadline."""
        ...


class Handshake:
    """Connection during its TLS handshake, with a timeout."""

    has_request = False

    def __init__(self, shutdown: ShutdownState, seconds: float) -> None:
        now = trio.current_time()
        self._ending = shutdown
        self._grace_until = now + IDLE_GRACE_SECONDS
        self._scope = trio.CancelScope(deadline=now + seconds)
        self.apply_shutdown_deadline()

    async def perform(self, stream: trio.SSLStream[trio.SocketStream]) -> bool:
        """Perform the handshake; return False after a timeout. Raises ``BrokenResourceError`` if it failed."""
        with self._scope:
            await stream.do_handshake()
            return True
        return False

    def apply_shutdown_deadline(self) -> None:
        """Limit the handshake to the time of an idle connection."""
        self._scope.deadline = min(self._scope.deadline, max(self._ending.idle_until, self._grace_until))
