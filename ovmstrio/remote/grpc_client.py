"""HTTP/2 client for unary gRPC calls: a core without I/O, and a trio connection.

::

    begin, send, reset ──> out ──> bytes to the server
    bytes of the server ──> feed ──> finished exchanges, opened windows

Received message parts are copied once, to their final position.  Sent buffers are not copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import hpack
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.core.request import Buffer

# HTTP/2 core

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER_BYTES: Final = 9
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_REFUSED_STREAM: Final = 7
_CANCEL: Final = 8
_DEFAULT_WINDOW: Final = 65_535
_DEFAULT_FRAME_BYTES: Final = 16_384
_MAX_WINDOW: Final = 2**31 - 1
_RECEIVE_WINDOW: Final = 8 * 2**20
_CONNECTION_RECEIVE_WINDOW: Final = 32 * 2**20
_MAX_FRAME_BYTES: Final = 2**20
_MAX_HEADER_BYTES: Final = 64 * 1024
_MAX_HEADER_FRAMES: Final = 64
_PREFIX_BYTES: Final = 5
_MAX_STREAM_ID: Final = 2**31 - 3


class ProtocolViolation(Exception):
    """Violation of HTTP/2 by the server; the connection is unusable."""


class Exchange:
    """State of one call.

    Attributes:
        id: stream id.
        window: send window in bytes.
        most: most bytes of the response message.
        headers: response headers and trailers.
        message: received part of the message.
        ended: set when the exchange has ended.
        failure: reason of an end before the trailers; empty otherwise.
        is_sent: whether the complete request was passed to the connection.
        is_untouched: whether the server did not process the call.
        is_too_large: whether the message exceeds ``most``; ``size`` is its size.
    """

    __slots__ = (
        "_filled",
        "_prefix",
        "_unacknowledged",
        "ended",
        "failure",
        "headers",
        "id",
        "is_sent",
        "is_too_large",
        "is_untouched",
        "message",
        "most",
        "size",
        "window",
    )

    def __init__(self, number: int, window: int, most: float) -> None:
        self.id = number
        self.window = window
        self.most = most
        self.headers: dict[str, str] = {}
        self.message: bytearray | None = None
        self.ended = trio.Event()
        self.failure = ""
        self.is_sent = False
        self.is_untouched = False
        self.is_too_large = False
        self.size = 0
        self._prefix = b""
        self._filled = 0
        self._unacknowledged = 0

    @property
    def is_whole(self) -> bool:
        """Whether exactly one complete message was received."""
        return self.message is not None and self._filled == len(self.message)

    def take(self, data: memoryview) -> None:
        """Store a part of the response body."""
        if self.message is None:
            missing = _PREFIX_BYTES - len(self._prefix)
            self._prefix += bytes(data[:missing])
            data = data[missing:]
            if len(self._prefix) < _PREFIX_BYTES:
                return
            if self._prefix[0]:
                raise ProtocolViolation("compressed message without request for compression")
            self.size = int.from_bytes(self._prefix[1:], "big")
            if self.size > self.most:
                self.is_too_large = True
                return
            self.message = bytearray(self.size)
        end = self._filled + len(data)
        if end > len(self.message):
            raise ProtocolViolation("more than one message received")
        self.message[self._filled : end] = data
        self._filled = end

    def acknowledge(self, size: int) -> int:
        """Count consumed bytes; return the increment of a due WINDOW_UPDATE, or 0."""
        self._unacknowledged += size
        if self._unacknowledged < _RECEIVE_WINDOW // 2:
            return 0
        increment, self._unacknowledged = self._unacknowledged, 0
        return increment


def encode_literal_header(name: bytes, value: bytes) -> bytes:
    """Encode a header without dynamic table, so that the bytes can be reused."""
    sizes = (hpack.hpack.encode_integer(len(each), 7) for each in (name, value))
    return b"\0" + next(sizes) + name + next(sizes) + value


class ClientCore:
    """Client side of one HTTP/2 connection, without I/O.

    Attributes:
        out: buffers to send, in order; the sender removes them.
        exchanges: open calls by stream id.
        window: send window of the connection in bytes.
        most_streams: most concurrent calls.
        frame: most bytes of a DATA frame.
        last: last stream id that the server will process, None before GOAWAY.
        received: number of received bytes.
    """

    def __init__(self) -> None:
        self.out: list[Buffer] = [
            _PREFACE,
            _settings(),
            _window_update(0, _CONNECTION_RECEIVE_WINDOW - _DEFAULT_WINDOW),
        ]
        self.exchanges: dict[int, Exchange] = {}
        self.window = _DEFAULT_WINDOW
        self.most_streams = 100
        self.frame = _DEFAULT_FRAME_BYTES
        self.last: int | None = None
        self.received = 0
        self._decoder = hpack.Decoder(_MAX_HEADER_BYTES)
        self._stream_window = _DEFAULT_WINDOW
        self._next_id = 1
        self._rest = b""
        self._unacknowledged = 0
        self._data_left = 0
        self._data_stream = 0
        self._data_ends = False
        self._block: list[bytes] = []
        self._block_stream = 0
        self._block_ends = False

    @property
    def has_room(self) -> bool:
        """Whether another call may start now."""
        return len(self.exchanges) < self.most_streams

    @property
    def accepts_calls(self) -> bool:
        """Whether the connection accepts new calls."""
        return self.last is None and self._next_id < _MAX_STREAM_ID

    def begin(self, block: bytes, most: float) -> Exchange:
        """Start a call with headers encoded by :func:`encode_literal_header`."""
        exchange = Exchange(self._next_id, self._stream_window, most)
        self._next_id += 2
        self.exchanges[exchange.id] = exchange
        self.out.append(_frame_header(_HEADERS, _END_HEADERS, exchange.id, len(block)) + block)
        return exchange

    def send(self, exchange: Exchange, parts: Sequence[Buffer], size: int, *, ends: bool) -> None:
        """Send a part of a body within the windows; the buffers must stay unchanged until sent."""
        self.window -= size
        exchange.window -= size
        exchange.is_sent = ends
        self.out.append(_frame_header(_DATA, _END_STREAM if ends else 0, exchange.id, size))
        self.out += parts

    def reset(self, exchange: Exchange) -> None:
        """Cancel a call, or the rest of a request that was answered early."""
        is_open = self.exchanges.pop(exchange.id, None) is not None
        if is_open or not (exchange.is_sent or exchange.failure):
            self.out.append(_frame_header(_RST_STREAM, 0, exchange.id, 4) + _CANCEL.to_bytes(4, "big"))
        exchange.ended.set()

    def feed(self, data: bytes) -> None:
        """Process received bytes; ProtocolViolation makes the core unusable."""
        self.received += len(data)
        view = memoryview(self._rest + data if self._rest else data)
        position = 0
        while True:
            if self._data_left:
                position = self._feed_data(view, position)
            if self._data_left or len(view) - position < _FRAME_HEADER_BYTES:
                break
            head = view[position : position + _FRAME_HEADER_BYTES]
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            stream = int.from_bytes(head[5:], "big") & _MAX_WINDOW
            if length > (_MAX_FRAME_BYTES if kind == _DATA else _MAX_HEADER_BYTES):
                raise ProtocolViolation(f"frame of {length} bytes is too large")
            if self._block and (kind != _CONTINUATION or stream != self._block_stream):
                raise ProtocolViolation("header block interrupted by another frame")
            if kind == _DATA and not flags & _PADDED:
                position += _FRAME_HEADER_BYTES
                self._begin_data(stream, length, ends=bool(flags & _END_STREAM))
                continue
            if len(view) - position < _FRAME_HEADER_BYTES + length:
                break
            payload = view[position + _FRAME_HEADER_BYTES : position + _FRAME_HEADER_BYTES + length]
            position += _FRAME_HEADER_BYTES + length
            handler = self._HANDLERS.get(kind)
            if handler is not None:  # unknown frame types are ignored
                handler(self, flags, stream, payload)
        self._rest = bytes(view[position:])

    def fail(self, reason: str) -> None:
        """End all calls because the connection ended."""
        self.last = self.last or 0
        for exchange in self.exchanges.values():
            exchange.failure = reason
            exchange.ended.set()
        self.exchanges.clear()

    # Frames

    def _padded_data(self, flags: int, stream: int, payload: memoryview) -> None:
        inner = _unpadded(payload, flags)
        self._credit(len(payload) - len(inner), None)
        self._begin_data(stream, len(inner), ends=bool(flags & _END_STREAM))
        if inner:
            self._feed_data(inner, 0)

    def _begin_headers(self, flags: int, stream: int, payload: memoryview) -> None:
        inner = _unpadded(payload, flags)
        self._block_stream = stream
        self._block_ends = bool(flags & _END_STREAM)
        self._add_headers(bytes(inner[5:] if flags & _PRIORITY else inner), flags)

    def _continue_headers(self, flags: int, stream: int, payload: memoryview) -> None:
        del stream
        if not self._block:
            raise ProtocolViolation("CONTINUATION without HEADERS")
        self._add_headers(bytes(payload), flags)

    def _answer_ping(self, flags: int, stream: int, payload: memoryview) -> None:
        del stream
        if not flags & _ACK:
            self.out.append(_frame_header(_PING, _ACK, 0, len(payload)) + bytes(payload))

    def _refuse_push(self, flags: int, stream: int, payload: memoryview) -> None:
        del flags, stream, payload
        raise ProtocolViolation("PUSH_PROMISE although push is disabled")

    def _begin_data(self, stream: int, length: int, *, ends: bool) -> None:
        self._data_stream, self._data_left, self._data_ends = stream, length, ends
        if not length and ends:
            self._end(stream)

    def _feed_data(self, view: memoryview, position: int) -> int:
        size = min(self._data_left, len(view) - position)
        exchange = self.exchanges.get(self._data_stream)
        self._data_left -= size
        if exchange is not None:
            exchange.take(view[position : position + size])
            if exchange.is_too_large:
                self.reset(exchange)
                exchange = None
        self._credit(size, exchange)
        if not self._data_left and self._data_ends:
            self._end(self._data_stream)
        return position + size

    def _credit(self, size: int, exchange: Exchange | None) -> None:
        self._unacknowledged += size
        if self._unacknowledged >= _CONNECTION_RECEIVE_WINDOW // 2:
            self.out.append(_window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        if exchange is not None and (increment := exchange.acknowledge(size)):
            self.out.append(_window_update(exchange.id, increment))

    def _add_headers(self, block: bytes, flags: int) -> None:
        self._block.append(block)
        if len(self._block) > _MAX_HEADER_FRAMES or sum(map(len, self._block)) > _MAX_HEADER_BYTES:
            raise ProtocolViolation("response headers are too large")
        if not flags & _END_HEADERS:
            return
        try:
            headers = self._decoder.decode(b"".join(self._block))
        except hpack.HPACKError as error:
            raise ProtocolViolation(f"malformed headers: {error}") from None
        self._block = []
        exchange = self.exchanges.get(self._block_stream)
        if exchange is not None:
            exchange.headers |= {str(name): str(value) for name, value in headers}
        if self._block_ends:
            self._end(self._block_stream)

    def _end(self, stream: int) -> None:
        exchange = self.exchanges.pop(stream, None)
        if exchange is not None:
            exchange.ended.set()

    def _reset_by_peer(self, flags: int, stream: int, payload: memoryview) -> None:
        del flags
        code = _number(payload, 4)
        exchange = self.exchanges.pop(stream, None)
        if exchange is not None:
            exchange.is_untouched = code == _REFUSED_STREAM
            exchange.failure = f"the server reset the call (code {code})"
            exchange.ended.set()

    def _go_away(self, flags: int, stream: int, payload: memoryview) -> None:
        del flags, stream
        self.last = _number(payload[:4], 4) & _MAX_WINDOW
        for number in [number for number in self.exchanges if number > self.last]:
            exchange = self.exchanges.pop(number)
            exchange.is_untouched = True
            exchange.failure = "the server takes no more calls on this connection"
            exchange.ended.set()

    def _take_settings(self, flags: int, stream: int, payload: memoryview) -> None:
        del stream
        if flags & _ACK:
            return
        for start in range(0, len(payload) - 5, 6):
            key, value = int.from_bytes(payload[start : start + 2], "big"), _number(payload[start + 2 : start + 6], 4)
            if key == 3:  # noqa: PLR2004 - SETTINGS_MAX_CONCURRENT_STREAMS
                self.most_streams = value
            elif key == 4:  # noqa: PLR2004 - SETTINGS_INITIAL_WINDOW_SIZE
                for exchange in self.exchanges.values():
                    exchange.window += value - self._stream_window
                self._stream_window = value
            elif key == 5:  # noqa: PLR2004 - SETTINGS_MAX_FRAME_SIZE
                self.frame = max(_DEFAULT_FRAME_BYTES, min(value, _MAX_FRAME_BYTES))
        self.out.append(_frame_header(_SETTINGS, _ACK, 0, 0))

    def _open_window(self, flags: int, stream: int, payload: memoryview) -> None:
        del flags
        size = _number(payload, 4) & _MAX_WINDOW
        if not stream:
            self.window = min(self.window + size, _MAX_WINDOW)
        elif stream in self.exchanges:
            exchange = self.exchanges[stream]
            exchange.window = min(exchange.window + size, _MAX_WINDOW)

    _HANDLERS: Final[Mapping[int, Callable[[ClientCore, int, int, memoryview], None]]] = {
        _DATA: _padded_data,
        _HEADERS: _begin_headers,
        _RST_STREAM: _reset_by_peer,
        _SETTINGS: _take_settings,
        _PUSH: _refuse_push,
        _PING: _answer_ping,
        _GOAWAY: _go_away,
        _WINDOW: _open_window,
        _CONTINUATION: _continue_headers,
    }


def _frame_header(kind: int, flags: int, stream: int, length: int) -> bytes:
    return length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")


def _settings() -> bytes:
    pairs = ((2, 0), (4, _RECEIVE_WINDOW), (5, _MAX_FRAME_BYTES))
    payload = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in pairs)
    return _frame_header(_SETTINGS, 0, 0, len(payload)) + payload


def _window_update(stream: int, size: int) -> bytes:
    return _frame_header(_WINDOW, 0, stream, 4) + size.to_bytes(4, "big")


def _number(payload: memoryview, size: int) -> int:
    if len(payload) != size:
        raise ProtocolViolation("frame has the wrong size")
    return int.from_bytes(payload, "big")


def _unpadded(payload: memoryview, flags: int) -> memoryview:
    if not flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolViolation("padding exceeds the frame")
    return payload[1 : len(payload) - payload[0]]


# Connection

_READ_BYTES: Final = 256 * 1024
_MAX_JOINED_BYTES: Final = 64 * 1024
_MAX_UNSENT_BYTES: Final = 2**20


class RemoteConnection:
    """HTTP/2 connection for unary calls: a reader task, a writer task, and callers that wait for exchanges.

    :meth:`run` closes the stream at its end.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._core = ClientCore()
        self._has_output = trio.Event()
        self._progress = trio.Event()
        self._unsent = 0
        self._scope = trio.CancelScope()
        self._close_reason = ""

    @property
    def accepts_calls(self) -> bool:
        """Whether the connection accepts new calls."""
        return not self._close_reason and self._core.accepts_calls

    @property
    def received(self) -> int:
        """Number of received bytes."""
        return self._core.received

    def break_off(self, reason: str) -> None:
        """Close the connection and fail all its calls with the reason."""
        self._close_reason = self._close_reason or reason
        self._scope.cancel()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read and write until the connection ends; then all calls have ended."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    task_status.started()
                    await self._read()
        finally:
            self._close_reason = self._close_reason or "the connection was closed"
            self._core.fail(self._close_reason)
            self._wake_all()
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self._stream)

    async def call(self, headers: bytes, body: Sequence[Buffer], most: float) -> Exchange:
        """Make a call and return its exchange after it has ended; cancellation cancels the call on the server.

        ``headers`` is a block of literals, ``body`` the framed message in pieces, which must stay unchanged until this
        returns.  The server did not process an exchange with ``is_untouched``; its ``id`` is 0 if nothing was sent.
        """
        while self.accepts_calls and not self._core.has_room:
            await self._progress.wait()
        if not self.accepts_calls:
            return self._unsent_exchange()
        exchange = self._core.begin(headers, most)
        try:
            await self._send(exchange, body)
            await exchange.ended.wait()
        finally:
            self._core.reset(exchange)
            self._wake_writer()
            self._wake_all()
        return exchange

    def _unsent_exchange(self) -> Exchange:
        exchange = Exchange(0, 0, 0)
        exchange.is_untouched = True
        exchange.failure = self._close_reason or "the server takes no more calls on this connection"
        return exchange

    async def _send(self, exchange: Exchange, body: Sequence[Buffer]) -> None:
        left = sum(map(len, body))
        pieces = [memoryview(piece) for piece in body if len(piece)]
        pieces.reverse()
        while left and not exchange.ended.is_set():
            core = self._core
            room = min(core.window, exchange.window, core.frame, _MAX_UNSENT_BYTES - self._unsent)
            if room <= 0:
                # Opened windows, sent bytes and the end of the exchange wake this.
                await self._progress.wait()
                continue
            part, size = _cut(pieces, room)
            left -= size
            self._unsent += size
            core.send(exchange, part, size, ends=not left)
            self._has_output.set()

    def _wake_writer(self) -> None:
        if self._core.out:
            self._has_output.set()

    def _wake_all(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    async def _read(self) -> None:
        try:
            while data := await self._stream.receive_some(_READ_BYTES):
                self._core.feed(bytes(data))
                self._wake_writer()
                self._wake_all()
            self.break_off("the server closed the connection")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.break_off(f"the connection broke: {error.__cause__ or error}")
        except ProtocolViolation as error:
            self.break_off(f"the server violates HTTP/2: {error}")

    async def _write(self) -> None:
        try:
            while True:
                if not self._core.out:
                    self._has_output = trio.Event()
                    await self._has_output.wait()
                pieces, self._core.out = self._core.out, []
                self._unsent = 0
                for batch in _batches(pieces):
                    await self._stream.send_all(batch)
                self._wake_all()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.break_off(f"the connection broke: {error.__cause__ or error}")


def _cut(pieces: list[memoryview], room: int) -> tuple[list[memoryview], int]:
    """Remove up to ``room`` bytes from the end of a reversed list of pieces."""
    part, size = [], 0
    while pieces and size < room:
        piece = pieces.pop()
        if len(piece) > room - size:
            pieces.append(piece[room - size :])
            piece = piece[: room - size]
        part.append(piece)
        size += len(piece)
    return part, size


def _batches(pieces: Sequence[Buffer]) -> list[Buffer]:
    """Join small pieces for one send; large pieces are not copied."""
    batches: list[Buffer] = []
    small: list[Buffer] = []
    size = 0
    for piece in pieces:
        if len(piece) > _MAX_JOINED_BYTES or size > _MAX_JOINED_BYTES:
            batches += [b"".join(small)] if small else []
            small, size = [], 0
        if len(piece) > _MAX_JOINED_BYTES:
            batches.append(piece)
        else:
            small.append(piece)
            size += len(piece)
    return [*batches, b"".join(small)] if small else batches
