"""Servers that are stopped while clients are busy with them, and clients that know which of their requests were lost.

A request is lost if its connection was made, all of it was sent, and no whole answer came, although nothing had said
that none would: no ``Connection: close`` in an earlier answer, no GOAWAY with the number of an earlier stream.
"""

from __future__ import annotations

import http.client
import io
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import grpc
import h2.config
import h2.connection
import h2.events
import h2.exceptions

from tests.support.waits import WAIT_SECONDS

_MAX_STREAM_ID = 2**31 - 1


@dataclass
class Tally:
    """What became of the requests of all clients."""

    answered: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, answered: int) -> None:
        """Count answers."""
        with self.lock:
            self.answered += answered

    def lose(self, text: str) -> None:
        """Note a request without an answer."""
        with self.lock:
            self.lost.append(text)

    def doubt(self, text: str) -> None:
        """Note an answer that is not what it should be."""
        with self.lock:
            self.wrong.append(text)


@dataclass(frozen=True)
class StopTarget:
    """Where a server is, and what it can be asked.

    Attributes:
        rest: the port of REST.
        grpc: the port of gRPC; 0 for none.
        http_requests: whole requests that leave the connection open.
        calls: paths and messages of unary gRPC calls.
        authority: the certificate (PEM) of who vouches for the server; without it nothing is encrypted.
    """

    rest: int
    grpc: int
    http_requests: tuple[bytes, ...]
    calls: tuple[tuple[str, bytes], ...] = ()
    authority: bytes = b""


class Workload:
    """Clients that ask until nobody listens any more.

    Args:
        target: who is asked.
        seed: of their choices.
    """

    def __init__(self, target: StopTarget, seed: int) -> None:
        self.tally = Tally()
        self.over = threading.Event()
        self._target = target
        self._threads = [
            threading.Thread(target=self._run, args=(client, random.Random(f"{seed}/{number}")), daemon=True)
            for number, client in enumerate(CLIENTS)
            if target.calls or client not in _OVER_GRPC
        ]

    def start(self) -> None:
        """Let them begin."""
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all have ended, which they do once the server is gone."""
        self.over.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS * 2)
            assert not thread.is_alive(), "a client waits for ever"

    def _run(self, client: Client, chance: random.Random) -> None:
        while not self.over.is_set():
            try:
                client(self, self._target, chance)
            except ConnectionRefusedError:
                return
            except (TimeoutError, OSError) as error:
                self.tally.lose(f"{client.__name__}: {error!r}")
                return


Client = Callable[[Workload, StopTarget, random.Random], None]


class _KeptFile(io.BufferedReader):
    """What is read from a connection, over all its answers."""

    def close(self) -> None:
        """Stay open: the next answer may be in here already."""


class _Answers:
    """What is read from a connection, whose answers may come at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._file = _KeptFile(socket.SocketIO(sock, "r"))

    def makefile(self, *_: Any, **__: Any) -> Any:
        return self._file


