"""Sans-I/O state machine of one HTTP/2 connection (RFC 9113), for a server or a client.

``receive`` turns bytes into events. Every other method appends its bytes to ``outbound``. The core handles streams,
windows and limits; the connection decides when to read and write.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from ovmstrio.core.request import Buffer
from ovmstrio.transport.grpc import frames
from ovmstrio.transport.grpc.frames import (
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_RECEIVED_DATA_BYTES,
    MAX_STREAM_ID,
    MAX_WINDOW,
    PREFACE,
    ConnectionFault,
    ErrorCode,
    Flag,
    FrameType,
    Setting,
)
from ovmstrio.transport.grpc.headers import (
    TABLE_SIZE_ZERO,
    HeaderDecoder,
    HeaderList,
    MalformedRequest,
    RequestHead,
    check_trailers,
)
from ovmstrio.transport.grpc.limits import TransportLimits
from ovmstrio.transport.grpc.messages import MessageBuffer

# -- Partial frames ----------------------------------------------------------------------------------------------------


class PartialData(NamedTuple):
    """Partially received DATA frame: bytes still missing, flags and stream."""

    left: int
    flags: int
    stream_id: int


class PartialHeaderBlock:
    """Header block split over HEADERS and CONTINUATION frames."""

    __slots__ = ("_frames_left", "_limit", "data", "end_stream", "stream_id")

    def __init__(self, stream_id: int, end_stream: int, payload: bytes, limits: TransportLimits) -> None:
        self.stream_id = stream_id
        self.end_stream = end_stream
        self.data = bytearray(payload)
        self._limit = max(limits.max_header_list_bytes, MAX_FRAME_BYTES) * 2
        self._frames_left = limits.max_continuations

    def extend(self, payload: bytes) -> None:
        """Append the payload of a CONTINUATION frame; raises ``ConnectionFault`` above the frame or byte limit."""
        self._frames_left -= 1
        self.data += payload
        if self._frames_left < 0 or len(self.data) > self._limit:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_continuations")


# -- Peer settings (RFC 9113, 6.5) -------------------------------------------------------------------------------------

SETTING_BYTES: Final = 6
_DEFAULT_TABLE_BYTES: Final = 4_096
_LARGEST_FRAME_SETTING: Final = 2**24 - 1
_INITIAL_MAX_STREAMS: Final = 100
"""Streams that a client opens at most before it has received SETTINGS."""


class PeerSettings:
    """SETTINGS of one peer.

    ``table_update`` is the HPACK table size update that the next sent header block must begin with, or None.
    """

    __slots__ = ("_has_disabled_table", "max_frame_bytes", "max_streams", "table_update")

    def __init__(self) -> None:
        self.max_frame_bytes = MAX_FRAME_BYTES
        self.max_streams = _INITIAL_MAX_STREAMS
        self.table_update: bytes | None = None
        self._has_disabled_table = False

    def apply(self, payload: bytes) -> int | None:
        """Apply the entries of a SETTINGS frame and return INITIAL_WINDOW_SIZE, if present; raises ``ConnectionFault``.

        Parsing stops at an INITIAL_WINDOW_SIZE above the maximum; ``SendWindows.set_initial`` reports that error.
        """
        initial_window = None
        for start in range(0, len(payload), SETTING_BYTES):
            key, value = frames.parse_setting(payload, start)
            if key == Setting.INITIAL_WINDOW_SIZE:
                initial_window = value
                if value > MAX_WINDOW:
                    break
            else:
                self._apply_one(key, value)
        return initial_window

    def _apply_one(self, key: int, value: int) -> None:
        if key == Setting.MAX_FRAME_SIZE:
            if not MAX_FRAME_BYTES <= value <= _LARGEST_FRAME_SETTING:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value} is out of range")
            self.max_frame_bytes = min(value, frames.MAX_SENT_DATA_BYTES)
        elif key == Setting.ENABLE_PUSH:
            if value > 1:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH {value}: expected 0 or 1")
        elif key == Setting.MAX_CONCURRENT_STREAMS:
            self.max_streams = value
        elif key == Setting.HEADER_TABLE_SIZE and value < _DEFAULT_TABLE_BYTES and not self._has_disabled_table:
            self._has_disabled_table = True
            self.table_update = TABLE_SIZE_ZERO


# -- Send windows (RFC 9113, 5.2 and 6.9) ------------------------------------------------------------------------------

DEFAULT_WINDOW: Final = 65_535


class SendWindows:
    """Flow-control windows for sending on one connection.

    Attributes:
        initial: the peer's INITIAL_WINDOW_SIZE.
        opened: the connection window or INITIAL_WINDOW_SIZE has grown since the flag was last cleared.
    """

    __slots__ = ("_widest_stream", "connection", "initial", "opened")

    def __init__(self) -> None:
        self.connection = DEFAULT_WINDOW
        self.initial = DEFAULT_WINDOW
        self.opened = False
        self._widest_stream: StreamState | None = None

    def of(self, stream: StreamState) -> int:
        """Return the window of a stream in bytes; negative after INITIAL_WINDOW_SIZE was reduced."""
        return stream.credit + self.initial

    def grant_connection(self, increment: int) -> None:
        """Add a WINDOW_UPDATE to the connection window; raises ``ConnectionFault`` if it is 0 or overflows."""
        self.connection += increment
        if not increment or self.connection > MAX_WINDOW:
            raise ConnectionFault(window_update_error(increment), f"WINDOW_UPDATE by {increment} on the connection")
        self.opened = True

    def grant(self, stream: StreamState, increment: int) -> bool:
        """Add a WINDOW_UPDATE to a stream window; return False if it is 0 or overflows the window."""
        stream.credit += increment
        if not increment or stream.credit + self.initial > MAX_WINDOW:
            return False
        if (
            self._widest_stream is None
            or self._widest_stream.is_local_closed
            or stream.credit >= self._widest_stream.credit
        ):
            self._widest_stream = stream
        return True

    def set_initial(self, value: int) -> None:
        """Set INITIAL_WINDOW_SIZE; raises ``ConnectionFault`` if it or a resulting window exceeds 2**31 - 1.

        Only the stream with the largest credit is checked for overflow, so the cost does not depend on the stream
        count. If that stream has ended or sent data, an overflow of another stream is found by its next ``grant``.
        """
        if value > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value}")
        widest = self._widest_stream
        if widest is not None and not widest.is_local_closed and widest.credit + value > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value} overflows a window")
        if value > self.initial:
            self.opened = True
        self.initial = value


def window_update_error(increment: int) -> ErrorCode:
    """Return the error code for an invalid WINDOW_UPDATE increment."""
    return ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR


# -- Streams and events ------------------------------------------------------------------------------------------------


class StreamState:
    """One open stream: receive buffer, windows and closed directions.

    Attributes:
        content_left: bytes that are missing from a request with ``content-length``; None without it.
        credit: bytes granted beyond INITIAL_WINDOW_SIZE, minus bytes sent.
        is_starved: a sender waits for the stream window; cleared when ``WindowOpened`` is emitted.
    """

    __slots__ = (
        "buffer",
        "content_left",
        "credit",
        "is_local_closed",
        "is_remote_closed",
        "is_starved",
        "receive_window",
        "reset",
        "stream_id",
        "uncredited",
    )

    def __init__(self, stream_id: int, receive_window: int, content_length: int | None = None) -> None:
        self.stream_id = stream_id
        self.buffer = MessageBuffer()
        self.content_left = content_length
        self.receive_window = receive_window
        self.credit = 0
        self.is_starved = False
        self.uncredited = 0
        self.is_remote_closed = False
        self.is_local_closed = False
        self.reset = False


class ServerStream(StreamState):
    """Stream of a request, with its headers."""

    __slots__ = ("head",)

    head: RequestHead


@dataclass(slots=True)
class RequestStarted:
    """Complete request headers; the connection owns the stream until it calls ``release``."""

    stream: ServerStream


@dataclass(slots=True)
class HeadersReceived:
    """Response headers or trailers."""

    stream: StreamState
    headers: HeaderList


@dataclass(slots=True)
class DataReceived:
    """New data or end of stream."""

    stream: StreamState


@dataclass(slots=True)
class StreamReset:
    """Stream reset by the peer, or by the core after a protocol error on the stream."""

    stream: StreamState
    code: int


@dataclass(slots=True)
class WindowOpened:
    """More may be sent on one starved stream, or on all streams (None)."""

    stream: StreamState | None


@dataclass(slots=True)
class PingAcknowledged:
    """PING acknowledged by the peer."""

    payload: bytes


@dataclass(slots=True)
class GoAwayReceived:
    """GOAWAY received; the peer opens no more streams and ignores own streams after ``last_stream_id``."""

    last_stream_id: int


Event = RequestStarted | HeadersReceived | DataReceived | StreamReset | WindowOpened | PingAcknowledged | GoAwayReceived


# -- Rate limits -------------------------------------------------------------------------------------------------------


class RateLimit:
    """Rate limit of ``limit`` events per second, in windows that start with an event."""

    __slots__ = ("_clock", "_count", "_limit", "_window_start")

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._count = 0
        self._window_start = float("-inf")

    def exceeded(self, events: int = 1) -> bool:
        """Count events and return whether the limit is exceeded."""
        now = self._clock()
        if now - self._window_start >= 1.0:
            self._window_start = now
            self._count = 0
        self._count += events
        return self._count > self._limit

    def reset(self) -> None:
        """Reset the count."""
        self._count = 0


# -- Core of both roles ------------------------------------------------------------------------------------------------

_PRIORITY_BYTES: Final = 5
_ERROR_CODE_BYTES: Final = 4
_HEADERS_TYPE: Final = int(FrameType.HEADERS)
_HEADERS_FLAGS: Final = Flag.END_HEADERS
_TRAILERS_FLAGS: Final = Flag.END_HEADERS | Flag.END_STREAM
_LENGTH_BYTES: Final = 3
_FRAMES_PER_TURN: Final = 1_024
"""Frames handled per turn. A header block costs one per byte, because its one-byte fields cost more than a frame."""
_REQUEST_COST: Final = _FRAMES_PER_TURN // 16
"""Extra cost of a complete request, so that handlers of short calls run before further frames are parsed."""
_FULL_FRAME_BYTES: Final = 1_024
"""Minimum size of a DATA frame that is not limited by the peer's windows and justifies WINDOW_UPDATE frames."""
_MIN_VIEW_BYTES: Final = 8 * 1024
"""Minimum payload size for memoryviews. Smaller payloads are copied: a view would keep the complete read buffer alive,
and system calls over many small buffers are slower."""


