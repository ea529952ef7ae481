"""HTTP/2 as a client of unary gRPC calls needs it: bytes to exchanges and back, without any input or output.

::

    begin, send, reset ──> out ──> bytes to the server
    bytes of the server ──> feed ──> exchanges that end, windows that open

A message is put together where it will stay: its parts are copied once, from what was read to the memory of its
tensors.  What is sent is not copied here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import hpack
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ovmstrio.core.request import Buffer

__all__ = ["ClientCore", "Exchange", "ProtocolViolation", "RemoteConnection", "literal"]

# ----------------------------------------------------------------------
# HTTP/2 as a client of unary gRPC calls needs it: bytes to exchanges and back, without any input or output
# ----------------------------------------------------------------------

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD: Final = 9
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_REFUSED_STREAM: Final = 7
_CANCEL: Final = 8
_FIRST_WINDOW: Final = 65_535
_FIRST_FRAME: Final = 16_384
_MOST_WINDOW: Final = 2**31 - 1
_OWN_WINDOW: Final = 8 * 2**20
_OWN_CONNECTION_WINDOW: Final = 32 * 2**20
_OWN_FRAME: Final = 2**20
_MOST_HEADERS: Final = 64 * 1024
_MOST_FRAMES_OF_HEADERS: Final = 64
_PREFIX: Final = 5
_STREAM_IDS_LEFT: Final = 2**31 - 3


class ProtocolViolation(Exception):
    """The server does not speak HTTP/2 as it should; the connection cannot go on."""


class Exchange:
    """One call: what has come of its answer.

    Attributes:
        id: of its stream.
        window: how many bytes the server takes of it.
        most: how many bytes the answer's message may have.
        headers: of the answer, and behind them the trailers.
        message: as far as it has come.
        ended: is set when nothing more will come.
        failure: why it ended before its trailers; empty if it did not.
        is_sent: whether all of the call was given to the connection.
        is_untouched: whether the server says that it has not looked at it.
        is_too_large: whether it ended because of ``most``, with the size in ``size``.
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
        """Whether one message has come, and all of it."""
        return self.message is not None and self._filled == len(self.message)

    def take(self, data: memoryview) -> None:
        """Take a part of the answer's body."""
        if self.message is None:
            missing = _PREFIX - len(self._prefix)
            self._prefix += bytes(data[:missing])
            data = data[missing:]
            if len(self._prefix) < _PREFIX:
                return
            if self._prefix[0]:
                raise ProtocolViolation("the message is compressed, though that was not asked for")
            self.size = int.from_bytes(self._prefix[1:], "big")
            if self.size > self.most:
                self.is_too_large = True
                return
            self.message = bytearray(self.size)
        end = self._filled + len(data)
        if end > len(self.message):
            raise ProtocolViolation("more than one message came")
        self.message[self._filled : end] = data
        self._filled = end

    def acknowledge(self, size: int) -> int:
        """Count bytes that were taken; gives those that the server is to be told of now."""
        self._unacknowledged += size
        if self._unacknowledged < _OWN_WINDOW // 2:
            return 0
        told, self._unacknowledged = self._unacknowledged, 0
        return told


def literal(name: bytes, value: bytes) -> bytes:
    """Write a header that no table remembers, so that what was written once can be sent again and again."""
    sizes = (hpack.hpack.encode_integer(len(each), 7) for each in (name, value))
    return b"\0" + next(sizes) + name + next(sizes) + value


