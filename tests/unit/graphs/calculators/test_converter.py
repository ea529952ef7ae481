"""PyTensorOvTensorConverterCalculator: both directions, one pair and several, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.errors import GraphFailure
from ovmstrio.runtimes.graphs.calculator import ContractError, NodeContract, NodeFailure
from ovmstrio.runtimes.graphs.calculators.converter import CONVERTER, to_ov, to_python
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.runtimes.graphs.packets import OvTensor
from ovmstrio.runtimes.graphs.tensors.python_tensors import contents_of, python_tensor
from pyovms import Tensor
from tests.support.graph_nodes import options, refs, run_nodes

NUMERIC = sorted(set(BY_NAME) - {"BYTES"})
NAMES = {"OVMS_PY_TENSOR": "result"}


def converter(inputs: list[str], outputs: list[str], names: dict[str, str] | None = None, **more: Any) -> NodeConfig:
    """Make a converter node; without names it has no options."""
    given_options = () if names is None else (_options(names),)
    return NodeConfig(
        "", "converter", CONVERTER.name, refs(*inputs), refs(*outputs), node_options=given_options, **more
    )


def _options(names: dict[str, str]) -> Any:
    return options("PyTensorOvTensorConverterCalculatorOptions", tag_to_output_tensor_names=names)


def ov(values: Any, datatype: str) -> OvTensor:
    """Make a tensor of OpenVINO's."""
    return OvTensor(BY_NAME[datatype], np.asarray(values, BY_NAME[datatype].numpy))


@given(
    st.sampled_from(NUMERIC), st.lists(st.integers(0, 3), max_size=4), st.randoms(use_true_random=False), st.booleans()
)
def test_tensors_survive_both_ways(datatype: str, dims: list[int], random: Any, transposed: bool) -> None:
    """Type, shape and every bit are kept, BF16 and arrays that are not contiguous included."""
    row, shape = BY_NAME[datatype], tuple(dims)
    data = bytes(byte & 1 for byte in random.randbytes(math.prod(shape) * row.itemsize))
    array = np.ndarray(shape, row.numpy, data)
    array = array.T if transposed else array
    tensor = to_python("name", OvTensor(row, array))
    assert (tensor.name, tensor.datatype, tuple(tensor.shape)) == ("name", datatype, array.shape)
    back = to_ov(tensor)
    assert back.datatype is row
    assert (back.array.shape, back.array.dtype) == (array.shape, row.numpy)
    assert back.array.tobytes() == array.tobytes()


def test_bf16_is_bytes_for_python() -> None:
    """What numpy has no type for arrives as its bits, under its name."""
    tensor = to_python("t", ov([[0x3F80, 0xC000]], "BF16"))
    assert (tensor.datatype, tuple(tensor.shape), bytes(tensor)) == ("BF16", (1, 2), b"\x80\x3f\x00\xc0")
    assert to_ov(tensor).array.tolist() == [[0x3F80, 0xC000]]


def test_slices_are_taken_in_row_major_order() -> None:
    """A Python tensor over part of an array gives the elements that it shows."""
    part = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    assert to_ov(Tensor("t", part)).array.tolist() == [[0, 2], [4, 6], [8, 10]]


def test_the_shape_and_datatype_that_the_user_gave_count() -> None:
    """They need not be those of the buffer, as long as the bytes fit."""
    made = to_ov(Tensor("t", np.array([1, 0, 0, 0], np.uint8), shape=[1, 1], datatype="INT32"))
    assert (made.datatype.name, made.array.tolist()) == ("INT32", [[1]])


def test_an_array_that_is_filled_again_is_not_the_tensor() -> None:
    """User code may reuse its memory for the next packet."""
    source = np.zeros(2, np.int32)
    made = to_ov(Tensor("t", source))
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
async def test_python_tensors_that_cannot_be_converted_fail_the_node(tensor: Tensor, text: str) -> None:
    """The client is told why, as an error of its input."""
    node = converter(["OVMS_PY_TENSOR:x"], ["OVTENSOR:y"])
    with pytest.raises(GraphFailure) as caught:
        await run_nodes([node], [(1, {"x": tensor})])
    assert caught.value.message == (
        "Mediapipe execution failed. MP status - INVALID_ARGUMENT: CalculatorGraph::Run() failed: \n"
        f'Calculator::Process() for node "converter" failed: {text}'
    )


def test_strings_cannot_be_converted() -> None:
    """OpenVINO's strings have no form in Python tensors."""
    strings = np.array([b"a"], object)
    with pytest.raises(NodeFailure, match=r"^Undefined precision in input tensor: string$") as caught:
        to_python("t", OvTensor(BYTES, strings))
    assert caught.value.code == "INVALID_ARGUMENT"


