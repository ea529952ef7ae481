from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import trio
import trio.testing
from google.protobuf.wrappers_pb2 import Int64Value, StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from ovmstrio.config.specs import HandlerSpec, ServableSpec
from ovmstrio.core.events import CallEvent, CallObserver
from ovmstrio.handlers.handler_service import HandlerService, load_handler
from ovmstrio.server.front_ends import GrpcFrontEnd
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.kind import LoadContext, lease_nothing
from ovmstrio.serving.registry import Registry
from ovmstrio.telemetry.metrics import Metrics
from tests.support.api_clients import with_channel
from tests.support.projects import write_project
from tests.support.stub_registry import registry_of
from tests.support.waits import WAIT_SECONDS

PROTO = """
syntax = "proto3";
package {package};
message Text {{ string value = 1; }}
service Talk {{
  rpc Say (Text) returns (Text);
  rpc Listen (stream Text) returns (stream Text);
}}
"""
HANDLER = """
import grpc

class Handler:
    def __init__(self, module_proto_pb2):
        self.pb = module_proto_pb2

    def Say(self, payload, context):
        if payload.value == "raise":
            raise ValueError("secret")
        if payload.value == "abort":
            context.abort(grpc.StatusCode.NOT_FOUND, "gone")
        return self.pb.Text(value="{answer} " + payload.value)

    def Listen(self, payload):
        for each in payload:
            yield self.pb.Text(value="{answer} " + each.value)
"""
CHANGED_PROTO = """
syntax = "proto3";
package {package};
message Text {{ int64 number = 1; }}
service Talk {{
  rpc Listen (Text) returns (Text);
  rpc Count (Text) returns (Text);
}}
"""
CHANGED_HANDLER = """
class Handler:
    def __init__(self, module_proto_pb2):
        self.pb = module_proto_pb2

    def Listen(self, payload):
        return payload

    def Count(self, payload):
        return self.pb.Text(number=payload.number + 1)
"""


@dataclass
class Hosting(CallObserver):
    registry: Registry
    plane: DataPlane
    metrics: Metrics
    address: str = ""
    events: list[CallEvent] = field(default_factory=list)
    may_load: trio.Event | None = None

    def call_finished(self, event: CallEvent) -> None:
        self.events.append(event)

    async def listed(self) -> list[str]:
        own = ("grpc.", "inference.", "tensorflow.")

        def work(channel: Any) -> list[str]:
            names = ProtoReflectionDescriptorDatabase(channel).get_services()
            return sorted(name for name in names if not name.startswith(own))

        return await with_channel(self.address, work)

    async def health(self, service: str) -> Any:
        def work(channel: Any) -> Any:
            request = health_pb2.HealthCheckRequest(service=service)
            try:
                return health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_SECONDS).status
            except grpc.RpcError as error:
                return error.code()

        return await with_channel(self.address, work)

    async def say(self, package: str, text: str = "hello", method: str = "Say") -> str:
        reply = await self.ask(f"/{package}.Talk/{method}", StringValue(value=text))
        return str(reply.value)

    async def failure(self, package: str, text: str = "hello", method: str = "Say") -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            await self.say(package, text, method)
        return caught.value.code()

    async def ask(self, path: str, request: Any) -> Any:
        coding = {
            "request_serializer": type(request).SerializeToString,
            "response_deserializer": type(request).FromString,
        }

        def work(channel: Any) -> Any:
            return channel.unary_unary(path, **coding)(request, timeout=WAIT_SECONDS)

        return await with_channel(self.address, work)


class OpenTalk:
    def __init__(self, channel: Any, package: str) -> None:
        self._requests: SimpleQueue[StringValue | None] = SimpleQueue()
        coding = {
            "request_serializer": StringValue.SerializeToString,
            "response_deserializer": StringValue.FromString,
        }
        method = channel.stream_stream(f"/{package}.Talk/Listen", **coding)
        self._replies = method(iter(self._requests.get, None), timeout=WAIT_SECONDS)

    async def say(self, text: str) -> str:
        self._requests.put(StringValue(value=text))
        return str((await trio.to_thread.run_sync(next, self._replies)).value)

    async def end(self) -> None:
        self._requests.put(None)
        assert await trio.to_thread.run_sync(list, self._replies) == []