class _Connection:
    """A connection over which requests go, and their answers."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.answers: Any = _Answers(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


def _connect(target: StopTarget, port: int, protocol: str = "http/1.1") -> _Connection:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.settimeout(WAIT_SECONDS)
    try:
        made.connect(("127.0.0.1", port))
    except OSError as error:
        made.close()
        raise ConnectionRefusedError from error
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not target.authority:
        return _Connection(made)
    try:
        return _Connection(_context(target.authority, protocol).wrap_socket(made, server_hostname="127.0.0.1"))
    except OSError:
        made.close()
        raise


@cache
def _context(authority: bytes, protocol: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.decode())
    context.set_alpn_protocols([protocol])
    return context


def _read_answer(connection: _Connection) -> bool:
    """Read a whole answer, and tell whether it is the connection's last.

    Raises:
        OSError: there was none, or not all of it.
        ValueError: it is not what was asked for.
    """
    answer = http.client.HTTPResponse(connection.answers)
    try:
        answer.begin()
        body = answer.read()
    except http.client.HTTPException as error:
        raise ConnectionResetError(f"no whole answer: {error!r}") from error
    if answer.status != http.client.OK:
        raise ValueError(f"{answer.status} {body[:200]!r}")
    return answer.will_close


def _ask(work: Workload, connection: _Connection, request: bytes, what: str) -> bool:
    try:
        connection.sock.sendall(request)
        is_last = _read_answer(connection)
    except ValueError as error:
        work.tally.doubt(f"{what}: {error}")
        return False
    except OSError as error:
        work.tally.lose(f"{what}: {error!r} for {request[:60]!r}")
        return False
    work.tally.count(1)
    return not is_last


def _keep_alive(work: Workload, target: StopTarget, chance: random.Random) -> None:
    with _connect(target, target.rest) as connection:
        number = 0
        while _ask(work, connection, chance.choice(target.http_requests), f"keep-alive {number}"):
            number += 1
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.1)


def _new_connections(work: Workload, target: StopTarget, chance: random.Random) -> None:
    with _connect(target, target.rest) as connection:
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.05)
        request = chance.choice(target.http_requests)
        if chance.random() < 0.5:
            request = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        cut = chance.randrange(len(request)) if chance.random() < 0.2 else 0
        with suppress(OSError):
            connection.sock.sendall(request[:cut])
        _ask(work, connection, request[cut:], "new connection")


def _pipelining(work: Workload, target: StopTarget, chance: random.Random) -> None:
    with _connect(target, target.rest) as connection:
        while True:
            count = chance.randrange(2, 5)
            connection.sock.sendall(b"".join(chance.choice(target.http_requests) for _ in range(count - 1)))
            last = chance.choice(target.http_requests)
            for number in range(count):
                if not _ask(work, connection, last if number == 0 else b"", f"pipelined {number} of {count}"):
                    return


def _http2(work: Workload, target: StopTarget, chance: random.Random) -> None:
    with _connect(target, target.grpc, "h2") as connection:
        peer = _Http2Peer(connection.sock)
        while peer.may_call:
            calls = {peer.call(*chance.choice(target.calls)) for _ in range(chance.randrange(1, 4))}
            try:
                peer.finish(calls)
            except OSError as error:
                work.tally.lose(f"{len(peer.lost(calls))} calls over HTTP/2: {error!r}")
                return
            work.tally.count(len(calls) - len(peer.refused & calls))
            for text in peer.failures:
                work.tally.doubt(f"HTTP/2: {text}")
            peer.failures.clear()


def _grpcio(work: Workload, target: StopTarget, chance: random.Random) -> None:
    with _channel(target) as channel:
        while True:
            calls = [_begin(channel, *chance.choice(target.calls)) for _ in range(chance.randrange(1, 4))]
            failures = [error for call in calls if (error := call.exception()) is not None]
            work.tally.count(len(calls) - len(failures))
            for error in failures:
                if not _is_refusal(error):
                    work.tally.lose(f"grpcio: {error!r}")
            if failures:
                raise ConnectionRefusedError
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.1)


def _channel(target: StopTarget) -> grpc.Channel:
    address = f"127.0.0.1:{target.grpc}"
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    if not target.authority:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(target.authority), options)


def _begin(channel: grpc.Channel, path: str, message: bytes) -> Any:
    return channel.unary_unary(path).future(message, timeout=WAIT_SECONDS)


def _is_refusal(error: Any) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and "Connection refused" in error.details()


class _Http2Peer:
    """A client of HTTP/2 that takes GOAWAY for what it says."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self._h2 = h2.connection.H2Connection(config)
        self._unread = b""
        self._done: set[int] = set()
        self._last = _MAX_STREAM_ID
        self.refused: set[int] = set()
        self.failures: list[str] = []
        self.may_call = True
        self._h2.initiate_connection()

    def call(self, path: str, message: bytes) -> int:
        stream_id = int(self._h2.get_next_available_stream_id())
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "h")]
        self._h2.send_headers(stream_id, [*head, ("content-type", "application/grpc"), ("te", "trailers")])
        self._h2.send_data(stream_id, struct.pack(">?I", False, len(message)) + message, end_stream=True)
        return stream_id

    def finish(self, calls: set[int]) -> None:
        """Read until each call has its end, or its refusal.

        Raises:
            OSError: the connection ended first.
        """
        self._flush()
        while self.lost(calls):
            data = self._sock.recv(65_536)
            if not data:
                raise ConnectionResetError("the connection ended")
            self._unread += data
            self._read_frames()
            with suppress(OSError):
                self._flush()

    def lost(self, calls: set[int]) -> set[int]:
        return calls - self._done - self.refused - {each for each in calls if each > self._last}

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            self._sock.sendall(data)

    def _read_frames(self) -> None:
        while len(self._unread) >= 9 and len(self._unread) >= (end := 9 + int.from_bytes(self._unread[:3], "big")):
            frame, self._unread = self._unread[:end], self._unread[end:]
            for event in self._h2.receive_data(frame):
                self._note(event)
            if frame[3] == 7:
                # h2 takes every GOAWAY for the end, but calls that are open go on after it.
                self._last = int.from_bytes(frame[9:13], "big") & _MAX_STREAM_ID
                self.may_call = False
                self._h2.state_machine.state = h2.connection.ConnectionState.CLIENT_OPEN

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.StreamEnded):
            self._done.add(event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self.refused.add(event.stream_id)
        elif isinstance(event, h2.events.DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
            said: dict[Any, Any] = dict(event.headers)
            if said.get("grpc-status", "0") != "0":
                self.failures.append(f"{said}")


CLIENTS: tuple[Client, ...] = (
    _keep_alive,
    _keep_alive,
    _new_connections,
    _new_connections,
    _pipelining,
    _http2,
    _http2,
    _grpcio,
)
_OVER_GRPC = frozenset({_http2, _grpcio})
