"""Handlers that come and go with the configuration of a server that runs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trio
from google.protobuf.wrappers_pb2 import StringValue

from ovmstrio.server.life import serve
from ovmstrio.server.running import Running
from ovmstrio.server.settings import ServerSettings
from tests.support.projects import write_project, written

PATIENCE_SECONDS = 60
PROTO = """
syntax = "proto3";
package added_by_reload;
message Text { string value = 1; }
service Talk { rpc Say (Text) returns (Text); }
"""
HANDLER = """
class Handler:
    def __init__(self, module_proto_pb2):
        self.pb = module_proto_pb2

    def Say(self, payload):
        return self.pb.Text(value=payload.value + "!")
"""


def _configure(config: Path, *names: str) -> None:
    entries = [{"name": name, "path": name} for name in names]
    config.write_text(json.dumps({"model_config_list": [], "handler_config_list": entries}))


async def _say(channel: Any, value: str) -> str:
    def call() -> str:
        method = channel.unary_unary(
            "/added_by_reload.Talk/Say",
            request_serializer=StringValue.SerializeToString,
            response_deserializer=StringValue.FromString,
        )
        return str(method(StringValue(value=value), timeout=PATIENCE_SECONDS).value)

    return await trio.to_thread.run_sync(call)


async def test_a_service_of_grpc_that_a_reload_adds_is_served_without_restart(tmp_path: Path) -> None:
    """Clients that were connected before can call it, those of other handlers notice nothing, and it may go again."""
    write_project(tmp_path / "echo", "class Handler:\n    def handle_post(self, payload): return payload\n")
    written(tmp_path / "talk", "talk.proto", PROTO)
    write_project(tmp_path / "talk", HANDLER, protobuf_path="talk.proto")
    config = tmp_path / "config.json"
    _configure(config, "echo")
    (tmp_path / "sockets").mkdir()
    sockets = {name: f"unix:{tmp_path}/sockets/{name}" for name in ("grpc", "rest")}
    addresses = {f"{name}_bind_address": address for name, address in sockets.items()}
    settings = ServerSettings(config_path=config, port=0, rest_port=0, file_system_poll_wait_seconds=0, **addresses)
    transport = httpx.AsyncHTTPTransport(uds=f"{tmp_path}/sockets/rest")
    async with trio.open_nursery() as nursery:
        running: Running = await nursery.start(partial(serve, settings, handle_signals=False))
        await running.plane.registry.wait_loaded()
        async with httpx.AsyncClient(transport=transport, base_url="http://h", timeout=PATIENCE_SECONDS) as client:
            with grpc.insecure_channel(running.grpc[0]) as channel:
                with pytest.raises(grpc.RpcError) as unknown:
                    await _say(channel, "a")
                assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
                _configure(config, "echo", "talk")
                assert (await client.post("/v1/config/reload")).status_code == 201
                assert await _say(channel, "b") == "b!"
                assert (await client.post("/echo", json=[1])).json() == [1]
                _configure(config, "echo")
                assert (await client.post("/v1/config/reload")).status_code == 201
                with pytest.raises(grpc.RpcError) as gone:
                    await _say(channel, "c")
                assert gone.value.code() is grpc.StatusCode.UNIMPLEMENTED
                assert (await client.post("/echo", json=[1])).json() == [1]
        nursery.cancel_scope.cancel()
