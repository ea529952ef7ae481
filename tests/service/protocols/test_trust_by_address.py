from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import grpc
import httpx
import pytest
import trio
import trio.testing
import trustme
from structlog.testing import capture_logs

from ovmstrio.core.callers import Permission
from ovmstrio.core.connection import UNKNOWN, ClientAddress, Loopback, Remote, TrustedProxies, UnixSocket
from ovmstrio.core.events import WireRequest
from ovmstrio.encoding.messages import message_class
from ovmstrio.isolation.messages import Message
from ovmstrio.isolation.worker_program import WorkRequest
from ovmstrio.protocols.grpc_gate import REQUIRED_SCOPES
from ovmstrio.server.front_ends import GrpcFrontEnd, RestFrontEnd
from ovmstrio.serving.shared_memory import ClientRegions
from ovmstrio.telemetry.recent_history import RecentHistory
from ovmstrio.transport.direct_stream import DirectStream
from ovmstrio.transport.listeners import PlainListener, tls_context
from ovmstrio.workers.handoff import ConnectionInbox
from tests.support.waits import WAIT_SECONDS, until_async
from tests.unit.protocols.servers import stack
from tests.unit.transport.grpc.bytes_client import HELLO, data, headers, message, request_headers

FAR: Final = Remote("203.0.113.9", 7)
KSERVE: Final = "/inference.GRPCInferenceService/"
ADMIN_PATHS: Final = (
    "/v1/config/reload",
    "/v2/logging",
    "/v2/profile",
    "/v2/repository/models/echo/load",
    "/v2/repository/models/echo/unload",
    "/v2/systemsharedmemory/region/cats/register",
    "/v2/systemsharedmemory/unregister",
    "/console/api/reload",
    "/console/api/log_level",
    "/console/api/services/echo/load",
    "/console/api/services/echo/unload",
)
CONSOLE_PAGES: Final = ("/console", "/console/page/actions.js", "/console/api/server", "/console/api/failures")
LIVE: Final = "/console/api/live"
ADMIN_METHODS: Final = tuple(
    path
    for path, need in REQUIRED_SCOPES.items()
    if need is Permission.ADMIN and path.startswith(KSERVE) and "Cuda" not in path
)
OUTCOMES: Final = frozenset({"change refused", "change failed", "server changed"})


class ForgedListener(PlainListener):
    def __init__(self, listener: trio.SocketListener, address: ClientAddress) -> None:
        super().__init__(listener)
        self.address = address

    async def accept(self) -> DirectStream:
        stream = await super().accept()
        stream.peer_address = self.address
        return stream


@dataclass
class ServedInterfaces:
    rest: RestFrontEnd
    grpc: GrpcFrontEnd
    rest_port: int = 0
    grpc_port: int = 0


async def _listen() -> tuple[trio.SocketListener, int]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    return listener, listener.socket.getsockname()[1]


@asynccontextmanager
async def _front_ends(
    folder: Path, proxies: str = "", observer: Observer | None = None
) -> AsyncIterator[ServedInterfaces]:
    trusted = TrustedProxies.parse(proxies)
    async with stack(folder, regions=ClientRegions(is_allowed=True, folder=folder)) as (plane, _, _):
        yield ServedInterfaces(
            RestFrontEnd(plane, history=RecentHistory(), trusted_proxies=trusted, observer=observer),
            GrpcFrontEnd(plane, trusted_proxies=trusted, observer=observer),
        )


@asynccontextmanager
async def _serving(folder: Path, address: ClientAddress, proxies: str = "") -> AsyncIterator[ServedInterfaces]:
    async with _front_ends(folder, proxies) as served, trio.open_nursery() as nursery:
        rest, served.rest_port = await _listen()
        calls, served.grpc_port = await _listen()
        await nursery.start(served.rest.serve_listeners, [ForgedListener(rest, address)])
        await nursery.start(served.grpc.serve_listeners, [ForgedListener(calls, address)])
        yield served
        nursery.cancel_scope.cancel()


