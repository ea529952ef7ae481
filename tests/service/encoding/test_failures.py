from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from ovmstrio.client import ClientTls, Unreachable, open_client
from ovmstrio.core import errors
from tests.support.plain_http import QuietHandler, answering_http
from tests.support.waits import WAIT_SECONDS

REFUSAL = "cannot connect to the database"


class _Refusing(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: context.abort(grpc.StatusCode.UNAVAILABLE, REFUSAL)
        )


class _Page(QuietHandler):
    def do_GET(self) -> None:  # noqa: N802 - the library's name
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def do_POST(self) -> None:  # noqa: N802 - the library's name
        self.do_GET()


class _Nothing(_Page):
    def do_GET(self) -> None:  # noqa: N802 - the library's name
        self.send_response(204)
        self.end_headers()


@contextlib.contextmanager
def _silence() -> Iterator[str]:
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_an_unavailable_server_is_not_unreachable() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((_Refusing(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with open_client(f"127.0.0.1:{port}") as client, pytest.raises(errors.NotReady, match=REFUSAL):
            client.server_live()
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("rest", [False, True])
def test_a_silent_address_is_unreachable(rest: bool) -> None:
    with _silence() as url, open_client(url, rest=rest, timeout=0.5) as client, pytest.raises(Unreachable):
        client.server_live()


@pytest.mark.parametrize("rest", [False, True])
def test_an_unknown_host_is_unreachable(rest: bool) -> None:
    url = "no-such-host.invalid:9000"
    with open_client(url, rest=rest, timeout=WAIT_SECONDS) as client, pytest.raises(Unreachable, match="no-such-host"):
        client.server_live()


def test_a_page_in_place_of_an_answer_is_an_error_of_the_client() -> None:
    with answering_http(_Page) as url, open_client(url, rest=True) as client:
        for call in (client.models, lambda: client.metadata("m"), lambda: client.infer("m", {"x": np.zeros(1)})):
            with pytest.raises(errors.ServerError, match="does not answer as a KServe v2 server"):
                call()


def test_an_empty_answer_is_the_error_of_an_empty_demultiplexer() -> None:
    with (
        answering_http(_Nothing) as url,
        open_client(url, rest=True) as client,
        pytest.raises(errors.NothingToGather, match="nothing to split"),
    ):
        client.infer("m", {"x": np.zeros(1)})


@pytest.mark.parametrize("rest", [False, True])
def test_an_invalid_address_is_refused(rest: bool) -> None:
    for url in ("localhost:x", "localhost:65536", "ftp://localhost"):
        with pytest.raises(errors.InvalidRequest, match="HOST:PORT"):
            open_client(url, rest=rest)


def test_a_socket_path_is_a_grpc_address() -> None:
    with open_client("unix:///no:where") as client, pytest.raises(Unreachable, match="unix:///no:where"):
        client.server_live()


@pytest.mark.parametrize("model", ["", ".", ".."])
def test_a_name_that_a_url_would_drop_is_refused(model: str) -> None:
    with open_client("127.0.0.1:1", rest=True) as client, pytest.raises(errors.InvalidRequest, match="name of a model"):
        client.metadata(model)


@pytest.mark.parametrize("rest", [False, True])
def test_an_unusable_tls_file_is_named(tmp_path: Path, rest: bool) -> None:
    damaged, absent = tmp_path / "damaged.pem", tmp_path / "absent.pem"
    damaged.write_bytes(b"no certificate")
    for tls in (ClientTls(ca=damaged), ClientTls(ca=absent), ClientTls(cert=damaged, key=damaged)):
        with pytest.raises(errors.InvalidRequest, match=r"(damaged|absent)\.pem: cannot read"):
            open_client("127.0.0.1:1", rest=rest, tls=tls)


@pytest.mark.parametrize("rest", [False, True])
def test_a_key_with_a_password_is_refused(tmp_path: Path, rest: bool) -> None:
    issued = trustme.CA().issue_cert("localhost")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(cert)
    loaded = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    key.write_bytes(loaded.private_bytes(serialization.Encoding.PEM, form, locked))
    with pytest.raises(errors.InvalidRequest, match="encrypted"):
        open_client("127.0.0.1:1", rest=rest, tls=ClientTls(cert=cert, key=key))
