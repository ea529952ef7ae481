from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import GraphFailure
from ovmstrio.core.tensor import BY_NAME, BYTES
from ovmstrio.graphs.calculator import ContractError, NodeFailure
from ovmstrio.graphs.calculators.inference import CONVERTER, ov_to_python_tensor, python_to_ov_tensor
from ovmstrio.graphs.graph_config import NodeConfig, Port
from ovmstrio.graphs.packets import OvTensor
from ovmstrio.graphs.tensors import create_python_tensor, tensor_bytes
from pyovms import Tensor
from tests.support.graph_nodes import Feed, options, refs, run_nodes

NUMERIC = sorted(set(BY_NAME) - {"BYTES"})
NAMES = {"OVMS_PY_TENSOR": "result"}


def converter(inputs: list[str], outputs: list[str], names: dict[str, str] | None = None, **more: Any) -> NodeConfig:
    node_options = {} if names is None else {"node_options": (_options(names),)}
    return NodeConfig("", "converter", CONVERTER.name, refs(*inputs), refs(*outputs), **(node_options | more))


def _options(names: dict[str, str]) -> Any:
    return options("PyTensorOvTensorConverterCalculatorOptions", tag_to_output_tensor_names=names)


def ov(values: Any, datatype: str) -> OvTensor:
    return OvTensor(BY_NAME[datatype], np.asarray(values, BY_NAME[datatype].numpy))


@given(
    st.sampled_from(NUMERIC), st.lists(st.integers(0, 3), max_size=4), st.randoms(use_true_random=False), st.booleans()
)
def test_conversion_in_both_directions_keeps_every_bit(
    datatype: str, dims: list[int], random: Any, transposed: bool
) -> None:
    row, shape = BY_NAME[datatype], tuple(dims)
    data = bytes(byte & 1 for byte in random.randbytes(math.prod(shape) * row.itemsize))
    array = np.ndarray(shape, row.numpy, data)
    array = array.T if transposed else array
    tensor = ov_to_python_tensor("name", OvTensor(row, array))
    assert (tensor.name, tensor.datatype, tuple(tensor.shape)) == ("name", datatype, array.shape)
    back = python_to_ov_tensor(tensor)
    assert back.datatype is row
    assert (back.array.shape, back.array.dtype) == (array.shape, row.numpy)
    assert back.array.tobytes() == array.tobytes()


def test_slices_are_read_in_row_major_order() -> None:
    part = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    assert python_to_ov_tensor(Tensor("t", part)).array.tolist() == [[0, 2], [4, 6], [8, 10]]


def test_shape_and_datatype_of_the_user_are_used() -> None:
    made = python_to_ov_tensor(Tensor("t", np.array([1, 0, 0, 0], np.uint8), shape=[1, 1], datatype="INT32"))
    assert (made.datatype.name, made.array.tolist()) == ("INT32", [[1]])


def test_arrays_of_user_code_are_copied() -> None:
    source = np.zeros(2, np.int32)
    made = python_to_ov_tensor(Tensor("t", source))
    source[:] = 5
    assert made.array.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (Tensor("t", b"abc", [3], "my_string"), "Undefined precision in input python tensor: my_string"),
        (Tensor("t", b"abc", [3], "BYTES"), "Undefined precision in input python tensor: BYTES"),
        (Tensor("t", b"abc", [1, -3], "INT8"), "dimension negative during conversion: -3"),
        (Tensor("t", b"abc", [4], "INT8"), "python buffer size: 3; OV tensor size: 4; mismatch"),
        (Tensor("t", b"abc", [2**40, 2**40], "INT8"), f"python buffer size: 3; OV tensor size: {2**80}; mismatch"),
    ],
)
async def test_invalid_python_tensors_fail_the_node(tensor: Tensor, text: str) -> None:
    node = converter(["OVMS_PY_TENSOR:x"], ["OVTENSOR:y"])
    with pytest.raises(GraphFailure) as caught:
        await run_nodes([node], [(1, {"x": tensor})])
    assert caught.value.message == (
        "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: \n"
        f'Calculator::Process() for node "converter" failed: {text}'
    )


def test_strings_are_refused() -> None:
    strings = np.array([b"a"], object)
    with pytest.raises(NodeFailure, match=r"^Undefined precision in input tensor: string$") as caught:
        ov_to_python_tensor("t", OvTensor(BYTES, strings))
    assert caught.value.code == "INVALID_ARGUMENT"


