"""Projects with services of their own, by ``ovms serve``: alone in many processes, and beside models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from ovmstrio.access.key_file import write_key_file
from tests.support.callers import entry_of
from tests.support.processes import serving
from tests.support.project_processes import serving_project
from tests.support.projects import write_project

pytestmark = pytest.mark.e2e

PROTO = """
syntax = "proto3";
package talk;
message Text { string value = 1; }
service Talk {
  rpc Say (Text) returns (Text);
  rpc Spell (Text) returns (stream Text);
}
"""
HANDLER = """
import os

class Handler:
    def __init__(self, module_proto_pb2):
        self.pb = module_proto_pb2

    def Say(self, payload):
        return self.pb.Text(value=f"{payload.value} {os.getpid()}")

    def Spell(self, payload):
        for letter in payload.value:
            yield self.pb.Text(value=letter)
"""
TIMEOUT_SECONDS = 20


def _project(folder: Path, **keys: Any) -> Path:
    file = write_project(folder, HANDLER, protobuf_path="talk.proto", **keys)
    (folder / "talk.proto").write_text(PROTO)
    return file


def _method(channel: Any, kind: str, name: str) -> Any:
    make = getattr(channel, kind)
    coding = {"request_serializer": StringValue.SerializeToString, "response_deserializer": StringValue.FromString}
    return make(f"/talk.Talk/{name}", **coding)


def _say(address: str) -> str:
    # Otherwise all channels of a process share one connection.
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        reply = _method(channel, "unary_unary", "Say")(StringValue(value="I am"), timeout=TIMEOUT_SECONDS)
        return str(reply.value)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_project_alone(tmp_path: Path, processes: int) -> None:
    """Each connection is a process's, and all of them serve all kinds of calls."""
    file = _project(tmp_path / "project", processes=processes, threads_per_process=2)
    with serving_project(file, options=("--grpc_bind_address", "127.0.0.1")) as server:
        said = {_say(server.address) for _ in range(4)}
        assert len(said) == processes
        with grpc.insecure_channel(server.address) as channel:
            spelled = _method(channel, "unary_stream", "Spell")(StringValue(value="abc"), timeout=TIMEOUT_SECONDS)
            assert [each.value for each in spelled] == ["a", "b", "c"]
        assert server.stop() == 0


def test_a_project_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The server has its port and its messages, another process its code."""
    options = ("--grpc_bind_address", "127.0.0.1", "--python_isolation", "process")
    with serving_project(_project(tmp_path / "project"), options=options) as server:
        pid = int(_say(server.address).split()[-1])
        assert pid != server.process.pid
        with grpc.insecure_channel(server.address) as channel:
            spelled = _method(channel, "unary_stream", "Spell")(StringValue(value="abc"), timeout=TIMEOUT_SECONDS)
            assert [each.value for each in spelled] == ["a", "b", "c"]
        assert server.stop() == 0


def test_a_project_beside_models(tmp_path: Path) -> None:
    """Its service is at the port of gRPC, another one over HTTP is at its name, and readiness counts both."""
    _project(tmp_path / "talk")
    write_project(tmp_path / "echo", "class Handler:\n    def handle_post(self, payload): return payload\n")
    config = tmp_path / "config.json"
    entries = [{"name": "talk", "path": "talk"}, {"name": "echo", "path": "echo/nucleus.yaml"}]
    config.write_text(json.dumps({"model_config_list": [], "handler_config_list": entries}))
    with serving("--config_path", str(config)) as server:
        assert _say(server.grpc) == f"I am {server.process.pid}"
        assert server.get("/v2/models/talk").json()["platform"] == "handler"
        assert server.get("/talk").status_code == 404
        assert server.get("/echo").status_code == 405
        code, _ = server.stop()
        assert code == 0


SEEN: Final = """
class Handler:
    def __init__(self, module_proto_pb2):
        self.pb = module_proto_pb2

    def Say(self, payload, context):
        return self.pb.Text(value=" ".join(sorted(key for key, _ in context.invocation_metadata())))

    def Spell(self, payload):
        yield payload
"""


def test_a_handler_does_not_see_the_key_that_the_server_has_taken(tmp_path: Path) -> None:
    """Its callers' other metadata it does, an ``authorization`` of its own among them."""
    folder, keys = tmp_path / "project", tmp_path / "keys.json"
    _project(folder)
    (folder / "handler.py").write_text(SEEN)
    write_key_file(keys, [entry_of("shop", "infer:*")])
    config = tmp_path / "config.json"
    document = {"model_config_list": [], "handler_config_list": [{"name": "talk", "path": str(folder)}]}
    config.write_text(json.dumps(document))
    own = [("authorization", "Basic b3du"), ("x-api-key", "shop")]
    with (
        serving("--config_path", str(config), "--keys_file", str(keys)) as server,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        say = _method(channel, "unary_unary", "Say")
        seen = [
            say(StringValue(value=""), metadata=metadata, timeout=TIMEOUT_SECONDS).value.split()
            for metadata in ([("authorization", "Bearer shop"), ("mine", "1")], own)
        ]
        with pytest.raises(grpc.RpcError) as caught:
            say(StringValue(value=""), timeout=TIMEOUT_SECONDS)
    assert seen == [["mine", "user-agent"], ["authorization", "user-agent"]]
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