@pytest.fixture
async def hosting() -> AsyncIterator[Hosting]:
    async with running() as server:
        yield server


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Hosting]:
    async with trio.open_nursery() as outer, trio.open_nursery() as nursery:

        async def load(spec: ServableSpec, _version: int, _directory: Path) -> HandlerService:
            assert isinstance(spec, HandlerSpec)
            if server.may_load is not None:
                await server.may_load.wait()
            return await load_handler(spec, LoadContext(lease_nothing, outer))

        registry = registry_of(load, poll_seconds=0, **options)
        server: Any = Hosting(registry, None, Metrics())  # type: ignore[arg-type]
        server.plane = DataPlane(registry, observers=(server,), metrics=server.metrics)
        await nursery.start(registry.run)
        (server.address,) = await nursery.start(GrpcFrontEnd(server.plane, ["127.0.0.1:0"]).serve)
        server.plane.begin_serving()
        yield server
        nursery.cancel_scope.cancel()


def project(folder: Path, package: str, answer: str = "heard", name: str = "") -> HandlerSpec:
    file = write_project(folder, HANDLER.replace("{answer}", answer), protobuf_path="talk.proto")
    (folder / "talk.proto").write_text(PROTO.format(package=package))
    return HandlerSpec(name=name or folder.name, base_path=folder, path=file)


def reason_of(hosting: Hosting, name: str) -> str:
    (status,) = hosting.registry.statuses()[name]
    return status.reason


async def test_services_are_served_listed_and_healthy_while_configured(tmp_path: Path, hosting: Hosting) -> None:
    spec = project(tmp_path / "one", "comes")
    await hosting.registry.apply([])
    assert await hosting.failure("comes") is grpc.StatusCode.UNIMPLEMENTED
    for _ in range(2):
        assert not (await hosting.registry.apply([spec])).failures
        assert await hosting.say("comes") == "heard hello"
        assert await hosting.listed() == ["comes.Talk"]
        assert await hosting.health("comes.Talk") == health_pb2.HealthCheckResponse.SERVING
        await hosting.registry.apply([])
        assert await hosting.failure("comes") is grpc.StatusCode.UNIMPLEMENTED
        assert await hosting.listed() == []
        assert await hosting.health("comes.Talk") is grpc.StatusCode.NOT_FOUND


async def test_a_changed_proto_is_served_while_streams_of_the_old_one_continue(
    tmp_path: Path, hosting: Hosting
) -> None:
    spec = project(tmp_path / "one", "changes")
    await hosting.registry.apply([spec])
    with grpc.insecure_channel(hosting.address) as channel:
        stream = OpenTalk(channel, "changes")
        assert await stream.say("a") == "heard a"
        (tmp_path / "one" / "talk.proto").write_text(CHANGED_PROTO.format(package="changes"))
        (tmp_path / "one" / "handler.py").write_text(CHANGED_HANDLER)
        assert (await hosting.registry.rescan()).changed
        assert (await hosting.ask("/changes.Talk/Count", Int64Value(value=41))).value == 42
        assert (await hosting.ask("/changes.Talk/Listen", Int64Value(value=7))).value == 7
        assert await hosting.failure("changes") is grpc.StatusCode.UNIMPLEMENTED
        assert await stream.say("b") == "heard b"
        await stream.end()
    assert await hosting.listed() == ["changes.Talk"]

    def described(reflection: Any) -> list[str]:
        file = ProtoReflectionDescriptorDatabase(reflection).FindFileContainingSymbol("changes.Text")
        return [each.name for each in file.message_type[0].field]

    assert await with_channel(hosting.address, described) == ["number"]


