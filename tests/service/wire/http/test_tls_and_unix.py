from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
import trio
import trustme

from ovmstrio.wire.listeners import tls_context
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import BODY, Peer, infer_post, serving_rest

INFER = "/v2/models/echo/infer"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def _server_context(authority: trustme.CA, folder: Path, *, mutual: bool) -> ssl.SSLContext:
    certificate = authority.issue_cert("localhost")
    key, chain, ca = folder / "key.pem", folder / "chain.pem", folder / "ca.pem"
    certificate.private_key_pem.write_to_path(key)
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    authority.cert_pem.write_to_path(ca)
    return tls_context(chain, key, ca if mutual else None, protocol="http/1.1")


def _client_context(authority: trustme.CA, issuer: trustme.CA | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if issuer is not None:
        issuer.issue_cert("client@localhost").configure_cert(context)
    return context


async def _statuses(address: str, context: ssl.SSLContext) -> tuple[int, int]:
    url = f"https://localhost:{address.rpartition(':')[2]}"

    def work() -> tuple[int, int]:
        with httpx.Client(base_url=url, verify=context, trust_env=False) as client:
            return client.post(INFER, content=BODY).status_code, client.get("/v2/models/echo").status_code

    return await trio.to_thread.run_sync(work)


@pytest.mark.parametrize("mutual", [False, True])
async def test_one_tls_connection_serves_both_lanes(authority: trustme.CA, tmp_path: Path, *, mutual: bool) -> None:
    tls = _server_context(authority, tmp_path, mutual=mutual)
    context = _client_context(authority, authority if mutual else None)
    async with serving_rest(tmp_path, front_end={"tls": tls}) as serving:
        assert await _statuses(serving.address, context) == (200, 200)
        await serving.wait_closed()


@pytest.mark.parametrize("issuer", [None, trustme.CA()], ids=["no certificate", "a stranger's certificate"])
async def test_clients_without_a_trusted_certificate_are_refused(
    authority: trustme.CA, tmp_path: Path, issuer: trustme.CA | None
) -> None:
    tls = _server_context(authority, tmp_path, mutual=True)
    async with serving_rest(tmp_path, front_end={"tls": tls}) as serving:
        with pytest.raises(httpx.TransportError):
            await _statuses(serving.address, _client_context(authority, issuer))
        assert await _statuses(serving.address, _client_context(authority, authority)) == (200, 200)
        await serving.wait_closed()


async def test_plain_http_and_unfinished_handshakes_on_a_tls_port_end_only_their_connections(
    authority: trustme.CA, tmp_path: Path
) -> None:
    tls = _server_context(authority, tmp_path, mutual=False)
    async with serving_rest(tmp_path, front_end={"tls": tls}) as serving, serving.connect() as silent:
        async with serving.connect() as peer:
            await peer.send(infer_post())
            assert b"HTTP/1.1 200" not in await peer.rest()
        assert await _statuses(serving.address, _client_context(authority)) == (200, 200)
        with trio.fail_after(WAIT_SECONDS):
            await serving.front_end.drain(0.1)
        assert await silent.rest() == b""


async def test_a_unix_socket_serves_both_lanes_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "rest.sock"
    async with serving_rest(tmp_path, address=f"unix:{path}"), await trio.open_unix_socket(path) as stream:
        peer = Peer(stream)
        assert (await peer.ask(infer_post())).json["outputs"][0]["data"] == [0.5, -1.0]
        metadata = await peer.ask(b"GET /v2/models/echo HTTP/1.1\r\nHost: h\r\n\r\n")
        assert metadata.json["versions"] == ["1", "2"]
    assert not path.exists()
