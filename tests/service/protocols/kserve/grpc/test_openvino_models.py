from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ovmstrio.config.specs import ModelSpec
from ovmstrio.models.loading import load_model
from tests.service.protocols.kserve.grpc.servers import serving_grpc
from tests.support import ir
from tests.support.api_clients import call, with_triton


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """Serve models that add one and that pass through, as long as the test lasts."""
    models = {
        "dummy": ir.dummy(),
        "strings": ir.string_passthrough(),
        **{name.lower(): ir.passthrough(name) for name in ("FP16", "BF16", "INT64")},
    }
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    specs = [
        ModelSpec(name=name, base_path=ir.save(model, tmp_path, name), plugin_config=settings)
        for name, model in models.items()
    ]
    async with serving_grpc(load_model, specs) as serving:
        yield serving.address


def triton_input(name: str, datatype: str, array: Any) -> Any:
    """Make an input as users of tritonclient do."""
    from tritonclient.grpc import InferInput

    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


async def test_an_openvino_model_answers_with_its_output_version_and_request_id(address: str) -> None:
    array = np.arange(10, dtype="f4").reshape(1, 10)

    result = await with_triton(
        address, lambda client: client.infer("dummy", [triton_input("b", "FP32", array)], request_id="7")
    )

    np.testing.assert_array_equal(result.as_numpy("a"), array + 1)
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("dummy", "1", "7")


@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("FP16", np.array([[1.5, -2, 65504], [0, 6e-8, np.inf]], "f2")),
        # The CPU device computes INT64 in 32 bits.
        ("INT64", np.array([[2**31 - 1, -(2**31), 0], [1, 2, 3]], "i8")),
    ],
)
async def test_extreme_values_pass_through_a_model_unchanged(address: str, datatype: str, array: Any) -> None:
    result = await with_triton(
        address, lambda client: client.infer(datatype.lower(), [triton_input("x", datatype, array)])
    )

    np.testing.assert_array_equal(result.as_numpy("y"), array)


async def test_bf16_elements_pass_through_a_model_bit_by_bit(address: str) -> None:
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    bits = (np.array([[1.5, -2, 0.25], [0, 3e38, -np.inf]], "f4").view("u4") >> 16).astype("<u2").tobytes()
    request = ModelInferRequest(
        model_name="bf16", inputs=[{"name": "x", "datatype": "BF16", "shape": [2, 3]}], raw_input_contents=[bits]
    )

    response = await call(
        address, "/inference.GRPCInferenceService/ModelInfer", request, "inference.ModelInferResponse"
    )

    assert (response.outputs[0].datatype, list(response.raw_output_contents)) == ("BF16", [bits])


async def test_strings_of_any_length_pass_through_a_model(address: str) -> None:
    array = np.array([b"", b"one", "größer".encode() * 100], object)

    result = await with_triton(
        address, lambda client: client.infer("strings", [triton_input("strings", "BYTES", array)])
    )

    assert result.as_numpy("strings").tolist() == array.tolist()


@pytest.mark.parametrize(
    ("datatype", "array", "text"),
    [
        ("FP32", np.zeros((1, 9), "f4"), "Invalid input shape"),
        ("FP32", np.zeros((2, 10), "f4"), "Invalid input batch size"),
        ("FP32", np.zeros((10,), "f4"), "Invalid number of shape dimensions"),
        ("INT32", np.zeros((1, 10), "i4"), "Invalid input precision"),
    ],
)
async def test_a_mismatched_input_is_refused_and_the_next_request_is_served(
    address: str, datatype: str, array: Any, text: str
) -> None:
    from tritonclient.utils import InferenceServerException

    def work(client: Any) -> Any:
        with pytest.raises(InferenceServerException) as caught:
            client.infer("dummy", [triton_input("b", datatype, array)])
        right = triton_input("b", "FP32", np.ones((1, 10), "f4"))
        return caught.value, client.infer("dummy", [right]).as_numpy("a")

    error, answer = await with_triton(address, work)

    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    assert text in error.message()
    assert answer.tolist() == [[2.0] * 10]


async def test_metadata_names_the_tensors_of_the_model(address: str) -> None:
    metadata = await with_triton(address, lambda client: client.get_model_metadata("dummy", as_json=True))

    assert metadata == {
        "name": "dummy",
        "versions": ["1"],
        "platform": "OpenVINO",
        "inputs": [{"name": "b", "datatype": "FP32", "shape": ["1", "10"]}],
        "outputs": [{"name": "a", "datatype": "FP32", "shape": ["1", "10"]}],
    }
