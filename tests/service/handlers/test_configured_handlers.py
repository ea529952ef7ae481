from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trio
from google.protobuf.wrappers_pb2 import StringValue

from ovmstrio.auth.key_file import write_key_file
from ovmstrio.server.running import Running
from ovmstrio.server.server import serve
from ovmstrio.server.settings import ServerSettings
from tests.support.callers import entry_of
from tests.support.projects import write_project
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.system_servers import PID_HANDLER
from tests.support.waits import WAIT_SECONDS

PROTO = """
syntax = "proto3";
package talk;
message Text { string value = 1; }
service Talk { rpc Say (Text) returns (Text); }
"""
TALK = """
import os

class Handler:
    def __init__(self, module_proto_pb2):
        self.pb = module_proto_pb2

    def Say(self, payload, context):
        seen = sorted(key for key, _ in context.invocation_metadata() if key != "user-agent")
        return self.pb.Text(value=" ".join([str(os.getpid()), *seen]))
"""
ECHO = """
class Handler:
    def handle_post(self, headers):
        return {name.lower(): value for name, value in dict(headers).items()}
"""


def _configure(folder: Path) -> Path:
    write_project(folder / "talk", TALK, protobuf_path="talk.proto")
    (folder / "talk" / "talk.proto").write_text(PROTO)
    write_project(folder / "echo", ECHO)
    config = folder / "config.json"
    entries = [{"name": "talk", "path": "talk"}, {"name": "echo", "path": "echo/nucleus.yaml"}]
    config.write_text(json.dumps({"model_config_list": [], "handler_config_list": entries}))
    return config


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys.json"
    write_key_file(keys, [entry_of("shop", "infer:*")])
    with serving_in_thread(config_path=_configure(folder), keys_file=keys) as server:
        yield server


def _say(server: ServedInThread, *metadata: tuple[str, str]) -> list[str]:
    """Return the id of the process and the names of the metadata that the handler saw."""
    coding = {"request_serializer": StringValue.SerializeToString, "response_deserializer": StringValue.FromString}
    with grpc.insecure_channel(server.grpc) as channel:
        say = channel.unary_unary("/talk.Talk/Say", **coding)
        return str(say(StringValue(value=""), metadata=metadata, timeout=WAIT_SECONDS).value).split()


def test_handlers_are_called_by_their_service_or_name(tmp_path: Path) -> None:
    with serving_in_thread(config_path=_configure(tmp_path)) as server:
        assert _say(server) == [str(os.getpid())]
        assert server.ask("GET", "/v2/models/talk").json()["platform"] == "handler"
        assert [server.ask("GET", path).status_code for path in ("/talk", "/echo")] == [404, 405]
        assert server.ask("GET", "/v2/health/ready").status_code == 200


@pytest.mark.parametrize(
    ("headers", "seen"),
    [
        ({"authorization": "Bearer shop", "mine": "1"}, ["mine"]),
        ({"authorization": "Basic b3du", "x-api-key": "shop"}, ["authorization"]),
    ],
    ids=["bearer", "own authorization"],
)
@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_handlers_receive_all_metadata_but_the_key(
    keyed: ServedInThread, transport: str, headers: dict[str, str], seen: list[str]
) -> None:
    if transport == "grpc":
        found = _say(keyed, *headers.items())[1:]
    else:
        answer = keyed.ask("POST", "/echo", headers=headers).json()
        found = sorted(answer.keys() & {"authorization", "x-api-key", "mine"})
    assert found == seen


def test_calls_without_a_key_are_refused(keyed: ServedInThread) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        _say(keyed)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert keyed.ask("POST", "/echo").status_code == 401


# Isolated handlers


async def test_readiness_follows_the_process_of_a_handler(tmp_path: Path) -> None:
    write_project(tmp_path / "alone", PID_HANDLER)
    config, path = tmp_path / "config.json", tmp_path / "rest"
    entry = {"name": "alone", "path": "alone", "python_isolation": "process"}
    config.write_text(json.dumps({"model_config_list": [], "handler_config_list": [entry]}))
    settings = ServerSettings(config_path=config, port=0, rest_port=0, rest_bind_address=f"unix:{path}")
    async with trio.open_nursery() as nursery:
        with trio.fail_after(WAIT_SECONDS):
            running: Running = await nursery.start(partial(serve, settings, handle_signals=False))
            plane = running.plane
            await plane.registry.wait_loaded()
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://h", timeout=WAIT_SECONDS) as client:
                os.kill((await client.get("/alone")).json()["pid"], signal.SIGKILL)
            while plane.readiness().ready:
                await plane.wait_change()
            assert "all worker processes exited" in plane.readiness().reason
            while not plane.readiness().ready:
                await plane.wait_change()
        nursery.cancel_scope.cancel()
