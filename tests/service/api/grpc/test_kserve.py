from __future__ import annotations

from importlib.metadata import version
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import trio

from ovmstrio.protocol.descriptors import message_class
from tests.support.grpc_clients import call, with_channel, with_triton
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from tests.service.api.grpc.conftest import Serving

SERVICE = "/inference.GRPCInferenceService"

NUMERIC = [
    *(("BOOL", "?"), ("INT8", "i1"), ("INT16", "i2"), ("INT32", "i4"), ("INT64", "i8"), ("UINT8", "u1")),
    *(("UINT16", "u2"), ("UINT32", "u4"), ("UINT64", "u8"), ("FP16", "f2"), ("FP32", "f4"), ("FP64", "f8")),
]


def triton_input(name: str, datatype: str, array: Any) -> Any:
    """Make an input as users of tritonclient do."""
    from tritonclient.grpc import InferInput

    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def request(**fields: Any) -> Any:
    """Make a ``ModelInferRequest`` for the served model."""
    return message_class("inference.ModelInferRequest")(**{"model_name": "echo", **fields})


async def infer(serving: Serving, message: Any, **options: Any) -> Any:
    """Call ``ModelInfer`` through grpcio."""
    return await call(serving.address, f"{SERVICE}/ModelInfer", message, "inference.ModelInferResponse", **options)


@pytest.mark.parametrize(("datatype", "dtype"), NUMERIC)
async def test_numbers_come_back_as_triton_sent_them(serving: Serving, datatype: str, dtype: str) -> None:
    """Every numeric type makes the round trip through tritonclient with its values, shape and datatype."""
    array = np.array([[0, 1, 2], [3, 100, 7]]).astype(dtype)

    result = await with_triton(
        serving.address, lambda client: client.infer("echo", [triton_input("x", datatype, array)], request_id="r7")
    )

    returned = result.as_numpy("x")
    assert returned.dtype == array.dtype
    np.testing.assert_array_equal(returned, array)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("r7", "echo", "2")
    assert response.outputs[0].datatype == datatype


async def test_bf16_comes_back_bit_by_bit(serving: Serving) -> None:
    """BF16, which numpy has not, keeps its bits."""
    bits = (np.array([1.5, -2.0, 0.25, np.inf], "f4").view("u4") >> 16).astype("<u2").tobytes()

    response = await infer(
        serving, request(inputs=[{"name": "x", "datatype": "BF16", "shape": [1, 4]}], raw_input_contents=[bits])
    )

    assert list(response.raw_output_contents) == [bits]
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == ("BF16", [1, 4])


async def test_bytes_come_back_as_triton_sent_them(serving: Serving) -> None:
    """BYTES tensors of rank two keep every element, empty ones and those with zeros included."""
    array = np.array([[b"one", b""], [b"\x00\xff", "für".encode()]], object)

    result = await with_triton(
        serving.address, lambda client: client.infer("echo", [triton_input("x", "BYTES", array)])
    )

    assert result.as_numpy("x").tolist() == array.tolist()


async def test_a_large_tensor_comes_back_whole(serving: Serving) -> None:
    """A tensor that is handed on as a view of the message keeps its values."""
    array = np.random.default_rng(7).random((4, 3, 224, 224), "f4")

    result = await with_triton(serving.address, lambda client: client.infer("echo", [triton_input("x", "FP32", array)]))

    np.testing.assert_array_equal(result.as_numpy("x"), array)
    assert isinstance(serving.servable.requests[0].raw_inputs[0], memoryview)


async def test_asynchronous_calls_are_answered_each(serving: Serving) -> None:
    """Tritonclient's callbacks get the answer to their own request."""
    answers: SimpleQueue[Any] = SimpleQueue()

    def work(client: Any) -> list[float]:
        for value in range(8):
            tensor = triton_input("x", "FP32", np.full((1, 10), value, "f4"))
            client.async_infer("echo", [tensor], lambda result, error: answers.put((result, error)))
        received = [answers.get(timeout=WAIT_SECONDS) for _ in range(8)]
        assert [error for _, error in received] == [None] * 8
        return sorted(float(result.as_numpy("x")[0, 9]) for result, _ in received)

    assert await with_triton(serving.address, work) == list(range(8))


