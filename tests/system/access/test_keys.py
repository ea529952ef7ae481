"""A server whose callers have to be known, started by the command: keys, certificates and tokens that come and go."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from joserfc import jwt
from joserfc.jwk import ECKey

from ovmstrio.protocol.descriptors import message_class
from tests.support import ir
from tests.support.processes import OvmsProcess, run_ovms, serving
from tests.support.projects import write_project

pytestmark = pytest.mark.e2e

MODEL = "/v2/models/add"


def _until(holds: Callable[[], bool]) -> None:
    """Return once something holds; fail after a minute."""
    ends = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends
        threading.Event().wait(0.1)


def _new(file: Path, *arguments: str) -> str:
    made = run_ovms("keys", "new", *arguments, "--file", str(file))
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def _config(folder: Path) -> Path:
    base = ir.save(ir.dummy(), folder / "models", "add")
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": {"name": "add", "base_path": str(base)}}]}))
    return config


def _status(server: OvmsProcess, key: str, path: str = MODEL) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.get(server.rest + path, headers=headers, timeout=30).status_code


def test_keys_come_and_go_while_a_server_runs_and_stand_in_no_line_of_its_log(tmp_path: Path) -> None:
    """Nor in any answer or metric, at whatever level it logs, whatever goes wrong with them."""
    keys, log = tmp_path / "keys.json", tmp_path / "log"
    shop = _new(keys, "shop", "--scope", "infer:add")
    boss = _new(keys, "boss", "--scope", "admin", "--scope", "metrics")
    options = ("--config_path", str(_config(tmp_path)), "--keys_file", str(keys), "--log_level", "TRACE")
    secrets, seen = [shop, boss, "Zm9yZ2VkIHNlY3JldA"], []
    with serving(*options, log=log) as server:
        assert [_status(server, key) for key in ("", secrets[2], shop, boss)] == [401, 401, 200, 200]
        assert [_status(server, key, "/v1/config") for key in (shop, boss)] == [403, 200]
        for key in secrets:
            reloaded = httpx.post(f"{server.rest}/v1/config/reload", headers={"x-api-key": key}, timeout=60)
            seen.append(reloaded.text)
            assert reloaded.status_code == {shop: 403, boss: 200}.get(key, 401)
            seen.append(httpx.post(f"{server.rest}{MODEL}/infer", headers={"x-api-key": key}, content="{").text)
            asked = run_ovms("models", "--url", server.grpc, timeout=120)
            assert "who calls must be known" in asked.stderr
        seen.append(httpx.get(f"{server.rest}/metrics", headers={"x-api-key": boss}).text)
        late = _new(keys, "late", "--scope", "read")
        _until(lambda: _status(server, late) == 200)
        assert run_ovms("keys", "revoke", "shop", "--file", str(keys)).returncode == 0
        _until(lambda: _status(server, shop) == 401)
        keys.write_text("{")
        _until(lambda: "callers cannot be read again" in server.printed_so_far())
        assert [_status(server, key) for key in (late, shop)] == [200, 401]
        code, printed = server.stop()
    assert code == 0, printed
    assert "server changed" in printed
    assert "caller=boss" in printed
    text = "\n".join([printed, *seen, run_ovms("keys", "list", "--file", str(keys)).stdout])
    assert [secret for secret in (*secrets, late) if secret in text or secret.removeprefix("ovms_") in text] == []


def test_client_certificates_name_callers_over_both_protocols_and_are_replaced(tmp_path: Path) -> None:
    """Who has one that no entry names is trusted by TLS, and nobody yet."""
    authority, keys = trustme.CA(), tmp_path / "keys.json"
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server_file = tmp_path / "server.pem"
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(server_file)
    assert _new(keys, "node", "--scope", "infer:*", "--certificate", "node@example.org") == ""
    options = ("--tls_cert", str(server_file), "--tls_key", str(server_file), "--client_ca", str(tmp_path / "ca.pem"))
    clients = {}
    for name in ("node", "other"):
        made, clients[name] = authority.issue_cert(f"{name}@example.org"), tmp_path / f"{name}.pem"
        made.private_key_and_cert_chain_pem.write_to_path(clients[name])
    config = str(_config(tmp_path))
    with serving(
        *options, "--config_path", config, "--keys_file", str(keys), ready=False, log=tmp_path / "log"
    ) as server:
        _until(lambda: "config applied" in server.printed_so_far())
        ca = tmp_path / "ca.pem"
        assert [_rest_status(server, ca, clients[name]) for name in ("node", "other")] == [200, 401]
        assert [_grpc_code(server, ca, clients[name]) for name in ("node", "other")] == ["OK", "UNAUTHENTICATED"]
        authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(server_file)
        _until(lambda: "certificates read again" in server.printed_so_far())
        assert _rest_status(server, ca, clients["node"]) == 200
        assert _grpc_code(server, ca, clients["node"]) == "OK"


def _rest_status(server: OvmsProcess, ca: Path, client: Path) -> int:
    import ssl

    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(client)
    url = server.rest.replace("http://", "https://") + MODEL
    with httpx.Client(verify=context, timeout=30) as asking:
        return asking.get(url).status_code


def _grpc_code(server: OvmsProcess, ca: Path, client: Path) -> str:
    pem = client.read_bytes()
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), pem, pem)
    with grpc.secure_channel(server.grpc, credentials) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelMetadata",
            request_serializer=message_class("inference.ModelMetadataRequest").SerializeToString,
            response_deserializer=message_class("inference.ModelMetadataResponse").FromString,
        )
        try:
            call(message_class("inference.ModelMetadataRequest")(name="add"), timeout=60, wait_for_ready=True)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def test_keys_of_tokens_are_taken_from_their_file_as_it_changes(tmp_path: Path) -> None:
    """A token of a new key is good once the file has it, and one of an old key no more."""
    old, new = (ECKey.generate_key("P-256", {"kid": kid}) for kid in ("old", "new"))
    jwks = tmp_path / "keys.jwks"

    def write(key: ECKey) -> None:
        jwks.write_text(json.dumps({"keys": [key.as_dict(private=False)]}))

    def token(key: ECKey, **claims: str) -> str:
        said = {"sub": "ann", "aud": "ovms", "scope": "infer:add", "exp": time.time() + 600} | claims
        return jwt.encode({"alg": "ES256", "kid": key.kid}, said, key)

    write(old)
    options = ("--config_path", str(_config(tmp_path)), "--jwks_file", str(jwks), "--jwt_audience", "ovms")
    with serving(*options, log=tmp_path / "log") as server:
        good = token(old)
        assert [_status(server, key) for key in (good, good, token(old, aud="x"), token(new), "")] == [
            *(200, 200, 401, 401, 401)
        ]
        assert _status(server, token(old, scope="read x"), "/v1/config") == 200
        write(new)
        _until(lambda: _status(server, token(new)) == 200)
        assert _status(server, good) == 401
        assert good not in server.printed_so_far()


ECHO = """
class Handler:
    def handle_post(self, headers):
        return {name.lower(): value for name, value in dict(headers).items()}