class ClientCore:
    """The client's end of one connection.

    Attributes:
        out: what is to be sent, in order; whoever sends it takes it out.
        exchanges: the calls that have not ended, by their streams.
        window: how many bytes the server takes of all calls together.
        most_streams: how many calls it takes at a time.
        frame: how large a frame of data may be.
        last: the last stream that it will answer, None as long as it takes more.
        received: how many bytes have come.
    """

    def __init__(self) -> None:
        self.out: list[Buffer] = [_PREFACE, _settings(), _window_update(0, _OWN_CONNECTION_WINDOW - _FIRST_WINDOW)]
        self.exchanges: dict[int, Exchange] = {}
        self.window = _FIRST_WINDOW
        self.most_streams = 100
        self.frame = _FIRST_FRAME
        self.last: int | None = None
        self.received = 0
        self._decoder = hpack.Decoder(_MOST_HEADERS)
        self._stream_window = _FIRST_WINDOW
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
        """Whether another call may begin now."""
        return len(self.exchanges) < self.most_streams

    @property
    def takes_calls(self) -> bool:
        """Whether calls may begin at all."""
        return self.last is None and self._next_id < _STREAM_IDS_LEFT

    def begin(self, block: bytes, most: float) -> Exchange:
        """Begin a call with its headers, written by :func:`literal`."""
        exchange = Exchange(self._next_id, self._stream_window, most)
        self._next_id += 2
        self.exchanges[exchange.id] = exchange
        self.out.append(_head(_HEADERS, _END_HEADERS, exchange.id, len(block)) + block)
        return exchange

    def send(self, exchange: Exchange, parts: Sequence[Buffer], size: int, *, ends: bool) -> None:
        """Send a part of a call's body, for which there is room; the buffers are the core's until they are sent."""
        self.window -= size
        exchange.window -= size
        exchange.is_sent = ends
        self.out.append(_head(_DATA, _END_STREAM if ends else 0, exchange.id, size))
        self.out += parts

    def reset(self, exchange: Exchange) -> None:
        """End a call that nobody waits for any more, or that was answered before all of it was sent."""
        is_open = self.exchanges.pop(exchange.id, None) is not None
        if is_open or not (exchange.is_sent or exchange.failure):
            self.out.append(_head(_RST_STREAM, 0, exchange.id, 4) + _CANCEL.to_bytes(4, "big"))
        exchange.ended.set()

    def feed(self, data: bytes) -> None:
        """Take in what has come.

        Raises:
            ProtocolViolation: it is not HTTP/2; nothing can be fed any more.
        """
        self.received += len(data)
        view = memoryview(self._rest + data if self._rest else data)
        position = 0
        while True:
            if self._data_left:
                position = self._feed_data(view, position)
            if self._data_left or len(view) - position < _HEAD:
                break
            head = view[position : position + _HEAD]
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            stream = int.from_bytes(head[5:], "big") & _MOST_WINDOW
            if length > (_OWN_FRAME if kind == _DATA else _MOST_HEADERS):
                raise ProtocolViolation(f"a frame of {length} bytes came")
            if self._block and (kind != _CONTINUATION or stream != self._block_stream):
                raise ProtocolViolation("headers ended without their end")
            if kind == _DATA and not flags & _PADDED:
                position += _HEAD
                self._begin_data(stream, length, ends=bool(flags & _END_STREAM))
                continue
            if len(view) - position < _HEAD + length:
                break
            payload = view[position + _HEAD : position + _HEAD + length]
            position += _HEAD + length
            self._frame(kind, flags, stream, payload)
        self._rest = bytes(view[position:])

    def fail(self, reason: str) -> None:
        """End all calls, because the connection has ended."""
        self.last = self.last or 0
        for exchange in self.exchanges.values():
            exchange.failure = reason
            exchange.ended.set()
        self.exchanges.clear()

    # Frames

    def _frame(self, kind: int, flags: int, stream: int, payload: memoryview) -> None:
        handler = self._HANDLERS.get(kind)
        # Frames of kinds that are not known are passed over.
        if handler is not None:
            handler(self, flags, stream, payload)

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
            raise ProtocolViolation("headers went on that had not begun")
        self._add_headers(bytes(payload), flags)

    def _answer_ping(self, flags: int, stream: int, payload: memoryview) -> None:
        del stream
        if not flags & _ACK:
            self.out.append(_head(_PING, _ACK, 0, len(payload)) + bytes(payload))

    def _refuse_push(self, flags: int, stream: int, payload: memoryview) -> None:
        del flags, stream, payload
        raise ProtocolViolation("a push came, though they are turned off")

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
        if self._unacknowledged >= _OWN_CONNECTION_WINDOW // 2:
            self.out.append(_window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        if exchange is not None and (told := exchange.acknowledge(size)):
            self.out.append(_window_update(exchange.id, told))

    def _add_headers(self, block: bytes, flags: int) -> None:
        self._block.append(block)
        if len(self._block) > _MOST_FRAMES_OF_HEADERS or sum(map(len, self._block)) > _MOST_HEADERS:
            raise ProtocolViolation("the headers of an answer are too large")
        if not flags & _END_HEADERS:
            return
        try:
            headers = self._decoder.decode(b"".join(self._block))
        except hpack.HPACKError as error:
            raise ProtocolViolation(f"headers cannot be read: {error}") from None
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
            exchange.failure = f"the server has reset the call (code {code})"
            exchange.ended.set()

    def _go_away(self, flags: int, stream: int, payload: memoryview) -> None:
        del flags, stream
        self.last = _number(payload[:4], 4) & _MOST_WINDOW
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
                self.frame = max(_FIRST_FRAME, min(value, _OWN_FRAME))
        self.out.append(_head(_SETTINGS, _ACK, 0, 0))

    def _open_window(self, flags: int, stream: int, payload: memoryview) -> None:
        del flags
        size = _number(payload, 4) & _MOST_WINDOW
        if not stream:
            self.window = min(self.window + size, _MOST_WINDOW)
        elif stream in self.exchanges:
            exchange = self.exchanges[stream]
            exchange.window = min(exchange.window + size, _MOST_WINDOW)

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


def _head(kind: int, flags: int, stream: int, length: int) -> bytes:
    return length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")


def _settings() -> bytes:
    pairs = ((2, 0), (4, _OWN_WINDOW), (5, _OWN_FRAME))
    payload = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in pairs)
    return _head(_SETTINGS, 0, 0, len(payload)) + payload


