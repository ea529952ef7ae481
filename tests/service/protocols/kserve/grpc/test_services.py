from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
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
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException

from ovmstrio.encoding.messages import message_class
from ovmstrio.server.front_ends import GrpcFrontEnd
from ovmstrio.serving.data_plane import DataPlane
from tests.service.protocols.kserve.grpc.servers import INFER, STREAM, Serving
from tests.support.api_clients import call, with_channel, with_triton
from tests.support.stub_registry import load_pass_through, registry_of
from tests.support.waits import WAIT_SECONDS

SERVICE = "/inference.GRPCInferenceService"
NUMBERS = np.array([[0, 1, 2], [3, 100, 7]])
NUMERIC = [
    *(("BOOL", "?"), ("INT8", "i1"), ("INT16", "i2"), ("INT32", "i4"), ("INT64", "i8"), ("UINT8", "u1")),
    *(("UINT16", "u2"), ("UINT32", "u4"), ("UINT64", "u8"), ("FP16", "f2"), ("FP32", "f4"), ("FP64", "f8")),
]
ARRAYS = [
    *(pytest.param(datatype, NUMBERS.astype(dtype), id=datatype) for datatype, dtype in NUMERIC),
    pytest.param("BYTES", np.array([[b"one", b""], [b"\x00\xff", "für".encode()]], object), id="BYTES"),
    pytest.param("FP32", np.random.default_rng(7).random((4, 3, 224, 224), "f4"), id="large"),
]


def triton_input(name: str, datatype: str, array: Any) -> Any:
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def request(**fields: Any) -> Any:
    return message_class("inference.ModelInferRequest")(**{"model_name": "echo", **fields})


async def infer(serving: Serving, message: Any, **options: Any) -> Any:
    return await call(serving.address, INFER, message, "inference.ModelInferResponse", **options)


@pytest.mark.parametrize(("datatype", "array"), ARRAYS)
async def test_arrays_of_tritonclient_are_returned_unchanged(serving: Serving, datatype: str, array: Any) -> None:
    result = await with_triton(
        serving.address, lambda client: client.infer("echo", [triton_input("x", datatype, array)], request_id="r7")
    )
    returned, response = result.as_numpy("x"), result.get_response()
    assert (returned.dtype, returned.tolist()) == (array.dtype, array.tolist())
    assert (response.id, response.model_name, response.model_version) == ("r7", "echo", "2")
    assert response.outputs[0].datatype == datatype
    (raw,) = serving.servable.requests[0].raw_inputs
    assert isinstance(raw, memoryview) is (array.nbytes > 2**15)


async def test_typed_contents_are_answered_with_raw_contents(serving: Serving) -> None:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [2], "contents": {"fp32_contents": [1.5, -2]}},
        {"name": "text", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"hi"]}},
    ]
    response = await infer(serving, request(inputs=inputs, model_version="1"))
    assert response.model_version == "1"
    assert list(response.raw_output_contents) == [np.array([1.5, -2], "f4").tobytes(), b"\x02\x00\x00\x00hi"]
    assert [len(output.contents.ListFields()) for output in response.outputs] == [0, 0]


async def test_liveness_and_readiness_follow_a_drain(serving: Serving) -> None:
    def states(client: Any) -> tuple[bool, ...]:
        models = client.is_model_ready("echo"), client.is_model_ready("echo", "1")
        return client.is_server_live(), client.is_server_ready(), *models

    assert await with_triton(serving.address, states) == (True, True, True, True)
    serving.plane.begin_drain()
    assert (await with_triton(serving.address, states))[:2] == (True, False)


async def test_server_stays_ready_while_one_of_its_workers_is_replaced(serving: Serving) -> None:
    def states(client: Any) -> tuple[bool, ...]:
        return client.is_server_live(), client.is_server_ready(), client.is_model_ready("echo")

    serving.plane.begin_drain(is_restart=True)
    assert serving.plane.is_draining
    assert await with_triton(serving.address, states) == (True, True, True)
    assert [await check(serving, service) for service in ("", "echo")] == [SERVING, SERVING]


