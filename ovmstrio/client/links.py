"""Connections without I/O: a link turns one call at a time into bytes, and received bytes into an answer.

``Client`` and ``AsyncClient`` read and write the bytes. A connection has one call at a time, so that a client needs no
task or thread that reads, and parallel calls reach the workers of a server evenly.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from ovmstrio.core.request import Buffer
from ovmstrio.transport.grpc.frames import ConnectionFault, ErrorCode
from ovmstrio.transport.grpc.headers import encode_header
from ovmstrio.transport.grpc.http2 import ClientCore, DataReceived, GoAwayReceived, HeadersReceived, StreamReset
from ovmstrio.transport.grpc.limits import CLIENT_LIMITS
from ovmstrio.transport.grpc.messages import message_prefix
from ovmstrio.util.buffers import PiecedMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.transport.grpc.http2 import Event, StreamState


class LinkError(Exception):
    """The connection failed before the answer was complete."""


class NotProcessed(LinkError):
    """The server did not process the call, and says so."""


@dataclass(slots=True)
class Answer:
    """End of a call: gRPC or HTTP status, headers with trailers, and the bodies that were not taken."""

    status: int
    headers: dict[str, str]
    body: Buffer = b""


class Link(Protocol):
    """One connection.

    Attributes:
        answer: the answer of the current call, once it is complete.
        status: the HTTP status of a REST answer, once its headers are there; 0 before, and for gRPC.
        received: messages (gRPC) or parts of the body (REST) that were received.
        is_reusable: another call may begin.
        has_unsent: the server must read or answer before the rest of the call can be sent.
    """

    answer: Answer | None
    status: int
    received: deque[Buffer]

    @property
    def is_reusable(self) -> bool:
        """Return whether another call may begin."""

    @property
    def has_unsent(self) -> bool:
        """Return whether a part of the call waits for the server's window."""

    def begin(self, head: bytes, body: Sequence[Buffer] | None, seconds: float) -> None:
        """Begin a call with a complete body, or with messages that follow (None)."""

    def send_message(self, message: Sequence[Buffer]) -> None:
        """Add a message of a stream."""

    def end_request(self) -> None:
        """End the messages of a stream."""

    def cancel(self) -> None:
        """Cancel the call."""

    def outbound(self) -> list[Buffer]:
        """Return what can be sent now, and forget it."""

    def receive(self, data: bytes) -> None:
        """Process received bytes; empty at the end of the connection.

        Raises:
            LinkError: the connection cannot be used any more.
        """


# -- gRPC over HTTP/2 --------------------------------------------------------------------------------------------------

_LARGEST_MESSAGE: Final = 2**31 - 1
_MAX_MILLISECONDS: Final = 99_999_999


