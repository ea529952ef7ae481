"""Blocking HTTP/2 client on a raw socket: gRPC calls, floods and malformed frames."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from hpack import Decoder, Encoder

from ovmstrio.transport.grpc import frames
from ovmstrio.transport.grpc.frames import FRAME_HEADER, FRAME_HEADER_BYTES, MAX_WINDOW, PREFACE, FrameType, Setting

ANSWER_SECONDS: Final = 90.0
MAX_FRAME_BYTES: Final = 16_384
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
_DEFAULT_WINDOW: Final = 65_535
_READ_BYTES: Final = 256 * 1024


class ConnectionEnded(Exception):
    pass


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


@dataclass
class Answer:
    headers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> str:
        return self.headers.get("grpc-status", "")

    @property
    def message(self) -> bytes:
        return bytes(self.data[5 : 5 + int.from_bytes(self.data[1:5], "big")])


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return FRAME_HEADER.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream_id) + payload


def framed(message: bytes, *, compressed: bool = False) -> bytes:
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message


def call_headers(path: str, further: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "127.0.0.1"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *further,
    ]


class BareConnection:
    """Connection that acknowledges SETTINGS and PING frames; ``window`` is the initial flow-control window."""

    def __init__(
        self,
        port: int = 0,
        *,
        connected: socket.socket | None = None,
        settings: Mapping[Setting, int] | None = None,
        window: int = MAX_WINDOW,
        timeout: float = ANSWER_SECONDS,
        receive_buffer: int = 0,
        greets: bool = True,
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self.goaway: Frame | None = None
        self._encoder, self._decoder = Encoder(), Decoder(1_000_000)
        self._unread = bytearray()
        self._next_stream = 1
        self.socket = connected or socket.socket()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self)
            if connected is None:
                self._connect(port, timeout, receive_buffer)
            if greets:
                self._greet(settings, window)
            stack.pop_all()

    def _connect(self, port: int, timeout: float, receive_buffer: int) -> None:
        self.socket.settimeout(timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", port))

    def _greet(self, settings: Mapping[Setting, int] | None, window: int) -> None:
        self.send(PREFACE + frames.settings(dict(settings or {Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW})))
        if window > _DEFAULT_WINDOW:
            self.send(frames.window_update(0, window - _DEFAULT_WINDOW))

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        """Send any bytes."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ConnectionEnded from error

    def begin(
        self, path: str, body: bytes | None, further: Sequence[tuple[str, str]] = (), *, end: bool = True
    ) -> tuple[int, bytes]:
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self.answers[stream] = Answer()
        block = self._encoder.encode(call_headers(path, further))
        data = frames.header_frames(stream, block, MAX_FRAME_BYTES, end_stream=False)
        return stream, data if body is None else data + self.data(stream, body, end=end)

    @staticmethod
    def data(stream: int, body: bytes, *, end: bool) -> bytes:
        parts = [body[at : at + MAX_FRAME_BYTES] for at in range(0, len(body), MAX_FRAME_BYTES)] or [b""]
        last = len(parts) - 1
        flags = [END_STREAM if end and number == last else 0 for number in range(len(parts))]
        return b"".join(frame(FrameType.DATA, flag, stream, part) for flag, part in zip(flags, parts, strict=True))

    def ask(self, path: str, message: bytes, further: Sequence[tuple[str, str]] = ()) -> Answer:
        stream, data = self.begin(path, framed(message), further)
        self.send(data)
        return self.wait(stream)

    def wait(self, stream: int) -> Answer:
        """Read until a call has ended; its answer is given once."""
        answer = self.answers[stream]
        while not answer.ended:
            self.take(self.read())
        return self.answers.pop(stream)

    def read(self) -> Frame:
        """Read one frame."""
        while len(self._unread) < FRAME_HEADER_BYTES or len(self._unread) < self._wanted():
            try:
                data = self.socket.recv(_READ_BYTES)
            except ConnectionResetError as error:
                raise ConnectionEnded from error
            if not data:
                raise ConnectionEnded
            self._unread += data
        end = self._wanted()
        _, _, kind, flags, stream = FRAME_HEADER.unpack_from(self._unread)
        payload = bytes(self._unread[FRAME_HEADER_BYTES:end])
        del self._unread[:end]
        return Frame(kind, flags, stream, payload)

    def _wanted(self) -> int:
        return FRAME_HEADER_BYTES + int.from_bytes(self._unread[:3], "big")

    def take(self, got: Frame) -> None:
        answer = self.answers.get(got.stream, Answer())
        match got.kind:
            case FrameType.HEADERS:
                fields = self._decoder.decode(got.payload)
                answer.headers.update((str(name), str(value)) for name, value in fields)
            case FrameType.DATA:
                answer.data += got.payload
            case FrameType.RST_STREAM:
                answer.reset, answer.ended = int.from_bytes(got.payload, "big"), True
            case FrameType.GOAWAY:
                self.goaway = got
            case FrameType.SETTINGS | FrameType.PING if not got.flags & ACK:
                payload = got.payload if got.kind == FrameType.PING else b""
                with contextlib.suppress(ConnectionEnded):
                    self.send(frame(got.kind, ACK, 0, payload))
        if got.kind in {FrameType.HEADERS, FrameType.DATA} and got.flags & END_STREAM:
            answer.ended = True