async def test_server_metadata(serving: Serving) -> None:
    metadata = await with_triton(serving.address, lambda client: client.get_server_metadata())
    assert (metadata.name, metadata.version) == ("OpenVINO Model Server", version("ovmstrio"))
    assert tuple(metadata.extensions) == (
        "binary_tensor_data", "classification", "generate", "logging", "model_configuration", "schedule_policy",
        "statistics",
    )  # fmt: skip


async def test_model_metadata_and_configuration(serving: Serving) -> None:
    def work(client: Any) -> Any:
        return client.get_model_metadata("echo", as_json=True), client.get_model_config("echo", as_json=True)

    metadata, config = await with_triton(serving.address, work)
    tensors = [
        {"name": "text", "datatype": "BYTES", "shape": ["-1"]},
        {"name": "x", "datatype": "FP32", "shape": ["1", "10"]},
    ]
    model = {"name": "echo", "platform": "OpenVINO"}
    assert metadata == {**model, "versions": ["1", "2"], "inputs": tensors, "outputs": tensors}
    tensors = [
        {"name": "text", "data_type": "TYPE_STRING", "dims": ["-1"]},
        {"name": "x", "data_type": "TYPE_FP32", "dims": ["1", "10"]},
    ]
    assert config == {"config": {**model, "backend": "openvino", "input": tensors, "output": tensors}}


async def test_the_repository_index_lists_versions_with_their_states(serving: Serving) -> None:
    latest = {**serving.specs[0].model_dump(), "version_policy": {"kind": "latest", "num_versions": 1}}
    await serving.registry.apply([serving.specs[0].model_validate(latest)])
    index = await with_triton(serving.address, lambda client: client.get_model_repository_index())
    assert [(each.name, each.version, each.state) for each in index.models] == [
        ("echo", "1", "UNAVAILABLE"),
        ("echo", "2", "READY"),
    ]
    ready = message_class("inference.RepositoryIndexRequest")(ready=True)
    index = await call(serving.address, f"{SERVICE}/RepositoryIndex", ready, "inference.RepositoryIndexResponse")
    assert [each.version for each in index.models] == ["2"]


@pytest.mark.parametrize(
    ("method", "fields", "status", "text"),
    [
        ("ModelReady", {"name": "nothing"}, "NOT_FOUND", "Model with requested name is not found"),
        ("ModelReady", {"name": "echo", "version": "9"}, "NOT_FOUND", "Model with requested version is not found"),
        ("ModelReady", {"name": "echo", "version": "x"}, "INVALID_ARGUMENT", "Model version must be an integer"),
        ("ModelMetadata", {"name": "nothing"}, "NOT_FOUND", "Model with requested name is not found"),
        ("ModelMetadata", {"name": "echo", "version": "9"}, "NOT_FOUND", "Model with requested version is not found"),
        ("ModelConfig", {"name": "../echo"}, "NOT_FOUND", "Model with requested name is not found"),
        ("ModelInfer", {"model_name": "nothing"}, "NOT_FOUND", "with requested name is not found"),
        ("ModelInfer", {"model_name": "echo", "model_version": "1.5"}, "INVALID_ARGUMENT", "must be an integer"),
        ("RepositoryIndex", {"repository_name": "other"}, "INVALID_ARGUMENT", "repository_name"),
    ],
)
async def test_unknown_and_malformed_names_are_refused(
    serving: Serving, method: str, fields: dict[str, str], status: str, text: str
) -> None:
    message = message_class(f"inference.{method}Request")(**fields)
    with pytest.raises(grpc.RpcError) as caught:
        await call(serving.address, f"{SERVICE}/{method}", message, f"inference.{method}Response")
    assert caught.value.code() is grpc.StatusCode[status]
    assert text in caught.value.details()


