from __future__ import annotations

from queue import SimpleQueue
from typing import Any, Self

import grpc
import numpy as np
import pytest
import trio
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from ovmstrio.protocol.descriptors import message_class
from tests.service.api.grpc.servers import Serving
from tests.support.grpc_clients import with_channel
from tests.support.waits import WAIT_SECONDS

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def check(serving: Serving, service: str) -> int:
    def work(channel: Any) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_SECONDS).status
        return status

    return await with_channel(serving.address, work)


class _Watch:
    """One ``Watch`` call of grpcio's client, which is read in a thread."""

    def __init__(self, address: str, service: str) -> None:
        self._channel = grpc.insecure_channel(address)
        request = health_pb2.HealthCheckRequest(service=service)
        self._call = health_pb2_grpc.HealthStub(self._channel).Watch(request, timeout=WAIT_SECONDS)

    async def next(self) -> int:
        return await trio.to_thread.run_sync(lambda: next(self._call).status)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await trio.to_thread.run_sync(self._channel.close)


async def test_check_reports_the_server_and_its_services(serving: Serving) -> None:
    for service in ("", "inference.GRPCInferenceService", "echo"):
        assert await check(serving, service) == SERVING
    with pytest.raises(grpc.RpcError, match='unknown service "nothing"') as caught:
        await check(serving, "nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    serving.plane.begin_drain()
    assert await check(serving, "") == NOT_SERVING


async def test_watch_reports_each_change_of_the_server_and_of_a_servable(serving: Serving) -> None:
    async with _Watch(serving.address, "") as server, _Watch(serving.address, "echo") as servable:
        assert await server.next() == await servable.next() == SERVING
        serving.plane.begin_drain()
        assert await server.next() == NOT_SERVING
        serving.plane.begin_serving()
        assert await server.next() == SERVING
        await serving.registry.apply([])
        assert await servable.next() == NOT_SERVING
        await serving.registry.apply(serving.specs)
        assert await servable.next() == SERVING


async def test_watch_of_an_unknown_service_reports_when_it_is_served(serving: Serving) -> None:
    async with _Watch(serving.address, "later") as watch:
        assert await watch.next() == SERVICE_UNKNOWN
        await serving.registry.apply([serving.specs[0], serving.specs[0].model_copy(update={"name": "later"})])
        while (status := await watch.next()) == NOT_SERVING:
            pass
        assert status == SERVING


@pytest.mark.parametrize(
    "path", ["/grpc.health.v1.Health/Watch", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]
)
async def test_open_watches_and_reflection_streams_end_when_a_drain_begins(serving: Serving, path: str) -> None:
    is_open = trio.Event()
    codes: list[grpc.StatusCode] = []

    def hold(channel: Any) -> None:
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        requests.put(b"")
        stream = channel.stream_stream(path)(iter(requests.get, None), timeout=WAIT_SECONDS)
        next(stream)
        trio.from_thread.run_sync(is_open.set)
        with pytest.raises(grpc.RpcError):
            next(stream)
        requests.put(None)
        codes.append(stream.code())

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(with_channel, serving.address, hold)
            await is_open.wait()
            await serving.front_end.drain(grace_seconds=WAIT_SECONDS * 2)
    assert codes == [grpc.StatusCode.UNAVAILABLE]


NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def ask(serving: Serving, version: str, **query: Any) -> Any:
    package = f"grpc.reflection.{version}"
    request = message_class(f"{package}.ServerReflectionRequest")(host="h", **query)

    def work(channel: Any) -> Any:
        method = channel.stream_stream(
            f"/{package}.ServerReflection/ServerReflectionInfo",
            response_deserializer=message_class(f"{package}.ServerReflectionResponse").FromString,
        )
        (answer,) = method(iter([request.SerializeToString()]), timeout=WAIT_SECONDS)
        assert answer.valid_host == "h"
        assert answer.original_request == request
        return answer

    return await with_channel(serving.address, work)


def _names(answer: Any) -> list[str]:
    files = answer.file_descriptor_response.file_descriptor_proto
    return [FileDescriptorProto.FromString(file).name for file in files]


async def test_a_client_without_stubs_can_infer(serving: Serving) -> None:
    def work(channel: Any) -> tuple[list[str], bytes]:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("inference.GRPCInferenceService").methods_by_name["ModelInfer"]
        request: Any = GetMessageClass(method.input_type)(model_name="echo")
        request.inputs.add(name="x", datatype="FP32", shape=[2])
        request.raw_input_contents.append(np.array([1, 2], "f4").tobytes())
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        return sorted(database.get_services()), infer(request, timeout=WAIT_SECONDS).raw_output_contents[0]

    services, raw = await with_channel(serving.address, work)

    assert services == [
        "grpc.health.v1.Health",
        "inference.GRPCInferenceService",
        "tensorflow.serving.ModelService",
        "tensorflow.serving.PredictionService",
    ]
    assert raw == np.array([1, 2], "f4").tobytes()


KSERVE_FILES = ["inference/kserve.proto", "inference/model_config.proto"]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.parametrize(
    ("query", "files"),
    [
        ({"file_containing_symbol": "inference.GRPCInferenceService"}, KSERVE_FILES),
        ({"file_containing_symbol": "inference.GRPCInferenceService.ModelInfer"}, KSERVE_FILES),
        ({"file_containing_symbol": "inference.ModelInferRequest.InferInputTensor"}, KSERVE_FILES),
        ({"file_containing_symbol": "inference.ModelInferRequest.id"}, KSERVE_FILES),
        ({"file_by_filename": "grpc/health/v1/health.proto"}, ["grpc/health/v1/health.proto"]),
    ],
)
async def test_symbols_and_file_names_are_answered_with_the_file_and_its_imports(
    serving: Serving, version: str, query: dict[str, str], files: list[str]
) -> None:
    assert _names(await ask(serving, version, **query)) == files


async def test_a_message_without_extensions_has_an_empty_list(serving: Serving) -> None:
    answer = await ask(serving, "v1", all_extension_numbers_of_type="inference.ModelInferRequest")
    extensions = answer.all_extension_numbers_response
    assert (extensions.base_type_name, list(extensions.extension_number)) == ("inference.ModelInferRequest", [])


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({"file_by_filename": "/etc/passwd"}, NOT_FOUND),
        ({"file_containing_symbol": "inference.Nothing"}, NOT_FOUND),
        ({"file_containing_symbol": "inference.GRPCInferenceService.Nothing"}, NOT_FOUND),
        ({"file_containing_symbol": ""}, NOT_FOUND),
        ({"all_extension_numbers_of_type": "inference.Nothing"}, NOT_FOUND),
        ({"file_containing_extension": {"containing_type": "a.B", "extension_number": 1}}, NOT_FOUND),
        ({}, INVALID_ARGUMENT),
    ],
)
async def test_unknown_queries_are_answered_with_an_error(serving: Serving, query: dict[str, Any], code: int) -> None:
    answer = await ask(serving, "v1", **query)
    assert answer.error_response.error_code == code
    assert answer.error_response.error_message