def _window_update(stream: int, size: int) -> bytes:
    return _head(_WINDOW, 0, stream, 4) + size.to_bytes(4, "big")


def _number(payload: memoryview, size: int) -> int:
    if len(payload) != size:
        raise ProtocolViolation("a frame has the wrong size")
    return int.from_bytes(payload, "big")


def _unpadded(payload: memoryview, flags: int) -> memoryview:
    if not flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolViolation("a frame is padded by more than it has")
    return payload[1 : len(payload) - payload[0]]


# ----------------------------------------------------------------------
# One HTTP/2 connection on which calls are made: a reader, a writer, and callers that wait for their exchanges
# ----------------------------------------------------------------------

_READ_BYTES: Final = 256 * 1024
_JOINED_UP_TO: Final = 64 * 1024
_MOST_UNSENT: Final = 2**20


class RemoteConnection:
    """Makes unary calls; owned by the task that runs it.

    Args:
        stream: the connection, which is closed with the task.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._core = ClientCore()
        self._has_output = trio.Event()
        self._moved = trio.Event()
        self._unsent = 0
        self._scope = trio.CancelScope()
        self._why = ""

    @property
    def takes_calls(self) -> bool:
        """Whether new calls may be made on it."""
        return not self._why and self._core.takes_calls

    @property
    def received(self) -> int:
        """How many bytes have come."""
        return self._core.received

    def break_off(self, why: str) -> None:
        """End the connection, and all calls on it with that reason."""
        self._why = self._why or why
        self._scope.cancel()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read and write until the connection ends; its calls have ended then, too.

        Cancellation: at any checkpoint; the connection is closed.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    task_status.started()
                    await self._read()
        finally:
            self._why = self._why or "the connection was closed"
            self._core.fail(self._why)
            self._wake_all()
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self._stream)

    async def call(self, headers: bytes, body: Sequence[Buffer], most: float) -> Exchange:
        """Make a call and give its exchange once it has ended.

        Args:
            headers: a block of literals.
            body: the framed message in pieces, which must stay unchanged until this returns.
            most: how many bytes the answer's message may have.

        An exchange whose ``is_untouched`` is set was not looked at by the server; its ``id`` is 0 if nothing was sent.

        Cancellation: at any checkpoint; the server is told.
        """
        while self.takes_calls and not self._core.has_room:
            await self._moved.wait()
        if not self.takes_calls:
            return self._unsent_exchange()
        exchange = self._core.begin(headers, most)
        try:
            await self._send(exchange, body)
            await exchange.ended.wait()
        finally:
            self._core.reset(exchange)
            self._tell_writer()
            self._wake_all()
        return exchange

    def _unsent_exchange(self) -> Exchange:

        exchange = Exchange(0, 0, 0)
        exchange.is_untouched = True
        exchange.failure = self._why or "the server takes no more calls on this connection"
        return exchange

    async def _send(self, exchange: Exchange, body: Sequence[Buffer]) -> None:
        left = sum(map(len, body))
        pieces = [memoryview(piece) for piece in body if len(piece)]
        pieces.reverse()
        while left and not exchange.ended.is_set():
            core = self._core
            room = min(core.window, exchange.window, core.frame, _MOST_UNSENT - self._unsent)
            if room <= 0:
                await self._wait_moved(exchange)
                continue
            part, size = _cut(pieces, room)
            left -= size
            self._unsent += size
            core.send(exchange, part, size, ends=not left)
            self._has_output.set()

    async def _wait_moved(self, exchange: Exchange) -> None:
        """Wait until windows open, bytes go out or the exchange ends: all of it wakes those who wait here."""
        if not exchange.ended.is_set():
            await self._moved.wait()

    def _tell_writer(self) -> None:
        if self._core.out:
            self._has_output.set()

    def _wake_all(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    async def _read(self) -> None:
        try:
            while data := await self._stream.receive_some(_READ_BYTES):
                self._core.feed(bytes(data))
                self._tell_writer()
                self._wake_all()
            self.break_off("the server has closed the connection")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.break_off(f"the connection broke: {error.__cause__ or error}")
        except ProtocolViolation as error:
            self.break_off(f"the server does not speak HTTP/2 as it should: {error}")

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
    """Take up to so many bytes from the end of a list of pieces, which is in reverse order."""
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
    """Join small pieces, so that they are sent together; large ones are sent from where they are."""
    batches: list[Buffer] = []
    small: list[Buffer] = []
    size = 0
    for piece in pieces:
        if len(piece) > _JOINED_UP_TO or size > _JOINED_UP_TO:
            batches += [b"".join(small)] if small else []
            small, size = [], 0
        if len(piece) > _JOINED_UP_TO:
            batches.append(piece)
        else:
            small.append(piece)
            size += len(piece)
    return [*batches, b"".join(small)] if small else batches
