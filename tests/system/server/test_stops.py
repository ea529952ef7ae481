from __future__ import annotations

import http.client
import io
import json
import multiprocessing
import os
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import grpc
import httpx
import pytest
import tritonclient.grpc
import trustme

from ovmstrio.encoding.messages import METHOD, REQUEST
from tests.support.all_kinds import write_all_kinds
from tests.support.bare_http2 import BareConnection, ConnectionEnded, framed
from tests.support.ports import free_ports
from tests.support.processes import serving_project
from tests.support.projects import write_project
from tests.support.waits import WAIT_SECONDS, until

_MAX_STREAM_ID = 2**31 - 1


@dataclass
class Tally:
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
    """Addresses of a server and the requests that it can answer.

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
    """Clients that send requests until the server stops listening."""

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


class _UnclosedFile(io.BufferedReader):
    def close(self) -> None:
        pass


class _Answers:
    def __init__(self, sock: socket.socket) -> None:
        self._file = _UnclosedFile(socket.SocketIO(sock, "r"))

    def makefile(self, *_: Any, **__: Any) -> Any:
        return self._file


class _Connection:
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
    """Read a whole answer, and tell whether it is the connection's last."""
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


STOPS = int(os.environ.get("OVMSTRIO_STOPS", "160"))
AT_ONCE = 2

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.served_command"])


@pytest.fixture(autouse=True, scope="module")
def _no_fork_server_left() -> Iterator[None]:
    yield
    stop = getattr(forkserver._forkserver, "_stop")  # noqa: B009, SLF001 - there is no public one, and no type of this
    stop()


ROW = {"name": "b", "shape": [1, 10], "datatype": "FP32", "data": [0.0] * 10}
TEXT = {"name": "in", "shape": [3], "datatype": "UINT8", "data": [97, 98, 99]}
HANDLER = """
class Handler:
    def handle_get(self):
        return "a"

    def handle_post(self, payload):
        return payload
"""


def _request(path: str, body: Any = None, *, is_chunked: bool = False) -> bytes:
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode()
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n".encode()
    if is_chunked:
        return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
    return head + b"Content-Length: %d\r\n\r\n" % len(text) + text


def _infer(model: str, given: str, shape: list[int], datatype: str) -> tuple[str, bytes]:
    request = tritonclient.grpc.service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name=given, datatype=datatype, shape=shape)
    size = 40 if datatype == "FP32" else 3
    request.raw_input_contents.append(b"abcd" * 10 if size == 40 else b"abc")
    return "/inference.GRPCInferenceService/ModelInfer", request.SerializeToString()


HTTP_REQUESTS = (
    _request("/v2/models/model/infer", {"inputs": [ROW]}),
    _request("/v2/models/dag/infer", {"inputs": [ROW]}),
    _request("/v2/models/graph/infer", {"inputs": [TEXT]}),
    _request("/v2/models/model/infer", {"inputs": [ROW]}, is_chunked=True),
    _request("/v2/models/model"),
    _request("/handler", [1, 2, 3]),
    _request("/ops/prediction", {"key": ["x"], "value": ["y"]}),
)
CALLS = (
    _infer("model", "b", [1, 10], "FP32"),
    _infer("dag", "b", [1, 10], "FP32"),
    _infer("graph", "in", [3], "UINT8"),
    (METHOD, REQUEST(key=["x"], value=["y"], name="ops").SerializeToString()),
)


def _is_ready(process: BaseProcess, target: StopTarget, log: Path) -> bool:
    assert process.is_alive(), log.read_text()
    verify = ssl.create_default_context(cadata=target.authority.decode()) if target.authority else False
    url = f"{'https' if target.authority else 'http'}://127.0.0.1:{target.rest}/v2/health/ready"
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=5, trust_env=False, verify=verify).is_success
    return False


@dataclass(frozen=True)
class _Tls:
    """Options for a server certificate, and the certificate of its authority (PEM); empty for a server without TLS."""

    options: tuple[str, ...] = ()
    authority: bytes = b""


def _no_tls(_: Path) -> _Tls:
    return _Tls()


def _make_tls(folder: Path) -> _Tls:
    authority, file = trustme.CA(), folder / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
    return _Tls(("--tls_cert", str(file), "--tls_key", str(file)), authority.cert_pem.bytes())


def _work_until_stopped(
    target: StopTarget, seed: int, seconds: float, stop: Callable[[signal.Signals], int | None]
) -> Tally:
    work = Workload(target, seed)
    work.start()
    threading.Event().wait(seconds)
    assert stop((signal.SIGTERM, signal.SIGINT)[seed % 2]) == 0
    work.join()
    return work.tally


def _stop_all_kinds(config: Path, tls: _Tls, seed: int) -> Tally:
    """Stop a server of all kinds, which is forked from a process that has imported everything."""
    from tests.support.served_command import run_command

    grpc, rest = free_ports(2)
    log = config.parent / f"{seed}.log"
    options = ["serve", "--config_path", str(config), *tls.options, "--port", str(grpc), "--rest_port", str(rest)]
    options += ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1"]
    target = StopTarget(rest, grpc, HTTP_REQUESTS, CALLS, tls.authority)
    process = CONTEXT.Process(target=run_command, args=(options, str(log)))
    process.start()

    def stop(number: signal.Signals) -> int | None:
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(WAIT_SECONDS)
        assert process.exitcode == 0, log.read_text()
        return process.exitcode

    try:
        until(lambda: _is_ready(process, target, log), why=log.read_text)
        return _work_until_stopped(target, seed, random.Random(seed).uniform(0.1, 0.5), stop)
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def _stop_project(folder: Path, tls: _Tls, processes: int, seed: int) -> Tally:
    project = write_project(folder / str(seed) / "project", HANDLER, processes=processes)
    with serving_project(project, *tls.options) as server:
        port, requests = int(server.address.rpartition(":")[2]), (_request("/"), _request("/", "a"), _request("/v2"))
        return _work_until_stopped(StopTarget(port, 0, requests, authority=tls.authority), seed, 0.3, server.stop)


def _expect_no_loss(tallies: Sequence[Tally]) -> None:
    faults = [(seed, text) for seed, tally in enumerate(tallies) for text in (*tally.lost, *tally.wrong)]
    assert not faults
    assert sum(tally.answered for tally in tallies) > len(tallies) * 5


def _stops(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrize a test over TLS and the number of stops, of which there are many in slow tests."""
    return pytest.mark.parametrize(
        ("make_tls", "stops"),
        [
            pytest.param(_no_tls, few, id="plain"),
            pytest.param(_make_tls, few, id="TLS"),
            pytest.param(_no_tls, many, id="plain, many", marks=pytest.mark.slow),
            pytest.param(_make_tls, many // 4, id="TLS, many", marks=pytest.mark.slow),
        ],
    )


@_stops(4, STOPS)
def test_a_stop_loses_no_request(tmp_path: Path, make_tls: Callable[[Path], _Tls], stops: int) -> None:
    """Clients use HTTP/1.1 on kept, new and pipelined connections, HTTP/2, and grpcio."""
    stop = partial(_stop_all_kinds, write_all_kinds(tmp_path), make_tls(tmp_path))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        _expect_no_loss(list(threads.map(stop, range(stops))))


@_stops(1, STOPS // 8)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_of_a_project_loses_no_request(
    tmp_path: Path, processes: int, make_tls: Callable[[Path], _Tls], stops: int
) -> None:
    tls = make_tls(tmp_path)
    _expect_no_loss([_stop_project(tmp_path, tls, processes, seed) for seed in range(stops)])