async def test_no_call_fails_during_a_reload(tmp_path: Path, hosting: Hosting) -> None:
    spec = project(tmp_path / "one", "again", "old")
    await hosting.registry.apply([spec])
    answers: list[str] = []

    async def ask_on() -> None:
        while answers[-1:] != ["new hello"]:
            answers.append(await hosting.say("again"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_on)
        nursery.start_soon(ask_on)
        project(tmp_path / "one", "again", "new")
        await hosting.registry.rescan()
    assert set(answers) == {"old hello", "new hello"}


async def test_calls_wait_for_a_service_that_is_loading(tmp_path: Path, hosting: Hosting) -> None:
    answers = []

    async def ask() -> None:
        answers.append(await hosting.say("waits"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.to_thread.run_sync(lambda: None)
        await hosting.registry.apply([project(tmp_path / "one", "waits")])
    assert answers == ["heard hello"]


async def test_calls_are_unavailable_when_loading_takes_too_long(tmp_path: Path) -> None:
    async with running(load_wait_seconds=0.01) as hosting, trio.open_nursery() as nursery:
        hosting.may_load = trio.Event()
        nursery.start_soon(hosting.registry.apply, [project(tmp_path / "one", "slow")])
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(grpc.RpcError) as caught:
            await hosting.say("slow")
        nursery.cancel_scope.cancel()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == 'handler "one" is not loaded yet'


async def test_a_failed_load_leaves_its_methods_unknown_and_other_services_served(
    tmp_path: Path, hosting: Hosting
) -> None:
    good, bad = project(tmp_path / "good", "fine"), project(tmp_path / "bad", "broken")
    (tmp_path / "bad" / "handler.py").write_text("class Handler:\n    pass\n")
    await hosting.registry.apply([bad, good])
    assert await hosting.failure("broken") is grpc.StatusCode.UNIMPLEMENTED
    assert await hosting.say("fine") == "heard hello"


async def test_a_service_is_served_by_one_entry_only(tmp_path: Path, hosting: Hosting) -> None:
    first, second = project(tmp_path / "first", "shared", "1"), project(tmp_path / "second", "shared", "2")
    await hosting.registry.apply([first])
    result = await hosting.registry.apply([first, second])
    assert [failure.name for failure in result.failures] == ["second"]
    reason = reason_of(hosting, "second")
    assert str(tmp_path / "second" / "talk.proto") in reason
    assert f"the service shared.Talk is already served by {tmp_path / 'first' / 'talk.proto'}" in reason
    assert await hosting.say("shared") == "1 hello"
    assert not (await hosting.registry.apply([second])).failures
    assert await hosting.say("shared") == "2 hello"
    assert await hosting.listed() == ["shared.Talk"]


async def test_a_project_may_be_renamed(tmp_path: Path, hosting: Hosting) -> None:
    await hosting.registry.apply([project(tmp_path / "one", "renamed", name="before")])
    assert not (await hosting.registry.apply([project(tmp_path / "one", "renamed", name="after")])).failures
    assert await hosting.say("renamed") == "heard hello"


async def test_services_of_the_server_cannot_be_replaced(tmp_path: Path, hosting: Hosting) -> None:
    spec = project(tmp_path / "one", "grpc.health.v1")
    proto = tmp_path / "one" / "talk.proto"
    proto.write_text(proto.read_text().replace("service Talk", "service Health"))
    assert (await hosting.registry.apply([spec])).failures
    assert "the service grpc.health.v1.Health is already served by the server itself" in reason_of(hosting, "one")
    assert await hosting.health("") == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_each_call_is_one_event_with_outcome_and_sizes(tmp_path: Path, hosting: Hosting) -> None:
    await hosting.registry.apply([project(tmp_path / "one", "counted")])
    assert await hosting.say("counted") == "heard hello"
    assert await hosting.failure("counted", "raise") is grpc.StatusCode.INTERNAL
    assert await hosting.failure("counted", "abort") is grpc.StatusCode.NOT_FOUND
    with grpc.insecure_channel(hosting.address) as channel:
        stream = OpenTalk(channel, "counted")
        assert await stream.say("a") == "heard a"
        assert await stream.say("b") == "heard b"
        await stream.end()
    seen = [
        (event.name, event.kind, event.api_interface.api, event.api_interface.interface, event.method)
        for event in hosting.events
    ]
    assert seen == [("one", "handler", "Handlers", "gRPC", method) for method in ("Say", "Say", "Say", "Listen")]
    assert [event.code for event in hosting.events] == ["OK", "UserCodeError", "NOT_FOUND", "OK"]
    assert [event.received for event in hosting.events] == [7, 7, 7, 6]
    assert [event.sent for event in hosting.events] == [13, 0, 0, 18]
    rendered = hosting.metrics.render().decode()
    labels = 'api="Handlers",interface="gRPC",method="Say",name="one",version="1"'
    assert f"ovms_requests_success{{{labels}}} 1.0" in rendered
    assert f"ovms_requests_fail{{{labels}}} 2.0" in rendered
    assert 'ovms_current_requests{name="one",version="1"} 0.0' in rendered


def test_the_front_end_imports_neither_grpcio_nor_handlers() -> None:
    code = "import sys, ovmstrio.server.front_ends; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    imported = done.stdout.split()
    assert "ovmstrio.protocols.kserve.grpc_service" in imported
    assert "grpc" not in imported
    assert not [name for name in imported if name.startswith("ovmstrio.") and "handlers" in name]
