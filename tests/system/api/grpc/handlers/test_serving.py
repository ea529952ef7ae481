"""Tests of what is served beside the services of users: reflection, health, and a whole server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from ovmstrio.core.errors import ConfigError
from ovmstrio.protocol.descriptors import message_class
from tests.support.grpc_clients import call, with_channel
from tests.support.handler_grpc import opened, served
from tests.support.protos import PRIMES
from tests.support.waits import WAIT_SECONDS

OWN_SERVICES = [
    "grpc.health.v1.Health",
    "inference.GRPCInferenceService",
    "tensorflow.serving.ModelService",
    "tensorflow.serving.PredictionService",
]
COUNTING = """
    class Handler:
        def __init__(self, proto_module_pb2):
            self.pb = proto_module_pb2

        def Predict(self, payload):
            for number in range(payload.prime_numbers_to_generate):
                yield self.pb.Output(prime_number=number)
"""
TWO_SERVICES = """
    syntax = "proto3";
    package {package};
    import "google/protobuf/timestamp.proto";

    service First {{ rpc One (Moment) returns (Moment); }}
    service Second {{ rpc Two (Moment) returns (Moment); }}

    message Moment {{ google.protobuf.Timestamp at = 1; }}
"""
ECHO = """
    from google.protobuf.timestamp_pb2 import Timestamp


    class Handler:
        def One(self, payload):
            payload.at.seconds += 1
            return payload

        def Two(self, payload):
            payload.at.seconds += 2
            return payload
"""


async def test_a_client_without_stubs_can_call_a_handler(tmp_path: Path) -> None:
    """Reflection lists the services of the file and describes their messages, imported ones included."""
    async with served(tmp_path, TWO_SERVICES.format(package="reflected"), ECHO) as project:

        def work(channel: Any) -> tuple[list[str], list[int]]:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            replies = []
            for service, name in (("First", "One"), ("Second", "Two")):
                method = pool.FindServiceByName(f"reflected.{service}").methods_by_name[name]
                request: Any = GetMessageClass(method.input_type)()
                request.at.seconds = 40
                infer = channel.unary_unary(
                    f"/reflected.{service}/{name}",
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=GetMessageClass(method.output_type).FromString,
                )
                replies.append(infer(request, timeout=WAIT_SECONDS).at.seconds)
            return sorted(database.get_services()), replies

        assert await with_channel(project.address, work) == (
            sorted([*OWN_SERVICES, "reflected.First", "reflected.Second"]),
            [41, 42],
        )


async def test_both_versions_of_reflection_are_served(tmp_path: Path) -> None:
    """The newer version lists the same services."""
    async with served(tmp_path, PRIMES, COUNTING) as project:
        request = message_class("grpc.reflection.v1.ServerReflectionRequest")(list_services="")

        def work(channel: Any) -> list[str]:
            method = channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                response_deserializer=message_class("grpc.reflection.v1.ServerReflectionResponse").FromString,
            )
            (answer,) = method(iter([request.SerializeToString()]), timeout=WAIT_SECONDS)
            return [service.name for service in answer.list_services_response.service]

        assert await with_channel(project.address, work) == sorted([*OWN_SERVICES, "prime_generator.Generator"])


async def test_health_is_told_of_the_server_and_of_each_service(tmp_path: Path) -> None:
    """Both are serving; a service that there is not is unknown."""
    async with served(tmp_path, PRIMES, COUNTING) as project:

        def work(channel: Any) -> list[int]:
            stub = health_pb2_grpc.HealthStub(channel)
            names = ("", "prime_generator.Generator")
            statuses = [
                stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_SECONDS).status for name in names
            ]
            with pytest.raises(grpc.RpcError) as caught:
                stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=WAIT_SECONDS)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
            statuses.append(next(watch).status)
            watch.cancel()
            return statuses

        serving = health_pb2.HealthCheckResponse.SERVING
        assert await with_channel(project.address, work) == [serving] * 3


async def test_projects_are_served_beside_models(tmp_path: Path) -> None:
    """A server has the services of users beside its own."""
    async with served(tmp_path, PRIMES, COUNTING) as project:
        request = project.pb.Input(prime_numbers_to_generate=3)
        assert await project.ask(lambda stub: [each.prime_number for each in stub.Predict(request)]) == [0, 1, 2]
        path = "/inference.GRPCInferenceService/ServerLive"
        live = await call(project.address, path, b"", "inference.ServerLiveResponse")
        assert live.live


def test_servers_without_projects_do_not_import_what_these_need() -> None:
    """Importing the front end leaves everything of handlers alone."""
    code = "import sys, ovmstrio.server.grpc_front_end; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    imported = found.stdout.split()
    assert "ovmstrio.api.kserve.grpc.inference_service" in imported
    assert not [name for name in imported if name.startswith("ovmstrio.") and "handlers" in name]


async def test_a_handler_that_does_not_fit_its_service_is_refused(tmp_path: Path) -> None:
    """Missing methods and arguments that there are not are all named before anything is served."""
    handler = """
        class Handler:
            def Two(self, payload, headers):
                return payload
    """
    with pytest.raises(ConfigError) as caught:
        async with opened(tmp_path, TWO_SERVICES.format(package="unfit"), handler):
            pass
    messages = [problem.message for problem in caught.value.problems]
    assert len(messages) == 2
    assert "One" in messages[0]
    assert "'headers'" in messages[1]
