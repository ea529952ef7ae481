"""What the peer lets this side send (RFC 9113, sections 5.2 and 6.9): a window for the connection, one a stream.

A stream's window is what the peer granted it beyond INITIAL_WINDOW_SIZE, less what was sent, plus the setting's
present value.  So a change of the setting is one assignment, however many streams are open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.wire.grpc.frames import MAX_WINDOW, ConnectionFault, ErrorCode

if TYPE_CHECKING:
    from ovmstrio.wire.grpc.events import StreamState

__all__ = ["DEFAULT_WINDOW", "SendWindows", "window_error"]

DEFAULT_WINDOW: Final = 65_535


class SendWindows:
    """The windows of one connection, as the peer has set them.

    Attributes:
        connection: bytes that all streams together may send; sending takes them off.
        initial: the peer's INITIAL_WINDOW_SIZE.
        opened: whether the connection's window or the setting has grown since whoever looks after that cleared it.
    """

    __slots__ = ("_widest", "connection", "initial", "opened")

    def __init__(self) -> None:
        self.connection = DEFAULT_WINDOW
        self.initial = DEFAULT_WINDOW
        self.opened = False
        self._widest: StreamState | None = None

    def of(self, stream: StreamState) -> int:
        """Say how many bytes of a stream its own window allows; negative after the setting has shrunk."""
        return stream.credit + self.initial

    def grant_connection(self, increment: int) -> None:
        """Take a WINDOW_UPDATE of the connection.

        Raises:
            ConnectionFault: it is of nothing, or the window overflows.
        """
        self.connection += increment
        if not increment or self.connection > MAX_WINDOW:
            raise ConnectionFault(window_error(increment), f"WINDOW_UPDATE by {increment} on the connection")
        self.opened = True

    def grant(self, stream: StreamState, increment: int) -> bool:
        """Take a WINDOW_UPDATE of a stream; False if it is of nothing or the window overflows."""
        stream.credit += increment
        if not increment or stream.credit + self.initial > MAX_WINDOW:
            return False
        if self._widest is None or self._widest.local_closed or stream.credit >= self._widest.credit:
            self._widest = stream
        return True

    def set_initial(self, value: int) -> None:
        """Take a new INITIAL_WINDOW_SIZE.

        Overflow is looked for in the stream that was granted most, not in all of them.  Where that one has ended or
        sent meanwhile, another one that overflows is found out when it is granted more.

        Raises:
            ConnectionFault: the value, or the window of a stream by it, is larger than HTTP/2 knows.
        """
        if value > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value}")
        widest = self._widest
        if widest is not None and not widest.local_closed and widest.credit + value > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value} overflows a window")
        if value > self.initial:
            self.opened = True
        self.initial = value


def window_error(increment: int) -> ErrorCode:
    """Say what a WINDOW_UPDATE that is refused is guilty of."""
    return ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
