"""What the connections of one front end know of its end."""

from __future__ import annotations

import math
from typing import Final, Protocol

import trio

from ovmstrio.transport.accepting import Spread

__all__ = ["IDLE_GRACE_SECONDS", "Ending", "EndingConnection", "Handshake"]

IDLE_GRACE_SECONDS: Final = 1.0
"""What connections without a request get when the server ends: one may be on its way."""


class Ending:
    """The end of a front end; one object for all its connections.

    Attributes:
        is_near: whether answers are to say that they are their connection's last.
        idle_until: when connections without a request are closed, on trio's clock.
    """

    def __init__(self) -> None:
        self.is_near = False
        self.idle_until = math.inf
        self._spread = Spread()

    def next_end(self) -> float:
        """Return when the next connection without a request is closed: one shortly after the other."""
        return self.idle_until + self._spread.next()

    def is_last(self, now: float, *, has_more: bool) -> bool:
        """Tell whether an answer is its connection's last; what followed its request is answered, for a while."""
        return self.is_near and (not has_more or now >= self.idle_until)


class EndingConnection(Protocol):
    """A connection that can be asked to end."""

    @property
    def has_request(self) -> bool:
        """Whether a request has come, if only in part, that is not answered."""
        ...

    def hurry(self) -> None:
        """Look at the ending again, as it has changed."""
        ...


class Handshake:
    """A connection on which TLS is being agreed on.

    Args:
        ending: how the front end ends.
        seconds: what the handshake gets.
    """

    has_request = False

    def __init__(self, ending: Ending, seconds: float) -> None:
        now = trio.current_time()
        self._ending = ending
        self._grace_until = now + IDLE_GRACE_SECONDS
        self._scope = trio.CancelScope(deadline=now + seconds)
        self.hurry()

    async def shake(self, stream: trio.SSLStream[trio.SocketStream]) -> bool:
        """Agree on TLS; False if there was no time for it.

        Raises:
            trio.BrokenResourceError: the client does not speak TLS, or not one that will do.

        Cancellation: at once; the stream is unusable then.
        """
        with self._scope:
            await stream.do_handshake()
            return True
        return False

    def hurry(self) -> None:
        """Give the handshake no more time than an idle connection gets."""
        self._scope.deadline = min(self._scope.deadline, max(self._ending.idle_until, self._grace_until))