async def test_typed_contents_are_answered_with_raw_contents(serving: Serving) -> None:
    """Values sent one by one reach the servable, and the answer is raw whatever the request's style."""
    message = request(
        inputs=[
            {"name": "x", "datatype": "FP32", "shape": [2], "contents": {"fp32_contents": [1.5, -2]}},
            {"name": "text", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"hi"]}},
        ]
    )

    response = await infer(serving, message)

    assert list(response.raw_output_contents) == [np.array([1.5, -2], "f4").tobytes(), b"\x02\x00\x00\x00hi"]
    assert [len(output.contents.ListFields()) for output in response.outputs] == [0, 0]


async def test_a_version_can_be_chosen(serving: Serving) -> None:
    """The version that the request names answers, and says so."""
    response = await infer(serving, request(model_version="1"))

    assert response.model_version == "1"


async def test_health_calls_tell_the_states(serving: Serving) -> None:
    """ServerLive, ServerReady and ModelReady are true for what serves, and readiness ends with a drain."""
    assert await with_triton(
        serving.address,
        lambda client: (
            client.is_server_live(),
            client.is_server_ready(),
            client.is_model_ready("echo"),
            client.is_model_ready("echo", "1"),
        ),
    ) == (True, True, True, True)

    serving.plane.begin_drain()

    assert await with_triton(serving.address, lambda client: (client.is_server_live(), client.is_server_ready())) == (
        True,
        False,
    )


async def test_server_metadata_is_complete(serving: Serving) -> None:
    """Name, version and extensions are those that the API tells."""
    metadata = await with_triton(serving.address, lambda client: client.get_server_metadata())

    assert (metadata.name, metadata.version) == ("OpenVINO Model Server", version("ovmstrio"))
    assert tuple(metadata.extensions) == (
        "binary_tensor_data",
        "classification",
        "generate",
        "logging",
        "model_configuration",
        "statistics",
    )


async def test_model_metadata_lists_tensors_and_all_versions(serving: Serving) -> None:
    """Inputs and outputs come with -1 for open dimensions; versions are all that can be called."""
    metadata = await with_triton(serving.address, lambda client: client.get_model_metadata("echo", as_json=True))

    tensors = [
        {"name": "text", "datatype": "BYTES", "shape": ["-1"]},
        {"name": "x", "datatype": "FP32", "shape": ["1", "10"]},
    ]
    assert metadata == {
        "name": "echo",
        "versions": ["1", "2"],
        "platform": "OpenVINO",
        "inputs": tensors,
        "outputs": tensors,
    }


async def test_model_config_tells_load_generators_the_tensors(serving: Serving) -> None:
    """The configuration has the whole shapes and no batch dimension of its own."""
    response = await with_triton(serving.address, lambda client: client.get_model_config("echo", as_json=True))

    tensors = [
        {"name": "text", "data_type": "TYPE_STRING", "dims": ["-1"]},
        {"name": "x", "data_type": "TYPE_FP32", "dims": ["1", "10"]},
    ]
    config = {"name": "echo", "platform": "OpenVINO", "backend": "openvino", "input": tensors, "output": tensors}
    assert response == {"config": config}


async def test_repository_index_lists_versions_with_their_states(serving: Serving) -> None:
    """Retired versions are listed unless only those that can be called are asked for."""
    latest = {"kind": "latest", "num_versions": 1}
    await serving.registry.apply([serving.spec.model_validate({**serving.spec.model_dump(), "version_policy": latest})])

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
        ("ModelInfer", {"model_version": "1.5"}, "INVALID_ARGUMENT", "Model version must be an integer"),
        ("RepositoryIndex", {"repository_name": "other"}, "INVALID_ARGUMENT", "repository_name"),
    ],
)
async def test_wrong_names_get_status_and_text(
    serving: Serving, method: str, fields: dict[str, str], status: str, text: str
) -> None:
    """What is unknown or malformed in a call is said with OVMS's status and text."""
    base = {"model_name": "echo"} if method == "ModelInfer" else {}
    message = message_class(f"inference.{method}Request")(**{**base, **fields})

    with pytest.raises(grpc.RpcError) as caught:
        await call(serving.address, f"{SERVICE}/{method}", message, f"inference.{method}Response")

    assert caught.value.code() is grpc.StatusCode[status]
    assert text in caught.value.details()


