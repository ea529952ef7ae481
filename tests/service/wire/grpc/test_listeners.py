from __future__ import annotations

import socket
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio
import trustme

from ovmstrio.wire.grpc import TransportLimits
from ovmstrio.wire.listeners import open_listeners, tls_context
from ovmstrio.wire.socket_listeners import PlainListener
from tests.support.waits import WAIT_SECONDS
from tests.unit.wire.grpc.echo import echo_server


class Keys:
    """A certificate authority, and certificates with keys of a server and a client, as PEM files."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca, self.server, self.client = (folder / name for name in ("ca.pem", "server.pem", "client.pem"))
        authority.cert_pem.write_to_path(str(self.ca))
        for path, name in ((self.server, "127.0.0.1"), (self.client, "client@example.org")):
            authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(str(path))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


def call(channel: grpc.Channel, method: str = "Unary", request: bytes = b"hello") -> bytes:
    with channel:
        return bytes(channel.unary_unary(f"/test.Echo/{method}")(request, timeout=WAIT_SECONDS))


def credentials(keys: Keys, *, with_client: bool = False) -> grpc.ChannelCredentials:
    client = keys.client.read_bytes() if with_client else None
    return grpc.ssl_channel_credentials(keys.ca.read_bytes(), client, client)


async def test_mutual_tls_requires_a_client_certificate(keys: Keys) -> None:
    async with echo_server(tls=tls_context(keys.server, keys.server, keys.ca)) as (server, _, address):

        def stranger() -> grpc.StatusCode:
            with pytest.raises(grpc.RpcError) as caught:
                call(grpc.secure_channel(address, credentials(keys)))
            error: Any = caught.value
            return error.code()

        def known() -> bytes:
            return call(grpc.secure_channel(address, credentials(keys, with_client=True)), "Meta")

        assert await trio.to_thread.run_sync(stranger) is grpc.StatusCode.UNAVAILABLE
        assert (await trio.to_thread.run_sync(known)).startswith(b"127.0.0.1:")
        assert len(server.connections) <= 1


async def test_clients_without_tls_or_without_h2_are_closed_and_others_are_served(keys: Keys) -> None:
    async with echo_server(tls=tls_context(keys.server, keys.server)) as (server, _, address):
        host, port = address.rsplit(":", 1)
        plain = await trio.open_tcp_stream(host, int(port))
        await plain.send_all(b"GET / HTTP/1.1\r\n\r\n")
        while await plain.receive_some():
            pass
        context = ssl.create_default_context(cafile=str(keys.ca))
        other = await trio.open_ssl_over_tcp_stream(host, int(port), https_compatible=True, ssl_context=context)
        assert await other.receive_some() == b""
        await trio.aclose_forcefully(other)
        await plain.aclose()
        assert not server.connections
        served = await trio.to_thread.run_sync(
            lambda: call(grpc.secure_channel(address, credentials(keys)), request=b"t" * 1_000_000)
        )
        assert served == b"t" * 1_000_000


async def test_a_silent_tls_client_is_closed_after_the_handshake_time(keys: Keys) -> None:
    limits = replace(TransportLimits.for_test(), handshake_seconds=0.05)
    async with echo_server(limits, tls=tls_context(keys.server, keys.server)) as (_, _, address):
        host, port = address.rsplit(":", 1)
        async with await trio.open_tcp_stream(host, int(port)) as silent:
            with trio.fail_after(WAIT_SECONDS):
                assert await silent.receive_some() == b""


def test_mismatched_and_missing_tls_files_are_errors(keys: Keys) -> None:
    with pytest.raises(ssl.SSLError):
        tls_context(keys.server, keys.client)
    with pytest.raises(FileNotFoundError):
        tls_context(keys.server, Path("/nowhere.key"))


async def test_a_unix_socket_replaces_a_stale_file_and_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with echo_server(address=f"unix:{path}") as (_, _, address):
        assert address == f"unix:{path}"
        reply = await trio.to_thread.run_sync(lambda: call(grpc.insecure_channel(address), "Meta"))
        assert reply.startswith(b"unix:")
        with pytest.raises(OSError, match="another server listens"):
            async with open_listeners([f"unix:{path}"]):
                pass
        assert await trio.to_thread.run_sync(lambda: call(grpc.insecure_channel(address))) == b"hello"
    assert not path.exists()


async def test_an_ordinary_file_at_the_path_of_a_socket_is_an_error_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match="is not a socket"):
        async with open_listeners([f"unix:{path}"]):
            pass
    assert path.read_text() == "data"


async def test_ports_in_use_are_errors() -> None:
    async with open_listeners(["127.0.0.1:0"]) as (taken,):
        assert isinstance(taken, PlainListener)
        port = taken.socket.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            async with open_listeners(["127.0.0.1:0", f"127.0.0.1:{port}"]):
                pass


@pytest.mark.parametrize("address", ["localhost", ":http", "127.0.0.1:", "9000"])
async def test_invalid_addresses_are_quoted_in_the_error(address: str) -> None:
    with pytest.raises(ValueError, match=f"expected host:port.*{address}"):
        async with open_listeners([address]):
            pass


@pytest.mark.skipif(not socket.has_ipv6, reason="the machine has no IPv6")
async def test_an_ipv6_address_is_served_and_reported_in_brackets() -> None:
    try:
        async with echo_server(address="[::1]:0") as (_, _, address):
            assert address.startswith("[::1]:")
            assert await trio.to_thread.run_sync(lambda: call(grpc.insecure_channel(address))) == b"hello"
    except* OSError:
        pytest.skip("the machine has no IPv6 loopback")