@pytest.mark.parametrize(
    ("work", "status", "text"),
    [
        (lambda client: client.infer("echo", [], parameters={"fail": "größe: 3 ≠ 4"}), "INTERNAL", "größe: 3 ≠ 4"),
        (lambda client: client.load_model("echo"), "FAILED_PRECONDITION", "--model-control explicit"),
        (lambda client: client.unload_model("echo"), "FAILED_PRECONDITION", "--model-control explicit"),
    ],
    ids=["failing model", "load without model control", "unload without model control"],
)
async def test_errors_reach_tritonclient_with_status_and_text(
    serving: Serving, work: Any, status: str, text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text) as caught:
        await with_triton(serving.address, work)
    assert caught.value.status() == f"StatusCode.{status}"


async def test_the_connection_of_a_malformed_message_stays_usable(serving: Serving) -> None:
    def work(channel: Any) -> tuple[Any, bytes]:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(INFER)(b"\x0a\xff", timeout=WAIT_SECONDS)
        return caught.value, channel.unary_unary(f"{SERVICE}/ServerLive")(b"", timeout=WAIT_SECONDS)

    error, live = await with_channel(serving.address, work)
    assert (error.code(), live) == (grpc.StatusCode.INVALID_ARGUMENT, b"\x08\x01")
    assert "malformed inference.ModelInferRequest" in error.details()


async def test_the_deadline_of_a_call_reaches_the_servable_and_cancels_it(serving: Serving) -> None:
    before = trio.current_time()
    with pytest.raises(grpc.RpcError) as caught:
        await infer(serving, request(parameters={"block": {"bool_param": True}}), timeout=2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert before < serving.servable.requests[0].deadline < before + WAIT_SECONDS
    await serving.wait(serving.servable.cancelled)
    await infer(serving, request(), timeout=None)
    assert serving.servable.requests[1].deadline == float("inf")


async def test_the_timeout_of_a_request_reaches_the_servable_and_cancels_it(serving: Serving) -> None:
    parameters = {"block": {"bool_param": True}, "timeout": {"int64_param": 1000}, "priority": {"uint64_param": 2}}
    with pytest.raises(grpc.RpcError) as caught:
        await infer(serving, request(parameters=parameters))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await serving.wait(serving.servable.cancelled)
    received = serving.servable.requests[0]
    assert received.deadline < trio.current_time()
    assert received.priority == 2


async def test_a_stream_without_a_request_is_refused(serving: Serving) -> None:
    def work(channel: Any) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream(STREAM)(iter([]), timeout=WAIT_SECONDS))
        return caught.value

    error = await with_channel(serving.address, work)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Client disconnected during reading first streaming request" in error.details()


async def test_all_addresses_are_served_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    plane = DataPlane(registry_of(load_pass_through, poll_seconds=0))
    async with trio.open_nursery() as nursery:
        tcp, unix = await nursery.start(GrpcFrontEnd(plane, ["127.0.0.1:0", f"unix:{path}"]).serve)
        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", tcp)
        assert unix == f"unix:{path}"
        for address in (tcp, unix):
            assert (await call(address, f"{SERVICE}/ServerLive", b"", "inference.ServerLiveResponse")).live
        nursery.cancel_scope.cancel()


async def test_a_drain_cancels_calls_that_outlast_its_grace_and_closes_the_port(serving: Serving) -> None:
    codes: list[grpc.StatusCode] = []

    async def blocked() -> None:
        with pytest.raises(grpc.RpcError) as caught:
            await infer(serving, request(parameters={"block": {"bool_param": True}}))
        codes.append(caught.value.code())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(blocked)
        await serving.wait(serving.servable.blocked)
        await serving.front_end.drain(grace_seconds=0.1)
    assert codes == [grpc.StatusCode.UNAVAILABLE]
    assert serving.servable.cancelled.is_set()
    host, port = serving.address.split(":")
    with pytest.raises(OSError, match="connect"):
        await trio.open_tcp_stream(host, int(port))


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
