"""Numbers, empty tensors and optional fields, which every form of a request treats alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from ovmstrio.encoding.messages import message_class
from tests.support import ir
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.waits import WAIT_SECONDS

NODE = """
from pyovms import Tensor


class OvmsPythonModel:
    def execute(self, inputs):
        return [Tensor("out", inputs[0].data, inputs[0].shape, inputs[0].datatype)]
"""
GRAPH_FILE = """
input_stream: "OVMS_PY_TENSOR:in"
output_stream: "OVMS_PY_TENSOR:out"
node {
  name: "echo"
  calculator: "PythonExecutorCalculator"
  input_side_packet: "PYTHON_NODE_RESOURCES:py"
  input_stream: "IN:in"
  output_stream: "OUT:out"
  node_options: {
    [type.googleapis.com / mediapipe.PythonExecutorCalculatorOptions]: { handler_path: "node.py" }
  }
}
"""
INVALID_VALUES = "Invalid values in tensor proto container"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    folder = tmp_path_factory.mktemp("forms")
    path = ir.save(ir.dummy([-1, 2], datatype="INT8"), folder, "int8")
    (folder / "graph.pbtxt").write_text(GRAPH_FILE)
    (folder / "node.py").write_text(NODE)
    config = {
        "model_config_list": [{"config": {"name": "int8", "base_path": str(path)}}],
        "mediapipe_config_list": [{"name": "graph", "base_path": str(folder), "graph_path": "graph.pbtxt"}],
    }
    (folder / "config.json").write_text(json.dumps(config))
    with serving_in_thread(config_path=folder / "config.json") as running:
        yield running


def _infer(server: ServedInThread, document: dict[str, Any], model: str = "int8") -> tuple[int, Any]:
    answer = server.ask("POST", f"/v2/models/{model}/infer", json=document)
    return answer.status_code, answer.json()


def _int8(*data: Any, **more: Any) -> dict[str, Any]:
    return {"name": "b", "shape": [1, len(data)], "datatype": "INT8", "data": [*data], **more}


def _call(server: ServedInThread, method: str, message: Any) -> str:
    """Return the details of a refused gRPC call."""
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(method)(message.SerializeToString(), timeout=WAIT_SECONDS)
    error: Any = refused.value
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    details: str = error.details()
    return details


@pytest.mark.parametrize("model", ["int8", "graph"])
@pytest.mark.parametrize("value", [0.5, 1.0, 2**63, -1, True, "text", None])
def test_parameters_of_every_type_are_taken_over_rest_and_grpc(server: ServedInThread, model: str, value: Any) -> None:
    given = {"p": value}
    tensor = _int8(1, 2, parameters=given) | ({} if model == "int8" else {"name": "in"})
    status, answer = _infer(server, {"inputs": [tensor], "parameters": given}, model)
    assert (status, answer["outputs"][0]["data"]) == (200, [2, 3] if model == "int8" else [1, 2])
    generated = server.ask("POST", f"/v2/models/{model}/generate", json={tensor["name"]: [1, 2], **given})
    assert generated.status_code == 200, generated.text
    if value is not None and value != 2**63:
        kinds: dict[type, str] = {float: "double_param", int: "int64_param", bool: "bool_param", str: "string_param"}
        message = message_class("inference.ModelInferRequest")(
            model_name=model,
            parameters={"p": {kinds[type(value)]: value}},
            inputs=[{"name": tensor["name"], "datatype": "INT8", "shape": [1, 2]}],
            raw_input_contents=[b"\1\2"],
        )
        with grpc.insecure_channel(server.grpc) as channel:
            method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            method(message.SerializeToString(), timeout=WAIT_SECONDS)


def test_null_is_the_same_as_a_missing_field_over_rest(server: ServedInThread) -> None:
    document = {"id": None, "parameters": None, "outputs": None, "inputs": [_int8(1, 2, parameters=None)]}
    assert _infer(server, document) == _infer(server, {"inputs": [_int8(1, 2)]})
    document["outputs"] = [{"name": "a", "parameters": None}]
    assert _infer(server, document)[1]["outputs"] == [
        {"name": "a", "shape": [1, 2], "datatype": "INT8", "data": [2, 3]}
    ]
    assert server.ask("POST", "/v2/repository/index", json={"ready": None}).status_code == 200


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
@pytest.mark.parametrize("datatype", ["INT64", "FP32", "BOOL", "BYTES"])
def test_a_graph_takes_a_tensor_without_elements_in_every_form(
    server: ServedInThread, datatype: str, shape: tuple[int, ...]
) -> None:
    data: list[Any] = [[] for _ in range(shape[0])]
    tensor = {"name": "in", "shape": shape, "datatype": datatype}
    for sent in (tensor | {"data": data}, tensor | {"data": []}, tensor):
        status, answer = _infer(server, {"inputs": [sent]}, "graph")
        assert (status, answer["outputs"]) == (200, [{**tensor, "name": "out", "shape": list(shape), "data": []}]), sent
    array: Any = np.zeros(
        shape, {"INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_, "BYTES": np.object_}[datatype]
    )
    for client_type, address in ((tritonclient.grpc, server.grpc), (tritonclient.http, server.http)):
        with client_type.InferenceServerClient(address) as client:
            given = client_type.InferInput("in", shape, datatype)
            given.set_data_from_numpy(array)
            assert client.infer("graph", [given]).as_numpy("out").shape == shape


def test_a_value_out_of_range_is_named_once_in_every_form(server: ServedInThread) -> None:
    message = message_class("inference.ModelInferRequest")(
        model_name="int8",
        inputs=[{"name": "b", "datatype": "INT8", "shape": [1, 2], "contents": {"int_contents": [1, 128]}}],
    )
    texts = [
        _infer(server, {"inputs": [_int8(1, 128)]})[1]["error"],
        _infer(server, {"inputs": [_int8(*[1] * 4000, 128, *[1] * 4001)]})[1]["error"],
        _call(server, "/inference.GRPCInferenceService/ModelInfer", message),
        *(
            server.ask("POST", "/v1/models/int8:predict", json=body).json()["error"]
            for body in ({"instances": [[1, 128]]}, {"inputs": [[1, 128]]})
        ),
    ]
    expected = f"{INVALID_VALUES} - 128 is out of range of INT8 [-128, 127]; input name: b"
    assert [texts[0], *texts[2:]] == [expected] * 4
    assert texts[1].count("input name") == 1


@pytest.mark.parametrize("value", [10**20, 1.5, -(10**20)])
def test_a_number_that_is_no_integer_of_64_bits_is_named(server: ServedInThread, value: float) -> None:
    status, answer = _infer(server, {"inputs": [_int8(1, value)]})
    assert (status, answer["error"].count("input b")) == (400, 1)
    assert f"such as {json.dumps(float(value))}" in answer["error"]


def test_a_negative_size_is_refused_with_the_shape_that_came(server: ServedInThread) -> None:
    message = message_class("inference.ModelInferRequest")(
        model_name="int8",
        inputs=[{"name": "b", "datatype": "INT8", "shape": [-1, 2]}],
        raw_input_contents=[b"\1\2"],
    )
    details = _call(server, "/inference.GRPCInferenceService/ModelInfer", message)
    expected = "Invalid input shape - Expected: (-1,2) with sizes of 0 or more; Actual: (-1,2); input name: b"
    assert details == expected
    status, answer = _infer(server, {"inputs": [_int8(1, 2) | {"shape": [-1, 2]}]})
    assert status == 400
    assert answer["error"].endswith(
        "input b: shape: expected a list of whole numbers from 0 to 2147483647, got [-1, 2]"
    )
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        given = tritonclient.grpc.InferInput("in", [-1], "INT8")
        given._raw_content = b"\1"  # noqa: SLF001 - the client checks the shape
        with pytest.raises(InferenceServerException, match="Negative dimension size is not acceptable"):
            client.infer("graph", [given])
