"""Load generator whose calls can have different bodies, such as those of many sequences; h2load sends only one."""

from __future__ import annotations

import selectors
import socket
import struct
import sys
import time
from itertools import cycle, islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["call_rate"]

CONNECTIONS: Final = 2
STREAMS: Final = 4
_HEAD: Final = struct.Struct(">BHBBI")
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE = 0, 1, 4, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_LARGEST_WINDOW: Final = 2**31 - 1
_FIRST_WINDOW: Final = 2**16 - 1
_INITIAL_WINDOW_SIZE: Final = 4
_LARGEST_FRAME: Final = 2**14
_METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return name + bytes([len(value)]) + value


def _header_block() -> bytes:
    """Encode the headers of a call with HPACK's static table only."""
    fields = [b"\x83\x86", _literal(b"\x04", _METHOD.encode()), _literal(b"\x01", b"localhost")]
    fields += [_literal(b"\x0f\x10", b"application/grpc"), _literal(b"\x00\x02te", b"trailers")]
    return b"".join(fields)


_HEADER_BLOCK: Final = _header_block()


class _Connection:
    """Connection that starts a new call after each finished one, until all bodies are sent."""

    def __init__(self, port: int, bodies: Iterator[bytes]) -> None:
        self._bodies = bodies
        self._stream = 1
        self._received = b""
        self._answered: set[int] = set()
        self.open = 0
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
        window = struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW)
        opening = _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window)
        self.socket.sendall(_PREFACE + opening)

    def call(self, count: int) -> None:
        """Start up to the given number of calls."""
        calls = [self._call(body) for body in islice(self._bodies, count)]
        self.open += len(calls)
        if calls:
            self.socket.sendall(b"".join(calls))

    def _call(self, body: bytes) -> bytes:
        if len(body) > _LARGEST_FRAME:
            sys.exit(f"a body of {len(body)} bytes does not fit into one frame")
        stream, self._stream = self._stream, self._stream + 2
        return _frame(_HEADERS, _END_HEADERS, stream, _HEADER_BLOCK) + _frame(_DATA, _END_STREAM, stream, body)

    def receive(self) -> int:
        """Read received data and return the number of finished calls."""
        received = self.socket.recv(2**18)
        if not received:
            sys.exit("the server has closed the connection")
        received = self._received + received
        position = ended = 0
        while position + _HEAD.size <= len(received):
            high, low, kind, flags, stream = _HEAD.unpack_from(received, position)
            end = position + _HEAD.size + (high << 16 | low)
            if end > len(received):
                break
            ended += self._take(kind, flags, stream)
            position = end
        self._received = received[position:]
        self.open -= ended
        return ended

    def _take(self, kind: int, flags: int, stream: int) -> bool:
        if kind == _DATA:
            self._answered.add(stream)
        elif kind == _SETTINGS and not flags & _ACK:
            self.socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        if kind not in {_DATA, _HEADERS} or not flags & _END_STREAM:
            return False
        # The response of a failed call has only headers.
        if stream not in self._answered:
            sys.exit("not every call succeeded")
        self._answered.discard(stream)
        return True


def call_rate(ports: Sequence[int], bodies: Sequence[bytes], calls: int) -> float:
    """Call ModelInfer with eight concurrent calls and the framed bodies in turn; return calls per second.

    The two connections are to the ports in turn.
    """
    left = islice(cycle(bodies), calls)
    connections = [_Connection(port, left) for port in islice(cycle(ports), CONNECTIONS)]
    with selectors.DefaultSelector() as selector:
        begin = time.perf_counter()
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.call(STREAMS)
        while any(connection.open for connection in connections):
            for key, _ in selector.select():
                key.data.call(key.data.receive())
        seconds = time.perf_counter() - begin
    for connection in connections:
        connection.socket.close()
    return calls / seconds