class Http2Core:
    """HTTP/2 connection state of either role; ``settings`` are the role's own, in addition to those of both.

    Attributes:
        outbound: tail of the bytes to send; ``take_outbound`` returns all of them.
        streams: all streams that were not released, by stream id.
        windows: flow-control windows for sending.
        more: received frames are pending; call ``go_on``.
        ready: the peer's preface and first SETTINGS were received.
        draining: the final GOAWAY was sent; new streams are refused.
    """

    _early_end_code: ClassVar[ErrorCode]
    """Code of RST_STREAM after a complete sent message, when the received message is not complete."""

    def __init__(
        self, limits: TransportLimits, clock: Callable[[], float], settings: dict[Setting, int], preface: bytes = b""
    ) -> None:
        self._limits = limits
        self._max_control_bytes = max(MAX_FRAME_BYTES, limits.max_header_list_bytes)
        self._decoder = HeaderDecoder(limits.max_header_list_bytes)
        self._pending = bytearray()
        self._partial_data = PartialData(0, 0, 0)
        self._unread, self._unread_from = b"", 0
        self._turn_left = _FRAMES_PER_TURN
        self._preface_seen = bool(preface)
        self._events: list[Event] = []
        self._last_stream_id = 0
        self._peer = PeerSettings()
        self._receive_window = limits.connection_window_bytes
        self._uncredited_bytes = 0
        self._queued, self._queued_bytes = list[Buffer](), 0
        self._continued: PartialHeaderBlock | None = None
        self._reset_ids: OrderedDict[int, None] = OrderedDict()
        self._resets = RateLimit(limits.max_resets_per_second, clock)
        self._pings = RateLimit(limits.max_pings_per_second, clock)
        self._settings = RateLimit(limits.max_settings_per_second, clock)
        self._updates = RateLimit(limits.max_window_updates_per_second, clock)
        self._has_sent = False
        self._idle_frames = RateLimit(limits.max_idle_frames_per_second, clock)
        self._handlers: tuple[Callable[[int, int, bytes], None], ...] = (
            self._on_data,
            self._on_headers,
            self._on_priority,
            self._on_rst_stream,
            self._on_settings,
            self._on_push_promise,
            self._on_ping,
            self._on_goaway,
            self._on_window_update,
            self._on_continuation,
        )
        self.streams: dict[int, StreamState] = {}
        self.windows = SendWindows()
        self.more = self.ready = self.draining = False
        settings |= {
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            Setting.MAX_FRAME_SIZE: MAX_RECEIVED_DATA_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
        }
        self.outbound = bytearray(preface + frames.settings(settings))
        if limits.connection_window_bytes > DEFAULT_WINDOW:
            self.outbound += frames.window_update(0, limits.connection_window_bytes - DEFAULT_WINDOW)

    # -- Receiving -----------------------------------------------------------------------------------------------------

    def receive(self, data: bytes | bytearray) -> list[Event]:
        """Parse received bytes and return events.

        At most one turn of frames is handled. While ``more`` is true, the caller must call ``go_on``.

        Raises:
            ConnectionFault: protocol violation; the caller must call ``fail`` and close the connection.
        """
        data, position = bytes(data), 0
        self._turn_left = _FRAMES_PER_TURN
        if not self._preface_seen:
            data = bytes(self._pending) + data
            if not self._read_preface(data):
                return []
            self._pending, position = bytearray(), len(PREFACE)
        elif self._pending:
            position = self._complete_frame(data)
        elif self._partial_data.left:
            position = self._continue_data(data, 0)
        if position < len(data):
            self._read_frames(data, position)
        return self._take_events()

    def go_on(self) -> list[Event]:
        """Handle the next turn of pending frames; like ``receive``."""
        data, self._unread = self._unread, b""
        self._turn_left = _FRAMES_PER_TURN
        self.more = False
        self._read_frames(data, self._unread_from)
        return self._take_events()

    def _take_events(self) -> list[Event]:
        if self.windows.opened:
            self.windows.opened = False
            self._events.append(WindowOpened(None))
        events, self._events = self._events, []
        return events

    def _complete_frame(self, data: bytes) -> int:
        """Complete and handle a partial frame; return how many bytes of ``data`` belong to it."""
        pending, position = self._pending, 0
        if len(pending) < FRAME_HEADER_BYTES:
            position = FRAME_HEADER_BYTES - len(pending)
            pending += data[:position]
            if len(pending) < FRAME_HEADER_BYTES:
                return len(data)
        length = int.from_bytes(pending[:_LENGTH_BYTES])
        frames.check_frame_size(length, pending[_LENGTH_BYTES], self._max_control_bytes)
        end = position + FRAME_HEADER_BYTES + length - len(pending)
        if self._is_partial_data(pending, position, len(data)):
            return self._continue_data(data, position)
        pending += data[position:end]
        if end > len(data):
            return len(data)
        self._pending = bytearray()
        self._read_frames(bytes(pending), 0)
        return end

    def _is_partial_data(self, header: bytes | bytearray, position: int, size: int) -> bool:
        """Return whether the header starts a large, incomplete DATA frame, which is handled as its parts arrive."""
        high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(header)
        length = high << 16 | low
        is_whole = len(header) > FRAME_HEADER_BYTES or position + length <= size
        if is_whole or kind or flags & Flag.PADDED or length < _MIN_VIEW_BYTES or self._continued is not None:
            return False
        if not self.ready:
            self._check_order(kind, flags)
        self._pending = bytearray()
        self._partial_data = PartialData(length, flags, stream_id & MAX_STREAM_ID)
        return True

    def _continue_data(self, data: bytes, position: int) -> int:
        """Handle the next part of a DATA frame; return its end in ``data``."""
        left, flags, stream_id = self._partial_data
        part: bytes | memoryview = memoryview(data)[position : position + left]
        if len(part) < _MIN_VIEW_BYTES:
            part = bytes(part)
        left -= len(part)
        self._partial_data = PartialData(left, flags, stream_id)
        if part:
            self._on_data(flags & ~Flag.END_STREAM if left else flags, stream_id, part)
        return position + len(part)

    def _read_frames(self, data: bytes, position: int) -> None:
        """Handle one turn of complete frames and keep the rest; large DATA frames may be incomplete."""
        size = len(data)
        unpack, handlers, view = FRAME_HEADER.unpack_from, self._handlers, memoryview(data)
        while size - position >= FRAME_HEADER_BYTES:
            if self._turn_left <= 0:
                self._unread, self._unread_from, self.more = data, position, True
                return
            self._turn_left -= 1
            high, low, kind, flags, stream_id = unpack(data, position)
            if high or low > MAX_FRAME_BYTES:
                low |= high << 16
                frames.check_frame_size(low, kind, self._max_control_bytes)
            start = position + FRAME_HEADER_BYTES
            end = start + low
            if end > size:
                if low >= _MIN_VIEW_BYTES and self._is_partial_data(data[position:start], start, size):
                    self._continue_data(data, start)
                    return
                break
            position = end
            if not self.ready or self._continued is not None:
                self._check_order(kind, flags)
            if kind < len(handlers):
                payload = view[start:end] if low >= _MIN_VIEW_BYTES and not kind else data[start:end]
                handlers[kind](flags, stream_id & MAX_STREAM_ID, payload)
            else:
                self._count_idle_frame()
        self._pending = bytearray(data[position:])

    def _read_preface(self, data: bytes) -> bool:
        if data[: len(PREFACE)] != PREFACE[: len(data)]:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "connection does not begin with the HTTP/2 preface")
        self._pending = bytearray(data)
        self._preface_seen = len(data) >= len(PREFACE)
        return self._preface_seen

    def _check_order(self, kind: int, flags: int) -> None:
        if self._continued is not None:
            if kind != FrameType.CONTINUATION:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted by another frame")
        elif kind != FrameType.SETTINGS or flags & Flag.ACK:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        else:
            self.ready = True

    # -- Frames of streams ---------------------------------------------------------------------------------------------

    def _on_data(self, flags: int, stream_id: int, payload: bytes | memoryview) -> None:
        size = len(payload)
        self._receive_window -= size
        if self._receive_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA exceeds the connection's window")
        stream = self.streams.get(stream_id)
        if stream is None or stream.is_remote_closed:
            self._on_stray_data(stream_id, size, stream)
            return
        if flags & Flag.PADDED:
            payload = frames.strip_padding(payload)
        stream.receive_window -= size
        if stream.receive_window < 0:
            self._credit_connection(size)
            self._stream_error(stream, ErrorCode.FLOW_CONTROL_ERROR)
            return
        stream.uncredited += size
        if payload:
            stream.buffer.append(payload)
        elif not flags & Flag.END_STREAM:
            self._count_idle_frame()
        if size != len(payload):
            self.consume(stream, size - len(payload))
        if stream.content_left is not None:
            stream.content_left -= len(payload)
        if flags & Flag.END_STREAM:
            self._end_received(stream)
        else:
            self._emit_data_received(stream)

    def _emit_data_received(self, stream: StreamState) -> None:
        """Emit ``DataReceived``, once for consecutive frames of a stream."""
        last = self._events[-1] if self._events else None
        if not isinstance(last, DataReceived) or last.stream is not stream:
            self._events.append(DataReceived(stream))

    def _on_stray_data(self, stream_id: int, size: int, stream: StreamState | None) -> None:
        self._credit_connection(size)
        if stream_id > self._last_stream_id or not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which is not open")
        if stream_id in self._reset_ids:
            return
        if stream is not None:
            self._stream_error(stream, ErrorCode.STREAM_CLOSED)
        else:
            self._reset_unknown(stream_id, ErrorCode.STREAM_CLOSED)

    def _end_received(self, stream: StreamState) -> None:
        self._turn_left -= _REQUEST_COST
        stream.is_remote_closed = True
        if stream.content_left:
            self._stream_error(stream, ErrorCode.PROTOCOL_ERROR)
            return
        self._events.append(DataReceived(stream))

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & Flag.PADDED:
            payload = bytes(frames.strip_padding(payload))
        if flags & Flag.PRIORITY:
            if len(payload) < _PRIORITY_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS is too short for its priority fields")
            payload = payload[_PRIORITY_BYTES:]
        if flags & Flag.END_HEADERS:
            self._on_header_block(stream_id, payload, flags & Flag.END_STREAM)
        else:
            self._continued = PartialHeaderBlock(stream_id, flags & Flag.END_STREAM, payload, self._limits)

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._continued
        if block is None or block.stream_id != stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without its HEADERS")
        block.extend(payload)
        if flags & Flag.END_HEADERS:
            self._continued = None
            self._on_header_block(stream_id, bytes(block.data), block.end_stream)

    def _on_header_block(self, stream_id: int, block: bytes, end_stream: int) -> None:
        """Handle the complete header block of the role's peer."""
        raise NotImplementedError

    def _stream_of_headers(self, stream_id: int) -> StreamState | None:
        """Return the open stream of later headers, None if it was reset; raises ``ConnectionFault`` if it is closed."""
        if stream_id in self._reset_ids:
            return None
        stream = self.streams.get(stream_id)
        if stream is None or stream.is_remote_closed:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id}, which is closed")
        return stream

    def _on_rst_stream(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != _ERROR_CODE_BYTES:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM is not four bytes long")
        self._check_not_idle(stream_id, "RST_STREAM")
        self._count_reset()
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.reset:
            self._close_reset(stream)
            self._events.append(StreamReset(stream, int.from_bytes(payload)))

    def _on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:  # noqa: PLR2004  # a 32-bit number
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE is not four bytes long")
        increment = int.from_bytes(payload, "big") & MAX_WINDOW
        self._forgive_after_data()
        if self._updates.exceeded():
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_window_updates")
        if not stream_id:
            self.windows.grant_connection(increment)
            return
        self._check_not_idle(stream_id, "WINDOW_UPDATE")
        stream = self.streams.get(stream_id)
        if stream is None or stream.reset:
            return
        if not self.windows.grant(stream, increment):
            self._stream_error(stream, window_update_error(increment))
        elif stream.is_starved and self.windows.of(stream) > 0:
            stream.is_starved = False
            self._events.append(WindowOpened(stream))

    def _on_priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        if len(payload) != _PRIORITY_BYTES:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is not five bytes long")
        self._count_idle_frame()

    def _on_push_promise(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE is not allowed")

    # -- Frames of the connection --------------------------------------------------------------------------------------

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if len(payload) % SETTING_BYTES or (flags & Flag.ACK and payload):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "invalid SETTINGS length")
        if self._settings.exceeded(max(1, len(payload) // SETTING_BYTES)):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_settings")
        if flags & Flag.ACK:
            return
        if (initial_window := self._peer.apply(payload)) is not None:
            self.windows.set_initial(initial_window)
        self.outbound += frames.settings_ack()

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:  # noqa: PLR2004  # RFC 9113, 6.7
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING is not eight bytes long")
        if flags & Flag.ACK:
            self._count_idle_frame()
            self._events.append(PingAcknowledged(payload))
            return
        self._forgive_after_data()
        if self._pings.exceeded():
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        self.outbound += frames.ping(payload, ack=True)

    def _on_goaway(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:  # noqa: PLR2004  # last stream and code
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is too short")
        self._count_idle_frame()
        self._events.append(GoAwayReceived(int.from_bytes(payload[:4]) & MAX_STREAM_ID))

    # -- Sending -------------------------------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes to send."""
        return self._queued_bytes + len(self.outbound)

    def take_outbound(self) -> list[Buffer]:
        """Return and clear all buffers to send."""
        taken, self._queued, self._queued_bytes = self._queued, [], 0
        if self.outbound:
            taken.append(self.outbound)
            self.outbound = bytearray()
        return taken

    def return_outbound(self, buffers: list[Buffer]) -> None:
        """Queue taken buffers again, before all others."""
        self._queued[:0] = buffers
        self._queued_bytes += sum(map(len, buffers))

    def sendable(self, stream: StreamState) -> int:
        """Return how many bytes one DATA frame may carry now; zero or negative if none."""
        windows = self.windows
        return min(stream.credit + windows.initial, windows.connection, self._peer.max_frame_bytes)

    def send_headers(self, stream: StreamState, block: bytes, *, end_stream: bool = False) -> None:
        """Send response headers, or trailers if ``end_stream``."""
        peer = self._peer
        if peer.table_update is not None:
            block, peer.table_update = peer.table_update + block, None
        if (size := len(block)) <= MAX_FRAME_BYTES:
            out = self.outbound
            out += FRAME_HEADER.pack(
                0, size, _HEADERS_TYPE, _TRAILERS_FLAGS if end_stream else _HEADERS_FLAGS, stream.stream_id
            )
            out += block
        else:
            self.outbound += frames.header_frames(stream.stream_id, block, peer.max_frame_bytes, end_stream=end_stream)
        if end_stream:
            stream.is_local_closed = True

    def send_answer(
        self, stream: StreamState, headers: bytes, prefix: bytes, payload: bytes | memoryview, max_unsent_bytes: int
    ) -> bool:
        """Send response headers (unless empty) and a message in one DATA frame, or send nothing and return False.

        Nothing is sent if ``max_unsent_bytes`` bytes are already queued, or if a window is too small.
        """
        if len(prefix) + len(payload) > self.sendable(stream) or self.unsent_bytes >= max_unsent_bytes:
            return False
        if headers:
            self.send_headers(stream, headers)
        self.send_data(stream, prefix, payload)
        return True

    def send_data(self, stream: StreamState, prefix: bytes, payload: bytes | memoryview) -> None:
        """Send one DATA frame of at most ``sendable(stream)`` bytes.

        A payload of 8 KiB or more is not copied and must not change until it is sent.
        """
        size = len(prefix) + len(payload)
        stream.credit -= size
        self.windows.connection -= size
        out = self.outbound
        out += FRAME_HEADER.pack(size >> 16, size & 0xFFFF, FrameType.DATA, 0, stream.stream_id)
        out += prefix
        if len(payload) < _MIN_VIEW_BYTES:
            out += payload
        else:
            self._queued_bytes += len(out) + len(payload)
            self._queued += (out, payload)
            self.outbound = bytearray()
        if prefix or size >= _FULL_FRAME_BYTES:
            self._has_sent = True

    def consume(self, stream: StreamState, size: int) -> None:
        """Credit ``size`` consumed bytes to the receive windows of stream and connection."""
        stream.uncredited -= size
        self._credit_connection(size)
        window = self._limits.stream_window_bytes
        owed = window - stream.receive_window - stream.uncredited
        if owed * 2 >= window and not stream.is_remote_closed:
            stream.receive_window += owed
            self.outbound += frames.window_update(stream.stream_id, owed)

    def release(self, stream: StreamState) -> None:
        """Remove a stream; reset it if it is still open."""
        if not stream.reset and not (stream.is_local_closed and stream.is_remote_closed):
            self.reset(stream, self._early_end_code if stream.is_local_closed else ErrorCode.CANCEL)
        if stream.uncredited:
            self._credit_connection(stream.uncredited)
            stream.uncredited = 0
        self.streams.pop(stream.stream_id, None)

    def reset(self, stream: StreamState, code: ErrorCode) -> None:
        """Reset a stream with RST_STREAM."""
        self.outbound += frames.rst_stream(stream.stream_id, code)
        self._close_reset(stream)

    def send_ping(self, payload: bytes) -> None:
        """Send a PING."""
        self.outbound += frames.ping(payload, ack=False)

    def fail(self, fault: ConnectionFault) -> None:
        """Send GOAWAY with the error."""
        self._send_goaway(fault.code, fault.reason.encode("utf-8", "replace"))

    def _send_goaway(self, code: ErrorCode, debug: bytes = b"") -> None:
        """Send GOAWAY with the last stream id of the peer; later streams are refused."""
        self.draining = True
        self.outbound += frames.goaway(self._last_stream_id, code, debug)

    def _credit_connection(self, size: int) -> None:
        self._uncredited_bytes += size
        if self._uncredited_bytes * 2 >= self._limits.connection_window_bytes:
            self.outbound += frames.window_update(0, self._uncredited_bytes)
            self._receive_window += self._uncredited_bytes
            self._uncredited_bytes = 0

    def _stream_error(self, stream: StreamState, code: ErrorCode) -> None:
        self._count_reset()
        already_reset = stream.reset
        self.reset(stream, code)
        if not already_reset:
            self._events.append(StreamReset(stream, code))

    def _close_reset(self, stream: StreamState) -> None:
        stream.reset = stream.is_remote_closed = stream.is_local_closed = True
        stream.buffer.clear()
        self._remember_reset(stream.stream_id)

    def _reset_unknown(self, stream_id: int, code: ErrorCode) -> None:
        self._count_reset()
        self.outbound += frames.rst_stream(stream_id, code)
        self._remember_reset(stream_id)

    def _remember_reset(self, stream_id: int) -> None:
        self._reset_ids[stream_id] = None
        if len(self._reset_ids) > 4 * self._limits.max_concurrent_streams:
            self._reset_ids.popitem(last=False)

    def _check_not_idle(self, stream_id: int, what: str) -> None:
        if stream_id > self._last_stream_id or not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{what} on stream {stream_id}, which is idle")

    def _forgive_after_data(self) -> None:
        """Reset the PING and WINDOW_UPDATE rate limits after sent data, because peers answer data with both."""
        if self._has_sent:
            self._has_sent = False
            self._pings.reset()
            self._updates.reset()

    def _count_reset(self) -> None:
        if self._resets.exceeded():
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_resets")

    def _count_idle_frame(self) -> None:
        if self._idle_frames.exceeded():
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_empty_frames")


# -- Server ------------------------------------------------------------------------------------------------------------


class ServerCore(Http2Core):
    """Core of a server: opens a stream for each request."""

    # After a complete response, NO_ERROR asks the client to stop sending its request (RFC 9113, 8.1).
    _early_end_code = ErrorCode.NO_ERROR

    def __init__(self, limits: TransportLimits, clock: Callable[[], float]) -> None:
        super().__init__(limits, clock, {Setting.MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams})

    def announce_drain(self) -> None:
        """Send the first GOAWAY of a graceful shutdown; streams already sent by the peer are served."""
        self.outbound += frames.goaway(MAX_STREAM_ID, ErrorCode.NO_ERROR)

    def drain(self) -> None:
        """Send the final GOAWAY with the last stream id; later streams are refused."""
        self._send_goaway(ErrorCode.NO_ERROR)

    def _on_header_block(self, stream_id: int, block: bytes, end_stream: int) -> None:
        self._turn_left -= len(block)
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}, an even number")
        if stream_id > self._last_stream_id:
            self._open_stream(stream_id, self._decoder.request(block), end_stream)
            return
        trailers = self._decoder.header_list(block)
        stream = self._stream_of_headers(stream_id)
        if stream is None:
            return
        try:
            check_trailers(trailers)
        except MalformedRequest:
            end_stream = 0
        if end_stream:
            self._end_received(stream)
        else:
            self._stream_error(stream, ErrorCode.PROTOCOL_ERROR)

    def _open_stream(self, stream_id: int, head: RequestHead | MalformedRequest, end_stream: int) -> None:
        self._last_stream_id = stream_id
        if self.draining or len(self.streams) >= self._limits.max_concurrent_streams:
            if not self.draining:
                self._count_reset()
            self.outbound += frames.rst_stream(stream_id, ErrorCode.REFUSED_STREAM)
            self._remember_reset(stream_id)
            return
        if isinstance(head, MalformedRequest):
            self._reset_unknown(stream_id, ErrorCode.PROTOCOL_ERROR)
            return
        stream = ServerStream(stream_id, self._limits.stream_window_bytes, head.content_length)
        stream.head = head
        self.streams[stream_id] = stream
        self._events.append(RequestStarted(stream))
        if end_stream:
            self._end_received(stream)


# -- Client ------------------------------------------------------------------------------------------------------------


class ClientCore(Http2Core):
    """Core of a client: opens a stream for each call, which the connection owns until it calls ``release``."""

    _early_end_code = ErrorCode.CANCEL

    def __init__(self, limits: TransportLimits, clock: Callable[[], float]) -> None:
        super().__init__(limits, clock, {Setting.ENABLE_PUSH: 0}, PREFACE)

    @property
    def has_room(self) -> bool:
        """True if the server accepts another concurrent stream."""
        return len(self.streams) < self._peer.max_streams

    @property
    def is_exhausted(self) -> bool:
        """True if all stream ids of the connection were used."""
        return self._last_stream_id + 2 > MAX_STREAM_ID

    def begin(self, block: bytes) -> StreamState:
        """Open a stream and send its request headers."""
        self._last_stream_id += 2 if self._last_stream_id else 1
        stream = self.streams[self._last_stream_id] = StreamState(
            self._last_stream_id, self._limits.stream_window_bytes
        )
        self.send_headers(stream, block)
        return stream

    def end_request(self, stream: StreamState) -> None:
        """Send the end of a request after its message."""
        stream.is_local_closed = True
        self.outbound += FRAME_HEADER.pack(0, 0, FrameType.DATA, Flag.END_STREAM, stream.stream_id)

    def _on_header_block(self, stream_id: int, block: bytes, end_stream: int) -> None:
        self._turn_left -= len(block)
        self._check_not_idle(stream_id, "HEADERS")
        headers = self._decoder.response(block)
        stream = self._stream_of_headers(stream_id)
        if stream is None:
            return
        self._events.append(HeadersReceived(stream, headers))
        if end_stream:
            self._end_received(stream)

    def _close_reset(self, stream: StreamState) -> None:
        if not stream.is_remote_closed:
            super()._close_reset(stream)
            return
        # A server may reset the rest of a request after a complete response, which remains valid (RFC 9113, 8.1).
        stream.reset = stream.is_local_closed = True
        self._remember_reset(stream.stream_id)

    def _send_goaway(self, code: ErrorCode, debug: bytes = b"") -> None:
        self.outbound += frames.goaway(0, code, debug)
