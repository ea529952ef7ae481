from __future__ import annotations

import json
import queue
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import numpy as np
import pytest
import trio
import trustme
from joserfc import jwt
from joserfc.jwk import ECKey

from ovmstrio.auth.key_file import write_key_file
from ovmstrio.encoding.messages import message_class
from tests.support import ir
from tests.support.all_kinds import write_all_kinds
from tests.support.api_clients import triton_module
from tests.support.callers import bearer, entry_of
from tests.support.graphs import LOOPBACK, graph_text, python_node
from tests.support.served_in_thread import ServedInThread, ServedPlan, serving_in_thread
from tests.support.system_servers import write_config
from tests.support.traced_servers import serving
from tests.support.waits import WAIT_SECONDS, until

MODEL = "/v2/models/add"


def _config(folder: Path) -> Path:
    return write_config(folder, {"name": "add", "base_path": str(ir.save(ir.dummy(), folder / "models", "add"))})


def _rest_status(server: ServedInThread, folder: Path, client: str) -> int:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(folder / f"{client}.pem")
    with httpx.Client(verify=context, timeout=WAIT_SECONDS, trust_env=False) as connection:
        return connection.get(f"https://{server.http}{MODEL}").status_code


def _grpc_code(server: ServedInThread, folder: Path, client: str) -> str:
    pem = (folder / f"{client}.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), pem, pem)
    request = message_class("inference.ModelMetadataRequest")(name="add").SerializeToString()
    with grpc.secure_channel(server.grpc, credentials) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelMetadata")
        try:
            call(request, timeout=WAIT_SECONDS, wait_for_ready=True)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def test_client_certificates_identify_callers(tmp_path: Path) -> None:
    authority, keys, own = trustme.CA(), tmp_path / "keys.json", tmp_path / "server.pem"
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(own)
    for name in ("node", "other"):
        made = authority.issue_cert(f"{name}@example.org")
        made.private_key_and_cert_chain_pem.write_to_path(tmp_path / f"{name}.pem")
    write_key_file(keys, [entry_of("node", "infer:*", certificate="node@example.org")])
    tls = {"tls_cert": own, "tls_key": own, "client_ca": tmp_path / "ca.pem"}
    with serving_in_thread(config_path=_config(tmp_path), keys_file=keys, **tls) as server:
        clients = ("node", "other")
        assert [_rest_status(server, tmp_path, client) for client in clients] == [200, 401]
        assert [_grpc_code(server, tmp_path, client) for client in clients] == ["OK", "UNAUTHENTICATED"]


def test_tokens_are_verified_with_the_current_key_file(tmp_path: Path) -> None:
    old, new = (ECKey.generate_key("P-256", {"kid": kid}) for kid in ("old", "new"))
    jwks = tmp_path / "keys.jwks"

    def write(key: ECKey) -> None:
        jwks.write_text(json.dumps({"keys": [key.as_dict(private=False)]}))

    def token(key: ECKey, **claims: str) -> str:
        all_claims = {"sub": "ann", "aud": "ovms", "scope": "infer:add", "exp": time.time() + 600} | claims
        return jwt.encode({"alg": "ES256", "kid": key.kid}, all_claims, key)

    write(old)
    with serving_in_thread(config_path=_config(tmp_path), jwks_file=jwks, jwt_audience="ovms") as server:

        def status(token: str, path: str = MODEL) -> int:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            return server.ask("GET", path, headers=headers).status_code

        tokens = (token(old), token(old), token(old, aud="x"), token(new), "")
        assert [status(each) for each in tokens] == [200, 200, 401, 401, 401]
        assert status(token(old, scope="read x"), "/v1/config") == 200
        write(new)
        until(lambda: status(token(new)) == 200)
        assert status(token(old)) == 401


# Streams of removed callers


LAST_CHUNK: Final = b"0\r\n\r\n"
ENDLESS_NODE: Final = """
import time
from pyovms import Tensor

class OvmsPythonModel:
    def execute(self, inputs):
        while True:
            yield [Tensor("out", b"tick")]
            time.sleep(0.02)
"""
ENDLESS_HANDLER: Final = """
import time

class Handler:
    def handle_post(self, payload):
        def ticks():
            while True:
                yield b"tick"
                time.sleep(0.02)
        return ticks()
"""
CHAT: Final = {"model": "graph", "stream": True, "messages": [{"role": "user", "content": "x"}]}


@asynccontextmanager
async def _keyed(tmp_path: Path, *callers: str) -> AsyncIterator[tuple[ServedPlan, Callable[..., None]]]:
    keys = tmp_path / "keys.json"

    def set_callers(*names: str, scope: str = "infer:*") -> None:
        write_key_file(keys, [entry_of(name, scope) for name in names])

    config = write_all_kinds(tmp_path, node=ENDLESS_NODE, handler=ENDLESS_HANDLER)
    text = graph_text(python_node("node.py", ["IN:in"], ["OUT:out"], more=LOOPBACK))
    (tmp_path / "graph" / "graph.pbtxt").write_text(text)
    set_callers(*callers)
    with trio.fail_after(2 * WAIT_SECONDS):
        async with serving(config, keys_file=keys, file_system_poll_wait_seconds=0.2) as server:
            yield server, set_callers


@asynccontextmanager
async def _streaming(server: ServedPlan, caller: str, path: str, body: Any) -> AsyncIterator[trio.SocketStream]:
    host, _, port = server.rest[0].rpartition(":")
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {caller}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    async with await trio.open_tcp_stream(host, int(port)) as connection:
        await connection.send_all(head.encode() + content)
        received = await _read(connection, b"tick")
        assert received.startswith(b"HTTP/1.1 200"), received
        yield connection


async def _read(connection: trio.SocketStream, text: bytes) -> bytes:
    received = b""
    while text not in received:
        piece = await connection.receive_some()
        if not piece:
            break
        received += piece
    return received


@pytest.mark.parametrize(
    ("path", "body"), [("/v2/models/graph/generate_stream", {"in": "x"}), ("/v3/chat/completions", CHAT)]
)
async def test_event_stream_of_a_removed_caller_ends_with_an_error(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with (
        _keyed(tmp_path, "shop", "stays") as (server, set_callers),
        _streaming(server, "shop", path, body) as removed,
        _streaming(server, "stays", path, body) as kept,
    ):
        set_callers("stays")
        assert (await _read(removed, LAST_CHUNK)).rpartition(b"data: ")[2].count(b"unknown or expired key") == 1
        await kept.receive_some()
        assert b"tick" in await _read(kept, b"tick")


async def test_handler_stream_of_a_removed_caller_is_cut(tmp_path: Path) -> None:
    async with _keyed(tmp_path, "shop") as (server, set_callers), _streaming(server, "shop", "/handler", [1]) as answer:
        set_callers()
        rest = await _read(answer, LAST_CHUNK)
    assert not rest.endswith(LAST_CHUNK)


def _stream_over_grpc(address: str, name: str, change: Callable[[], None]) -> str:
    triton = triton_module("grpc")
    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    given = triton.InferInput("b", [1, 10], "FP32")
    given.set_data_from_numpy(np.ones((1, 10), np.float32))
    if name == "graph":
        given = triton.InferInput("in", [1], "BYTES")
        given.set_data_from_numpy(np.array([b"x"], np.object_))
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), headers=bearer("shop"))
        client.async_stream_infer(name, [given])
        assert answers.get(timeout=WAIT_SECONDS)[1] is None
        change()
        error = None
        while error is None:
            error = answers.get(timeout=WAIT_SECONDS)[1]
        client.stop_stream(cancel_requests=True)
    return str(error)


@pytest.mark.parametrize(
    ("name", "callers_afterwards", "expected"),
    [
        ("graph", (), "UNAUTHENTICATED.*unknown or expired key"),
        ("model", (), "UNAUTHENTICATED.*unknown or expired key"),
        ("graph", ("shop",), "PERMISSION_DENIED.*shop"),
    ],
)
async def test_grpc_stream_ends_if_its_caller_is_removed_or_has_fewer_scopes(
    tmp_path: Path, name: str, callers_afterwards: tuple[str, ...], expected: str
) -> None:
    async with _keyed(tmp_path, "shop") as (server, set_callers):
        change = partial(set_callers, *callers_afterwards, scope="infer:other")
        error = await trio.to_thread.run_sync(_stream_over_grpc, server.grpc[0], name, change)
    assert re.search(expected, error, re.DOTALL), error
