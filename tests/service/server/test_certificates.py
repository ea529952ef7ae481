"""Certificates whose files change while a server listens."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trustme

from ovmstrio.core.errors import ConfigError
from ovmstrio.server.certificates import Certificates
from ovmstrio.server.settings import ServerSettings
from ovmstrio.wire.listeners import open_listeners, socket_of

PATIENCE_SECONDS = 60


class _Files:
    def __init__(self, folder: Path) -> None:
        self.chain, self.key, self.ca = (folder / name for name in ("chain.pem", "key.pem", "ca.pem"))
        self.authority = trustme.CA()
        self.write(self.authority, self.authority)

    def write(self, authority: trustme.CA, clients: trustme.CA) -> bytes:
        made = authority.issue_cert("localhost")
        self.key.write_bytes(made.private_key_pem.bytes())
        self.chain.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        self.ca.write_bytes(clients.cert_pem.bytes())
        return ssl.PEM_cert_to_DER_cert(made.cert_chain_pems[0].bytes().decode())

    def certificates(self) -> Certificates:
        return Certificates(ServerSettings(tls_cert=self.chain, tls_key=self.key, client_ca=self.ca))

    def client(self, issuer: trustme.CA | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        (issuer or self.authority).issue_cert("client@localhost").configure_cert(context)
        return context


async def _echo(stream: trio.SSLStream[trio.SocketStream]) -> None:
    try:
        async for data in stream:
            await stream.send_all(data)
    except trio.BrokenResourceError:
        pass
    finally:
        await trio.aclose_forcefully(stream)


@asynccontextmanager
async def _listening(certificates: Certificates) -> AsyncIterator[int]:
    async with (
        open_listeners(["127.0.0.1:0"], certificates.tls("http/1.1")) as listeners,
        trio.open_nursery() as nursery,
    ):
        sock = socket_of(listeners[0])
        assert sock is not None
        nursery.start_soon(trio.serve_listeners, _echo, listeners)
        yield sock.getsockname()[1]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _connected(port: int, context: ssl.SSLContext) -> AsyncIterator[trio.SSLStream[trio.SocketStream]]:
    with trio.fail_after(PATIENCE_SECONDS):
        stream = await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=context, https_compatible=True)
        try:
            yield stream
        finally:
            await trio.aclose_forcefully(stream)


async def _ask(stream: trio.SSLStream[trio.SocketStream]) -> bytes:
    """Send a byte and get it; gives the certificate of the server."""
    await stream.send_all(b"x")
    answer = await stream.receive_some()
    if not answer:
        raise trio.BrokenResourceError
    assert answer == b"x"
    certificate = stream.getpeercert(binary_form=True)
    assert isinstance(certificate, bytes)
    return certificate


async def test_new_connections_have_the_new_certificate_and_open_ones_go_on(tmp_path: Path) -> None:
    """Whichever protocol; nothing is made again while the files are as they were."""
    files = _Files(tmp_path)
    certificates = files.certificates()
    async with _listening(certificates) as port, _connected(port, files.client()) as old:
        first = await _ask(old)
        known = certificates.tls("http/1.1")
        assert known is not None
        context = known.context
        await certificates.look()
        assert known.context is context
        second = files.write(files.authority, files.authority)
        await certificates.look()
        assert await _ask(old) == first
        async with _connected(port, files.client()) as new:
            assert await _ask(new) == second != first


async def test_an_authority_that_is_gone_from_its_file_is_not_trusted_any_more(tmp_path: Path) -> None:
    """And the one that has taken its place is."""
    files, other = _Files(tmp_path), trustme.CA()
    certificates = files.certificates()
    async with _listening(certificates) as port:
        files.write(files.authority, other)
        await certificates.look()
        async with _connected(port, files.client(other)) as stream:
            await _ask(stream)
        with pytest.raises(trio.BrokenResourceError):
            async with _connected(port, files.client()) as stream:
                await _ask(stream)


@pytest.mark.parametrize("name", ["chain.pem", "key.pem", "ca.pem"])
async def test_files_that_cannot_be_used_leave_what_is_known(tmp_path: Path, name: str) -> None:
    """Half a replacement, or none; what is then complete is taken over."""
    files = _Files(tmp_path)
    certificates = files.certificates()
    async with _listening(certificates) as port:
        (tmp_path / name).write_text("nothing of the kind")
        await certificates.look()
        async with _connected(port, files.client()) as stream:
            await _ask(stream)
        (tmp_path / name).unlink()
        await certificates.look()
        second = files.write(files.authority, files.authority)
        await certificates.look()
        async with _connected(port, files.client()) as stream:
            assert await _ask(stream) == second


def test_a_server_does_not_start_with_files_that_cannot_be_used(tmp_path: Path) -> None:
    """The options and files are named."""
    files = _Files(tmp_path)
    files.key.write_text("no key")
    with pytest.raises(ConfigError, match=r"--tls_key .*key\.pem"):
        files.certificates().tls("h2")