def _ask_rest(port: int, extra: dict[str, str]) -> dict[str, tuple[int, str]]:
    """Request all that is granted by address, with invalid bodies that change nothing."""
    sent = {"host": "localhost", "x-ovms-console": "1", **extra}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_SECONDS, trust_env=False) as client:
        answers = {path: client.post(path, headers=sent, content=b'{"odd": 1}') for path in ADMIN_PATHS}
        answers |= {path: client.get(path, headers=sent) for path in CONSOLE_PAGES}
        found = {path: (answer.status_code, answer.text) for path, answer in answers.items()}
        with client.stream("GET", LIVE, headers=sent) as live:
            found[LIVE] = live.status_code, "" if live.status_code == 200 else live.read().decode()
    return found


def _ask_grpc(port: int, extra: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Call every method that changes the server, for names that do not exist."""
    found = {}
    settings = message_class("inference.LogSettingsRequest")(settings={"odd": {"bool_param": True}}).SerializeToString()
    calls = {**dict.fromkeys(ADMIN_METHODS, b""), f"{KSERVE}LogSettings": settings}
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for path, body in calls.items():
            call: Any = channel.unary_unary(path)
            try:
                call(body, timeout=WAIT_SECONDS, metadata=tuple(extra.items()))
                found[path] = "OK", ""
            except grpc.RpcError as error:
                failed: Any = error
                found[path] = failed.code().name, failed.details()
    return found


DENIED = [
    (UNKNOWN, {}, "", "the address of the client is unknown"),
    (FAR, {}, "", "this request came from 203.0.113.9"),
    (Remote("::ffff:203.0.113.9"), {}, "", "this request came from ::ffff:203.0.113.9"),
    (Loopback("127.0.0.1"), {"x-forwarded-for": "127.0.0.1"}, "", "unknown (header x-forwarded-for shows a proxy"),
    (Loopback("::1"), {"forwarded": "for=127.0.0.1"}, "", "unknown (header forwarded shows a proxy"),
    (UnixSocket(), {"via": "1.1 here"}, "", "unknown (header via shows a proxy"),
    (UnixSocket(), {"x-envoy-internal": "true"}, "unix", "neither x-forwarded-for nor forwarded"),
    (Loopback("127.0.0.1"), {"x-forwarded-for": "198.51.100.7"}, "127.0.0.1", "this request came from 198.51.100.7"),
    (Loopback("127.0.0.1"), {"x-forwarded-for": "127.0.0.1"}, "127.0.0.1", "this request came from 127.0.0.1"),
    (UnixSocket(), {"x-forwarded-for": "127.0.0.2"}, "127.0.0.1,unix", "this request came from 127.0.0.2"),
    (UnixSocket(), {"x-forwarded-for": "nonsense"}, "unix", "unknown (x-forwarded-for does not end with addresses)"),
    (Loopback("127.0.0.1"), {}, "127.0.0.1", "unknown (a trusted proxy sent neither"),
    (Remote("10.0.0.1"), {"x-forwarded-for": "127.0.0.1"}, "10.0.0.0/8", "this request came from 127.0.0.1"),
    (FAR, {"x-forwarded-for": "127.0.0.1"}, "10.0.0.0/8", "this request came from 203.0.113.9"),
]


@pytest.mark.parametrize(("address", "extra", "proxies", "reason"), DENIED)
async def test_clients_that_are_not_known_to_be_local_are_refused_with_the_reason(
    tmp_path: Path, address: ClientAddress, extra: dict[str, str], proxies: str, reason: str
) -> None:
    async with _serving(tmp_path, address, proxies) as served:
        answers = await trio.to_thread.run_sync(_ask_rest, served.rest_port, extra)
        calls = await trio.to_thread.run_sync(_ask_grpc, served.grpc_port, extra)
    assert {path: status for path, (status, _) in answers.items() if status != 403} == {}
    assert {path: text for path, (_, text) in answers.items() if reason not in text} == {}
    assert {path: code for path, (code, _) in calls.items() if code != "PERMISSION_DENIED"} == {}
    assert {path: text for path, (_, text) in calls.items() if reason not in text} == {}


@pytest.mark.parametrize("address", [Loopback("127.0.0.1"), Loopback("::1"), UnixSocket()])
async def test_local_clients_are_granted_changes_and_the_console(tmp_path: Path, address: ClientAddress) -> None:
    async with _serving(tmp_path, address, "10.0.0.0/8") as served:
        answers = await trio.to_thread.run_sync(_ask_rest, served.rest_port, {})
        calls = await trio.to_thread.run_sync(_ask_grpc, served.grpc_port, {})
    assert {path: status for path, (status, _) in answers.items() if status in {401, 403, 404, 405}} == {}
    assert [code for code, _ in calls.values() if code in {"PERMISSION_DENIED", "UNIMPLEMENTED"}] == []


class Observer:
    needs_every = True
    body_bytes = 0

    def __init__(self) -> None:
        self.clients: set[tuple[str, str]] = set()

    def samples(self, traceparent: str) -> bool | None:
        del traceparent
        return False

    def request_ended(self, request: WireRequest) -> None:
        self.clients.add((request.protocol, str(request.client)))


@pytest.mark.parametrize(
    ("proxies", "extra", "client"),
    [
        ("127.0.0.1", {"x-forwarded-for": "198.51.100.7, 203.0.113.9"}, "203.0.113.9"),
        ("127.0.0.1", {"forwarded": 'for="[2001:db8::9]:1"'}, "2001:db8::9"),
        ("127.0.0.1", {"x-forwarded-for": "203.0.113.9, nonsense"}, "unknown"),
        ("", {"x-forwarded-for": "203.0.113.9"}, "127.0.0.1"),
    ],
)
async def test_the_logged_client_is_named_by_trusted_proxies_only(
    tmp_path: Path, proxies: str, extra: dict[str, str], client: str
) -> None:
    observer = Observer()
    async with _front_ends(tmp_path, proxies, observer) as served, trio.open_nursery() as nursery:
        rest, served.rest_port = await _listen()
        calls, served.grpc_port = await _listen()
        await nursery.start(served.rest.serve_listeners, [PlainListener(rest)])
        await nursery.start(served.grpc.serve_listeners, [PlainListener(calls)])
        await trio.to_thread.run_sync(_ask_rest, served.rest_port, extra)
        await trio.to_thread.run_sync(_ask_grpc, served.grpc_port, extra)
        nursery.cancel_scope.cancel()
    assert observer.clients == {("HTTP", client), ("gRPC", client)}


# Clients that reset their connections


def _post(path: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Ovms-Console: 1\r\nContent-Length: 0\r\n\r\n".encode()


def _connect(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Closing it resets the connection.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return client


async def _outcome(lines: list[Any]) -> tuple[str, str]:
    """Wait for the log line of a change, and return its event and client."""
    (line,) = await until_async(lambda: [line for line in lines if line["event"] in OUTCOMES][:1])
    return line["event"], line["client"]


async def _outcome_at(folder: Path, listener: trio.abc.Listener[Any]) -> tuple[str, str]:
    """Serve REST at a listener until a change has an outcome."""
    with capture_logs() as lines:
        async with _front_ends(folder) as served, trio.open_nursery() as nursery:
            await nursery.start(served.rest.serve_listeners, [listener])
            outcome = await _outcome(lines)
            nursery.cancel_scope.cancel()
    return outcome


MakeListener = Callable[[trio.SocketListener], trio.abc.Listener[Any]]
LISTENERS: Final[dict[str, tuple[MakeListener, str]]] = {
    # Until it is accepted, a connection has an address; trio's own listener does not pass it on.
    "an address": (lambda listener: ForgedListener(listener, FAR), "203.0.113.9"),
    "none": (lambda listener: listener, "unknown"),
}


@pytest.mark.parametrize("path", ["/v1/config/reload", "/console/api/reload"])
@pytest.mark.parametrize("known", LISTENERS)
async def test_a_reset_before_accept_grants_nothing(tmp_path: Path, path: str, known: str) -> None:
    make, client = LISTENERS[known]
    listener, port = await _listen()
    with _connect(port) as sock:
        sock.sendall(_post(path))
    assert await _outcome_at(tmp_path, make(listener)) == ("change refused", client)


async def test_a_reset_of_a_grpc_connection_grants_nothing(tmp_path: Path) -> None:
    head = headers(1, request_headers(f"{KSERVE}RepositoryModelUnload"))
    body = message_class("inference.RepositoryModelUnloadRequest")(model_name="echo").SerializeToString()
    with capture_logs() as lines:
        async with _serving(tmp_path, FAR) as served:
            with _connect(served.grpc_port) as sock:
                sock.sendall(HELLO)
                await trio.to_thread.run_sync(sock.recv, 9)
                await trio.testing.wait_all_tasks_blocked(0.01)
                sock.sendall(head + data(1, message(body), end=True))
            assert await _outcome(lines) == ("change refused", "203.0.113.9")


@pytest.mark.parametrize("path", ["/v1/config/reload", "/console/api/reload"])
@pytest.mark.parametrize("sent", [0, 1, -1, None], ids=["nothing", "a byte", "all but a byte", "a request"])
async def test_a_reset_of_an_accepted_connection_grants_nothing(tmp_path: Path, path: str, sent: int | None) -> None:
    request = _post(path)
    first = b"" if sent == 0 else request[:sent]
    with capture_logs() as lines:
        async with _serving(tmp_path, FAR) as served:
            with _connect(served.rest_port) as sock:
                sock.sendall(first)
                await until_async(lambda: served.rest.open_connections)
                # Received bytes have been read when all tasks wait.
                await trio.testing.wait_all_tasks_blocked(0.01)
                sock.sendall(request[len(first) :] + request)
            assert await _outcome(lines) == ("change refused", "203.0.113.9")
            await until_async(lambda: not served.rest.open_connections)
    assert [line["event"] for line in lines if line["event"] in OUTCOMES - {"change refused"}] == []


@pytest.mark.parametrize("path", ["/v1/config/reload", "/console/api/reload"])
async def test_a_reset_after_a_tls_handshake_grants_nothing(tmp_path: Path, path: str) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    tls = tls_context(tmp_path / "server.pem", tmp_path / "server.pem", protocol="http/1.1")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with capture_logs() as lines:
        async with _front_ends(tmp_path) as served, trio.open_nursery() as nursery:
            listener, port = await _listen()
            secured = trio.SSLListener(ForgedListener(listener, FAR), tls, https_compatible=True)
            await nursery.start(served.rest.serve_listeners, [secured])

            def attack() -> None:
                with trusting.wrap_socket(_connect(port), server_hostname="localhost") as client:
                    client.sendall(_post(path))

            await trio.to_thread.run_sync(attack)
            assert await _outcome(lines) == ("change refused", "203.0.113.9")
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("address", "client"), [(("203.0.113.9", 7), "203.0.113.9"), (("unknown", 0), "unknown"), (("", 0), "unknown")]
)
async def test_a_connection_handed_to_a_worker_keeps_its_address(
    tmp_path: Path, address: tuple[str, int], client: str
) -> None:
    inbox = ConnectionInbox(lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = _connect(listener.getsockname()[1])
        accepted, _ = listener.accept()
    sock.sendall(_post("/v1/config/reload"))
    sock.close()
    accepted.setblocking(False)
    passed = Message([0, ["REST", *address]], accepted.detach())
    await inbox.put(WorkRequest(cast("Any", None), passed))
    assert await _outcome_at(tmp_path, inbox) == ("change refused", client)


async def test_a_unix_connection_handed_to_a_worker_is_local(tmp_path: Path) -> None:
    inbox = ConnectionInbox(lambda: None)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    unix = UnixSocket()
    passed = Message([0, ["REST", unix.host, unix.port]], theirs.detach())
    await inbox.put(WorkRequest(cast("Any", None), passed))
    with ours:
        ours.sendall(_post("/v1/config/reload"))
        assert await _outcome_at(tmp_path, inbox) == ("change failed", "unix")
