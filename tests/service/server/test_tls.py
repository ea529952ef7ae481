from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trustme
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError
from ovmstrio.server.listeners import Certificates
from ovmstrio.server.running import Running
from ovmstrio.server.server import serve
from ovmstrio.server.settings import ServerSettings
from ovmstrio.transport.listeners import listener_socket, open_listeners
from tests.support import ir
from tests.support.ports import free_ports
from tests.support.system_servers import write_config
from tests.support.waits import WAIT_SECONDS


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
        sock = listener_socket(listeners[0])
        assert sock is not None
        nursery.start_soon(trio.serve_listeners, _echo, listeners)
        yield sock.getsockname()[1]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _connected(port: int, context: ssl.SSLContext) -> AsyncIterator[trio.SSLStream[trio.SocketStream]]:
    with trio.fail_after(WAIT_SECONDS):
        stream = await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=context, https_compatible=True)
        try:
            yield stream
        finally:
            await trio.aclose_forcefully(stream)


async def _certificate(stream: trio.SSLStream[trio.SocketStream]) -> bytes:
    """Exchange a byte, and return the certificate of the server."""
    await stream.send_all(b"x")
    if await stream.receive_some() != b"x":
        raise trio.BrokenResourceError
    certificate = stream.getpeercert(binary_form=True)
    assert isinstance(certificate, bytes)
    return certificate


async def _certificate_for_new_connection(port: int, context: ssl.SSLContext) -> bytes:
    async with _connected(port, context) as stream:
        return await _certificate(stream)


async def test_new_certificate_applies_to_new_connections(tmp_path: Path) -> None:
    files = _Files(tmp_path)
    certificates = files.certificates()
    async with _listening(certificates) as port, _connected(port, files.client()) as old:
        first = await _certificate(old)
        known = certificates.tls("http/1.1")
        assert known is not None
        context = known.context
        await certificates.look()
        assert known.context is context
        second = files.write(files.authority, files.authority)
        await certificates.look()
        assert await _certificate(old) == first
        assert await _certificate_for_new_connection(port, files.client()) == second != first


async def test_files_that_could_not_be_read_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _Files(tmp_path)
    certificates = files.certificates()
    async with _listening(certificates) as port:
        new = files.write(files.authority, files.authority)
        with monkeypatch.context() as denied, capture_logs() as logs:
            denied.setattr("ovmstrio.server.listeners.tls_context", _denied)
            for _ in range(2):
                await certificates.look()
        assert [line["event"] for line in logs] == ["TLS certificates not reloaded"]
        await certificates.look()
        assert await _certificate_for_new_connection(port, files.client()) == new


def _denied(*_: Any, **__: Any) -> None:
    raise PermissionError(13, "Permission denied")


async def test_replaced_client_authority_is_not_trusted(tmp_path: Path) -> None:
    files, other = _Files(tmp_path), trustme.CA()
    certificates = files.certificates()
    async with _listening(certificates) as port:
        files.write(files.authority, other)
        await certificates.look()
        await _certificate_for_new_connection(port, files.client(other))
        with pytest.raises(trio.BrokenResourceError):
            await _certificate_for_new_connection(port, files.client())


@pytest.mark.parametrize("name", ["chain.pem", "key.pem", "ca.pem"])
async def test_unusable_files_leave_the_current_certificate(tmp_path: Path, name: str) -> None:
    files = _Files(tmp_path)
    certificates = files.certificates()
    async with _listening(certificates) as port:
        (tmp_path / name).write_text("nothing of the kind")
        await certificates.look()
        await _certificate_for_new_connection(port, files.client())
        (tmp_path / name).unlink()
        await certificates.look()
        second = files.write(files.authority, files.authority)
        await certificates.look()
        assert await _certificate_for_new_connection(port, files.client()) == second


def test_unusable_key_file_is_refused_at_the_start(tmp_path: Path) -> None:
    files = _Files(tmp_path)
    files.key.write_text("no key")
    with pytest.raises(ConfigError, match=r"--tls-key .*key\.pem"):
        files.certificates().tls("h2")


# Probes


async def _until(probe: httpx.AsyncClient, status: int) -> httpx.Response:
    with trio.fail_after(WAIT_SECONDS):
        while (answer := await probe.get("/v2/health/ready")).status_code != status:  # noqa: ASYNC110 - of a client
            await trio.sleep(0.02)
    return answer


async def test_probe_port_serves_health_only_and_needs_no_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    base = ir.save(ir.dummy(), tmp_path / "models", "dummy")
    config = write_config(tmp_path, {"name": "dummy", "base_path": str(base)})
    rest, probes = free_ports(2)
    settings = ServerSettings(
        config_path=config,
        port=0,
        rest_port=rest,
        rest_bind_address="127.0.0.1",
        probe_port=probes,
        tls_cert=tmp_path / "server.pem",
        tls_key=tmp_path / "server.pem",
        client_ca=tmp_path / "ca.pem",
        file_system_poll_wait_seconds=0.1,
    )
    async with trio.open_nursery() as nursery:
        running: Running = await nursery.start(partial(serve, settings, handle_signals=False))
        async with httpx.AsyncClient(base_url=f"http://{running.probes[0]}", timeout=WAIT_SECONDS) as probe:
            assert (await _until(probe, 200)).json() == {"ready": True}
            assert (await probe.get("/v2/health/live")).json() == {"live": True}
            assert (await probe.head("/v2/health/live")).status_code == 200
            for path in ("/metrics", "/v2", "/v2/models/dummy", "/v1/config", "/v2/models/dummy/ready", "/"):
                assert "Invalid request URL" in (await probe.get(path)).json()["error"], path
            refused = await probe.post("/v2/models/dummy/infer", json={})
            assert "Invalid request URL" in refused.json()["error"]
            with pytest.raises(httpx.TransportError):
                await probe.get(f"http://127.0.0.1:{rest}/v2/health/live")
            (base / "1").rename(tmp_path / "removed")
            assert "Server is not ready" in (await _until(probe, 503)).json()["error"]
        nursery.cancel_scope.cancel()