async def test_errors_reach_triton_with_status_and_message(serving: Serving) -> None:
    """Tritonclient's exception carries the status and the text of a model's failure, non-ASCII included."""
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException) as caught:
        await with_triton(serving.address, lambda client: client.infer("echo", [], parameters={"fail": "größe: 3 ≠ 4"}))

    assert caught.value.status() == "StatusCode.INTERNAL"
    assert caught.value.message() == "größe: 3 ≠ 4"


async def test_a_malformed_message_is_refused_and_the_connection_lives(serving: Serving) -> None:
    """Bytes that are no message get INVALID_ARGUMENT; the next call on the same connection works."""

    def work(channel: Any) -> tuple[str, str, bool]:
        garbage = channel.unary_unary(f"{SERVICE}/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            garbage(b"\x0a\xff", timeout=WAIT_SECONDS)
        live = channel.unary_unary(f"{SERVICE}/ServerLive")(b"", timeout=WAIT_SECONDS)
        return caught.value.code().name, caught.value.details(), live == b"\x08\x01"

    status, text, live = await with_channel(serving.address, work)

    assert status == "INVALID_ARGUMENT"
    assert "malformed inference.ModelInferRequest" in text
    assert live


async def test_a_call_that_is_not_offered_is_unimplemented(serving: Serving) -> None:
    """Calls that this server has not say so."""
    with pytest.raises(grpc.RpcError) as caught:
        await call(serving.address, f"{SERVICE}/ModelTrain", b"", "inference.ServerLiveResponse")

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_models_are_not_loaded_by_name_unless_the_server_is_told_so(serving: Serving) -> None:
    """Clients of Triton's learn which option lets them do it."""
    from tritonclient.utils import InferenceServerException

    for verb in ("load_model", "unload_model"):
        with pytest.raises(InferenceServerException, match="--model_control explicit") as caught:
            await with_triton(serving.address, lambda client, verb=verb: getattr(client, verb)("echo"))  # type: ignore[misc]
        assert caught.value.status() == "StatusCode.FAILED_PRECONDITION"


async def test_the_deadline_reaches_the_servable_and_ends_the_call(serving: Serving) -> None:
    """The client's timeout is the request's deadline; when it passes, the servable's work is cancelled."""
    servable = serving.servable
    before = trio.current_time()

    with pytest.raises(grpc.RpcError) as caught:
        await infer(serving, request(parameters={"block": {"bool_param": True}}), timeout=2)

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert before < servable.requests[0].deadline < before + WAIT_SECONDS
    with trio.fail_after(WAIT_SECONDS):
        await servable.cancelled.wait()


async def test_without_a_deadline_the_request_has_none(serving: Serving) -> None:
    """A call without a timeout may take for ever."""
    await infer(serving, request(), timeout=None)

    assert serving.servable.requests[0].deadline == float("inf")


async def test_a_stream_without_a_request_is_refused(serving: Serving) -> None:
    """A client that half-closes a stream before its first request is told what was missing."""

    def work(channel: Any) -> Any:
        stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")
        with pytest.raises(grpc.RpcError) as caught:
            list(stream(iter([]), timeout=WAIT_SECONDS))
        return caught.value.code(), caught.value.details()

    code, text = await with_channel(serving.address, work)

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Client disconnected during reading first streaming request" in text


async def test_calls_with_metadata_extra_fields_and_gzip_are_served(serving: Serving) -> None:
    """Unknown fields, custom metadata and a compressed message do not disturb a call."""
    payload = request(id="z").SerializeToString() + b"\xfa\x7f\x03new"

    response = await infer(
        serving, payload, metadata=[("x-tenant", "a"), ("trace-bin", b"\x00\xff")], compression=grpc.Compression.Gzip
    )

    assert response.id == "z"