class GrpcLink:
    """HTTP/2 connection; see ``Link``."""

    def __init__(self) -> None:
        self._core = ClientCore(CLIENT_LIMITS, time.monotonic)
        self._stream: StreamState | None = None
        self._headers: dict[str, str] = {}
        self._unsent: deque[Buffer] = deque()
        self._has_more_messages = self._is_leaving = False
        self.answer: Answer | None = None
        self.status = 0
        self.received: deque[Buffer] = deque()

    @property
    def is_reusable(self) -> bool:
        """Return whether another call may begin."""
        return self._stream is None and not self._is_leaving and not self._core.is_exhausted

    @property
    def has_unsent(self) -> bool:
        """Return whether a part of the call waits for the server's window."""
        return bool(self._unsent)

    def begin(self, head: bytes, body: Sequence[Buffer] | None, seconds: float) -> None:
        """Begin a call; ``head`` is a header block, ``seconds`` goes to the server as ``grpc-timeout``."""
        if seconds != math.inf:
            head += encode_header(b"grpc-timeout", b"%dm" % max(1, min(math.ceil(seconds * 1000), _MAX_MILLISECONDS)))
        self.answer, self._headers = None, {}
        self.received.clear()
        self._unsent.clear()
        self._has_more_messages = True
        self._stream = self._core.begin(head)
        if body is not None:
            self.send_message(body)
            self.end_request()

    def send_message(self, message: Sequence[Buffer]) -> None:
        """Add a message of a stream."""
        pieced = PiecedMessage(message)
        buffers = pieced.buffers()
        prefix = message_prefix(len(pieced))
        if buffers and isinstance(buffers[0], bytes):
            buffers[0] = prefix + buffers[0]
        else:
            buffers.insert(0, prefix)
        self._unsent.extend(buffers)

    def end_request(self) -> None:
        """End the messages of a stream."""
        self._has_more_messages = False

    def cancel(self) -> None:
        """Reset the stream."""
        self._unsent.clear()
        if self._stream is not None:
            self._core.release(self._stream)
            self._stream = None

    def outbound(self) -> list[Buffer]:
        """Return what the server's windows allow."""
        core, stream, unsent = self._core, self._stream, self._unsent
        if stream is not None and not stream.is_local_closed:
            while unsent and (room := core.sendable(stream)) > 0:
                piece = unsent[0]
                if len(piece) <= room:
                    unsent.popleft()
                else:
                    unsent[0] = memoryview(piece)[room:]
                    piece = memoryview(piece)[:room]
                core.send_data(stream, b"", piece if isinstance(piece, bytes | memoryview) else bytes(piece))
            if not unsent and not self._has_more_messages:
                core.end_request(stream)
        return core.take_outbound()

    def receive(self, data: bytes) -> None:
        """Process received bytes; see ``Link``."""
        if not data:
            raise LinkError("the server closed the connection")
        try:
            self._handle(self._core.receive(data))
            while self._core.more:
                self._handle(self._core.go_on())
        except ConnectionFault as fault:
            raise LinkError(f"the server violates HTTP/2: {fault}") from None

    def _handle(self, events: list[Event]) -> None:  # noqa: C901 - one branch an event
        stream = self._stream
        for event in events:
            if isinstance(event, GoAwayReceived):
                self._is_leaving = True
                if stream is not None and stream.stream_id > event.last_stream_id:
                    raise NotProcessed("the server takes no more calls on this connection")
            elif isinstance(event, HeadersReceived):
                if event.stream is stream:
                    for name, value in event.headers:
                        self._headers[name.decode("latin-1")] = value.decode("latin-1")
            elif isinstance(event, DataReceived):
                if event.stream is stream:
                    self._read(stream)
            elif isinstance(event, StreamReset) and event.stream is stream:
                if event.code == ErrorCode.REFUSED_STREAM:
                    raise NotProcessed("the server refused the stream")
                if not stream.is_remote_closed or "grpc-status" not in self._headers:
                    raise LinkError(f"the server reset the call (code {event.code})")
        # The event of the trailers follows that of the data.
        if stream is not None and stream.is_remote_closed:
            self._core.release(stream)
            self._stream = None
            status = self._headers.get("grpc-status", "")
            self.answer = Answer(int(status) if status.isdecimal() else -1, self._headers)

    def _read(self, stream: StreamState) -> None:
        if stream.uncredited:
            self._core.consume(stream, stream.uncredited)
        while (taken := stream.buffer.take_aligned(_LARGEST_MESSAGE)) is not None:
            is_compressed, message = taken
            if is_compressed:
                raise LinkError("the server compressed a message, which the request does not accept")
            self.received.append(message)


# -- REST over HTTP/1.1 ------------------------------------------------------------------------------------------------

_END_OF_HEAD: Final = b"\r\n\r\n"
_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_CHUNK_LINE_BYTES: Final = 4 * 1024
_OK: Final = 200
_BODILESS: Final = frozenset({204, 304})
_JOINED_BYTES: Final = 64 * 1024
_CHUNKED: Final = -1
_UNTIL_CLOSED: Final = -2
_HEAD: Final = -3


