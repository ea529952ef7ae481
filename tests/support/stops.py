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
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import grpc

from tests.support.bare_http2 import BareConnection, ConnectionEnded, framed
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
        with self.lock:
            self.answered += answered

    def lose(self, text: str) -> None:
        with self.lock:
            self.lost.append(text)

    def doubt(self, text: str) -> None:
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
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
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
        try:
            peer = BareConnection(connected=connection.sock)
        except ConnectionEnded:
            return  # No call was sent.
        while peer.goaway is None:
            chosen = [chance.choice(target.calls) for _ in range(chance.randrange(1, 4))]
            begun = [peer.begin(path, framed(message)) for path, message in chosen]
            try:
                peer.send(b"".join(data for _, data in begun))
                while _unanswered(peer):
                    peer.take(peer.read())
            except (OSError, ConnectionEnded) as error:
                if lost := _unanswered(peer):
                    work.tally.lose(f"{lost} calls over HTTP/2: {error!r}")
                return
            work.tally.count(sum(answer.ended and answer.reset is None for answer in peer.answers.values()))
            for answer in peer.answers.values():
                if answer.status not in ("", "0"):
                    work.tally.doubt(f"HTTP/2: {answer.headers}")
            peer.answers.clear()


def _unanswered(peer: BareConnection) -> int:
    """Count the calls without an end that the server has accepted, or not refused yet by GOAWAY."""
    last = _MAX_STREAM_ID if peer.goaway is None else int.from_bytes(peer.goaway.payload[:4], "big") & _MAX_STREAM_ID
    return sum(stream <= last and not answer.ended for stream, answer in peer.answers.items())


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


CLIENTS: tuple[Client, ...] = (*(_keep_alive, _new_connections, _http2) * 2, _pipelining, _grpcio)
_OVER_GRPC = frozenset({_http2, _grpcio})