async def test_pairs_are_matched_by_suffix_and_index() -> None:
    node = converter(
        ["OVTENSOR_A:a", "OVTENSOR:0:b", "OVTENSOR:1:c", "OVMS_PY_TENSOR_D:d"],
        ["OVMS_PY_TENSOR:1:py_c", "OVMS_PY_TENSOR_A:py_a", "OVTENSOR_D:ov_d", "OVMS_PY_TENSOR:0:py_b"],
        {"OVMS_PY_TENSOR_A": "first", "OVMS_PY_TENSOR": "second", "OVMS_PY_TENSOR:1": "third"},
    )
    feed: Feed = [
        (
            3,
            {"d": create_python_tensor("d", b"\7", (1,), "UINT8")}
            | {name: ov([i], "UINT8") for i, name in enumerate("abc")},
        ),
        (9, {"b": ov([5], "UINT8")}),
    ]
    packets = await run_nodes([node], feed)
    (converted,) = packets.pop("ov_d")
    assert (converted.timestamp, converted.value.array.tolist()) == (3, [7])
    assert {
        stream: [(packet.timestamp, packet.value.name, bytes(tensor_bytes(packet.value))) for packet in sent]
        for stream, sent in packets.items()
    } == {
        "py_a": [(3, "first", b"\0")],
        "py_b": [(3, "second", b"\1"), (9, "second", b"\5")],
        "py_c": [(3, "third", b"\2")],
    }


async def test_pairs_without_packet_send_nothing() -> None:
    node = converter(["OVMS_PY_TENSOR_A:a", "OVMS_PY_TENSOR_B:b"], ["OVTENSOR_A:x", "OVTENSOR_B:y"])
    packets = await run_nodes([node], [(1, {"b": Tensor("b", b"1")})], inputs=["a"])
    assert [len(packets[name]) for name in "xy"] == [0, 1]


@pytest.mark.parametrize(("source", "result"), [("OVTENSOR", "OVMS_PY_TENSOR"), ("OVMS_PY_TENSOR", "OVTENSOR")])
def test_tags_are_the_types_of_streams(source: str, result: str) -> None:
    types = {"OVTENSOR": OvTensor, "OVMS_PY_TENSOR": Tensor}
    others = (options("SomethingElse", text="x"),)
    node = converter([f"{source}:x"], [f"{result}:y"], options=(_options(NAMES),), node_options=others)
    contract = CONVERTER.contract(node)
    assert contract.inputs == {Port(source, 0): types[source]}
    assert contract.outputs == {Port(result, 0): types[result]}


@pytest.mark.parametrize(
    ("inputs", "outputs", "names"),
    [
        (["INPUT:x"], ["OUTPUT:y"], NAMES),
        (["x"], ["y"], NAMES),
        (["OVTENSOR:x"], ["OVTENSOR:y"], NAMES),
        (["OVMS_PY_TENSOR:x"], ["OVMS_PY_TENSOR:y"], NAMES),
        (["OVTENSOR:x", "OVTENSOR:1:z"], ["OVMS_PY_TENSOR:y"], NAMES),
        (["OVTENSOR:x"], ["OVMS_PY_TENSOR:y", "OVMS_PY_TENSOR_B:z"], NAMES),
        (["OVTENSOR_A:x"], ["OVMS_PY_TENSOR_B:y"], {"OVMS_PY_TENSOR_B": "n"}),
        ([], ["OVTENSOR:y"], None),
        (["OVMS_PY_TENSOR:x"], [], None),
        (["OVTENSOR:x"], ["OVMS_PY_TENSOR:y"], None),
        (["OVTENSOR:x"], ["OVMS_PY_TENSOR:y"], {}),
        (["OVTENSOR:x"], ["OVMS_PY_TENSOR:y"], {"OVTENSOR": "n"}),
        (["OVTENSOR:x"], ["OVMS_PY_TENSOR:y"], {"OVMS_PY_TENSOR": ""}),
        (["OVTENSOR:0:x", "OVTENSOR:1:z"], ["OVMS_PY_TENSOR:y", "OVMS_PY_TENSOR:1:w"], NAMES),
    ],
)
def test_invalid_streams_and_names_are_refused(
    inputs: list[str], outputs: list[str], names: dict[str, str] | None
) -> None:
    with pytest.raises(ContractError):
        CONVERTER.contract(converter(inputs, outputs, names))


def test_side_packets_are_refused() -> None:
    with pytest.raises(ContractError, match="has no side packets"):
        CONVERTER.contract(converter(["OVMS_PY_TENSOR:x"], ["OVTENSOR:y"], side_inputs=refs("S:s")))
