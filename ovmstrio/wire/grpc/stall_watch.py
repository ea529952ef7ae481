"""Peers that leave answers where they are: which streams, or whether all of a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.wire.standstill import Standstill, unsent_bytes

if TYPE_CHECKING:
    from ovmstrio.wire.grpc.core import Http2Core
    from ovmstrio.wire.grpc.events import StreamState
    from ovmstrio.wire.grpc.senders import Senders

__all__ = ["StallWatch"]


class StallWatch:
    """Looks from time to time whether the peer of a connection takes any of what waits for it.

    Streams on which nothing waits are not stalled, however long they are idle.

    Attributes:
        is_writing: whether bytes are being handed to the socket.
        written: how many have been.
    """

    def __init__(self, core: Http2Core, senders: Senders, stream: trio.abc.Stream) -> None:
        self._core = core
        self._senders = senders
        self._stream = stream
        now = trio.current_time()
        self._socket = Standstill(now)
        self._window = Standstill(now)
        self.is_writing = False
        self.written = 0

    def look(self, now: float, patience_seconds: float) -> list[StreamState] | None:
        """Tell of the streams whose windows the peer has kept closed for too long; None if it takes nothing at all."""
        # A write that blocks and one that has come since look alike, but for what the socket holds.
        sent = (self.written, unsent_bytes(self._stream)) if self.is_writing else now
        if self._socket.seconds(sent, now) >= patience_seconds:
            return None
        windows, stalled = self._core.windows, self._senders.stalled(now, patience_seconds)
        stood = self._window.seconds(windows.connection if self._senders else now, now)
        if stalled and len(stalled) == len(self._senders) and stood >= patience_seconds:
            return None
        return [stream for stream in stalled if windows.of(stream) <= 0]