"""


def test_handlers_do_not_see_the_key_that_the_server_has_taken(tmp_path: Path) -> None:
    """A header of their own they do; what is wrong with a file of callers is told by the check."""
    keys = tmp_path / "keys.json"
    shop = _new(keys, "shop", "--scope", "infer:echo")
    project = write_project(tmp_path / "echo", ECHO)
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_config_list": [], "handler_config_list": [{"name": "echo", "path": str(tmp_path / "echo")}]})
    )
    del project
    with serving("--config_path", str(config), "--keys_file", str(keys)) as server:
        own = {"authorization": "Basic b3du", "x-api-key": shop}
        seen = httpx.post(f"{server.rest}/echo", headers=own, json=None, timeout=60).json()
        assert (seen.get("authorization"), "x-api-key" in seen) == ("Basic b3du", False)
        seen = httpx.post(f"{server.rest}/echo", headers={"authorization": f"Bearer {shop}"}, timeout=60).json()
        assert "authorization" not in seen
    checked = run_ovms("check", str(config), "--keys_file", str(keys), timeout=120)
    assert checked.returncode == 0, checked.stdout
    keys.write_text('{"callers": [\n  {"name": "a", "scopes": ["infer"], "sha256": "x"}\n]}')
    checked = run_ovms("check", str(config), "--keys_file", str(keys), "--json", timeout=120)
    assert checked.returncode == 1
    problems = [(each["file"], each["line"]) for each in json.loads(checked.stdout)["problems"]]
    assert set(problems) == {(str(keys), 2)}
