from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trio
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException

from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from tests.service.api.grpc.servers import INFER, STREAM, Serving
from tests.support.grpc_clients import call, with_channel, with_triton
from tests.support.pass_through import load_pass_through
from tests.support.stub_registry import registry_of
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


async def test_server_metadata(serving: Serving) -> None:
    metadata = await with_triton(serving.address, lambda client: client.get_server_metadata())
    assert (metadata.name, metadata.version) == ("OpenVINO Model Server", version("ovmstrio"))
    assert tuple(metadata.extensions) == (
        "binary_tensor_data", "classification", "generate", "logging", "model_configuration", "statistics",
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
        (lambda client: client.load_model("echo"), "FAILED_PRECONDITION", "--model_control explicit"),
        (lambda client: client.unload_model("echo"), "FAILED_PRECONDITION", "--model_control explicit"),
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
