"""Callers of a server in process: client certificates over both protocols, and tokens whose keys change."""

from __future__ import annotations

import json
import ssl
import time
from typing import TYPE_CHECKING

import grpc
import httpx
import trustme
from joserfc import jwt
from joserfc.jwk import ECKey

from ovmstrio.access.key_file import write_key_file
from ovmstrio.protocol.descriptors import message_class
from tests.support import ir
from tests.support.callers import entry_of
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.waits import WAIT_SECONDS, until

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "/v2/models/add"


def _config(folder: Path) -> Path:
    base = ir.save(ir.dummy(), folder / "models", "add")
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": {"name": "add", "base_path": str(base)}}]}))
    return config


def _context(folder: Path, client: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(folder / f"{client}.pem")
    return context


def _rest_status(server: ServedInThread, folder: Path, client: str) -> int:
    with httpx.Client(verify=_context(folder, client), timeout=WAIT_SECONDS, trust_env=False) as connection:
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


def test_client_certificates_name_callers_over_both_protocols(tmp_path: Path) -> None:
    """A certificate that TLS trusts and no entry names is not enough."""
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


def test_tokens_are_verified_with_the_present_key_file(tmp_path: Path) -> None:
    """A token of a new key is valid once the file has the key, and a token of a removed key no longer."""
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