async def test_one_pair_converts_each_packet_at_its_time() -> None:
    """The tensor is named as the options say and keeps its timestamp."""
    node = converter(["OVTENSOR:x"], ["OVMS_PY_TENSOR:y"], NAMES | {"OTHER": "ignored"})
    (packets,) = (await run_nodes([node], [(3, {"x": ov([1], "INT8")}), (9, {"x": ov([2], "INT8")})])).values()
    assert [(packet.timestamp, packet.value.name, bytes(packet.value)) for packet in packets] == [
        (3, "result", b"\1"),
        (9, "result", b"\2"),
    ]


async def test_several_pairs_of_both_directions() -> None:
    """Pairs are found by suffix and index, and each Python tensor has the name of its own tag."""
    node = converter(
        ["OVTENSOR_A:a", "OVTENSOR:0:b", "OVTENSOR:1:c", "OVMS_PY_TENSOR_D:d"],
        ["OVMS_PY_TENSOR:1:py_c", "OVMS_PY_TENSOR_A:py_a", "OVTENSOR_D:ov_d", "OVMS_PY_TENSOR:0:py_b"],
        {"OVMS_PY_TENSOR_A": "first", "OVMS_PY_TENSOR": "second", "OVMS_PY_TENSOR:1": "third"},
    )
    given_tensors = {name: ov([index], "UINT8") for index, name in enumerate("abc")}
    packets = await run_nodes([node], [(1, {**given_tensors, "d": python_tensor("d", b"\7", (1,), "UINT8")})])
    values = {stream: sent[0].value for stream, sent in packets.items()}
    assert values["ov_d"].array.tolist() == [7]
    named = {stream: (tensor.name, bytes(contents_of(tensor))) for stream, tensor in values.items() if stream != "ov_d"}
    assert named == {"py_a": ("first", b"\0"), "py_b": ("second", b"\1"), "py_c": ("third", b"\2")}


async def test_pairs_without_a_packet_send_nothing() -> None:
    """What has come is converted, and whoever waits for the rest learns that nothing comes."""
    node = converter(["OVMS_PY_TENSOR_A:a", "OVMS_PY_TENSOR_B:b"], ["OVTENSOR_A:x", "OVTENSOR_B:y"])
    packets = await run_nodes([node], [(1, {"b": Tensor("b", b"1")})], inputs=["a"])
    assert [len(packets[name]) for name in "xy"] == [0, 1]


@pytest.mark.parametrize(
    ("inputs", "outputs", "contract"),
    [
        (["OVTENSOR:x"], ["OVMS_PY_TENSOR:y"], ("OVTENSOR", OvTensor, "OVMS_PY_TENSOR", Tensor)),
        (["OVMS_PY_TENSOR:x"], ["OVTENSOR:y"], ("OVMS_PY_TENSOR", Tensor, "OVTENSOR", OvTensor)),
    ],
)
def test_the_contract_types_both_ends(
    inputs: list[str], outputs: list[str], contract: tuple[str, type, str, type]
) -> None:
    """Streams carry what their tag says."""
    tag, kind, result_tag, result = contract
    made: NodeContract = CONVERTER.contract(converter(inputs, outputs, NAMES))
    assert (made.inputs, made.outputs) == ({Port(tag, 0): kind}, {Port(result_tag, 0): result})


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
def test_converters_that_cannot_be(inputs: list[str], outputs: list[str], names: dict[str, str] | None) -> None:
    """Other tags, streams without a partner and Python tensors without a name are found before anything runs."""
    with pytest.raises(ContractError):
        CONVERTER.contract(converter(inputs, outputs, names))


def test_a_converter_has_no_side_packets() -> None:
    """Nothing would use them."""
    with pytest.raises(ContractError, match="has no side packets"):
        CONVERTER.contract(converter(["OVMS_PY_TENSOR:x"], ["OVTENSOR:y"], side_inputs=refs("S:s")))


def test_options_in_the_older_style_count() -> None:
    """An extension in ``options`` says the same as ``node_options``."""
    node = NodeConfig(
        "",
        "c",
        CONVERTER.name,
        refs("OVTENSOR:x"),
        refs("OVMS_PY_TENSOR:y"),
        options=(_options(NAMES),),
        node_options=(options("SomethingElse", text="x"),),
    )
    assert CONVERTER.contract(node).outputs == {Port("OVMS_PY_TENSOR", 0): Tensor}