class HttpLink:
    """HTTP/1.1 connection; see ``Link``."""

    def __init__(self) -> None:
        self._outbound: list[Buffer] = []
        self._buffer = bytearray()
        self._left = _HEAD
        self._chunk_left = -1
        self._headers: dict[str, str] = {}
        self._is_kept = True
        self._is_open = False
        self.answer: Answer | None = None
        self.status = 0
        self.received: deque[Buffer] = deque()

    @property
    def is_reusable(self) -> bool:
        """Return whether another call may begin."""
        return self._is_kept and not self._is_open and not self._buffer

    @property
    def has_unsent(self) -> bool:
        """Return False: HTTP/1.1 has no windows."""
        return False

    def begin(self, head: bytes, body: Sequence[Buffer] | None, seconds: float) -> None:
        """Begin a call; ``head`` is the request line and headers without ``Content-Length``."""
        del seconds
        self.answer, self.status, self._headers = None, 0, {}
        self.received.clear()
        self._left, self._is_open = _HEAD, True
        if body:
            size = sum(map(len, body))
            self._outbound = [*PiecedMessage([b"%sContent-Length: %d\r\n\r\n" % (head, size), *body]).buffers()]
        else:
            self._outbound = [head + b"\r\n"]

    def send_message(self, message: Sequence[Buffer]) -> None:
        """Do nothing: the body of a REST call is complete when it begins."""

    def end_request(self) -> None:
        """Do nothing."""

    def cancel(self) -> None:
        """Do nothing: the connection must be closed."""

    def outbound(self) -> list[Buffer]:
        """Return the request."""
        taken, self._outbound = self._outbound, []
        return taken

    def receive(self, data: bytes) -> None:
        """Process received bytes; see ``Link``."""
        if not data:
            self._is_kept = False
            if self._left == _UNTIL_CLOSED and self._is_open:
                self._finish()
                return
            raise LinkError("the server closed the connection")
        if not self._is_open:
            self._is_kept = False
            return
        try:
            self._parse(data)
        except (ValueError, LookupError) as error:
            self._is_kept = False
            raise LinkError(f"the server violates HTTP/1.1: {error}") from None

    def _parse(self, data: bytes) -> None:  # noqa: C901 - one branch a state
        while self._left == _HEAD:
            if self._buffer:
                self._buffer += data
                data = bytes(self._buffer)
                self._buffer.clear()
            end = data.find(_END_OF_HEAD)
            if end < 0:
                if len(data) > _MAX_HEAD_BYTES:
                    raise ValueError(f"headers of more than {_MAX_HEAD_BYTES} bytes")
                self._buffer += data
                return
            self._read_head(data[:end])
            data = data[end + len(_END_OF_HEAD) :]
        if self._left == _CHUNKED:
            self._read_chunks(data)
        elif self._left == _UNTIL_CLOSED:
            if data:
                self.received.append(data)
        else:
            if len(data) > self._left:
                self._is_kept, data = False, data[: self._left]
            self._left -= len(data)
            if data:
                self.received.append(data)
            if not self._left:
                self._finish()

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not code.isdecimal():
            raise ValueError(f"the answer begins with {first[:40]!r}")
        status = int(code)
        if status < _OK:
            return
        headers = self._headers
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise ValueError(f"header {line[:40]!r} has no colon")
            headers[name.lower()] = value.strip()
        connection = headers.get("connection", "").lower()
        self._is_kept = version == "HTTP/1.1" and "close" not in connection
        self.status = status
        if status in _BODILESS:
            self._left = 0
        elif headers.get("transfer-encoding", "").lower() == "chunked":
            self._left, self._chunk_left = _CHUNKED, -1
        elif (length := headers.get("content-length")) is not None:
            if not (length.isascii() and length.isdecimal()):
                raise ValueError(f"Content-Length is {length[:40]!r}")
            self._left = int(length)
        else:
            self._left, self._is_kept = _UNTIL_CLOSED, False

    def _read_chunks(self, data: bytes) -> None:
        """Read ``size CRLF data CRLF`` up to the chunk of size 0; a ``_chunk_left`` of -1: a size is next."""
        buffer = self._buffer
        buffer += data
        while True:
            if self._chunk_left < 0:
                end = buffer.find(b"\r\n")
                if end < 0:
                    if len(buffer) > _MAX_CHUNK_LINE_BYTES:
                        raise ValueError("the size of a chunk is too long")
                    return
                size = int(buffer[:end].partition(b";")[0], 16)
                if size < 0:
                    raise ValueError("the size of a chunk is negative")
                if size == 0:
                    # Trailers end with an empty line.
                    last = buffer.find(_END_OF_HEAD, end)
                    if last < 0:
                        return
                    del buffer[: last + len(_END_OF_HEAD)]
                    self._finish()
                    return
                del buffer[: end + 2]
                self._chunk_left = size
            if len(buffer) < self._chunk_left + 2:
                return
            self.received.append(bytes(buffer[: self._chunk_left]))
            del buffer[: self._chunk_left + 2]
            self._chunk_left = -1

    def _finish(self) -> None:
        self._is_open, self._left = False, _HEAD
        self.answer = Answer(self.status, self._headers)
