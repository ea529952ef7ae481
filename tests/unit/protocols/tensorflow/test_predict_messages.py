from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ovmstrio.core.errors import InvalidRequest, NotSupported
from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.encoding.messages import POOL, message_class
from ovmstrio.protocols.grpc_codec import Codec
from ovmstrio.protocols.tensorflow.grpc_service import PredictRequest, encode_predict
from ovmstrio.protocols.tensorflow.types import BY_DATATYPE, BY_NUMBER, TensorFlowType
from tests.support.servables import validate
from tests.unit.protocols.tensorflow.calls import array_of, content, predict_request, tensor

NUMERIC = sorted(name for name in BY_DATATYPE if name != "BYTES")


def decode(data: bytes) -> PredictRequest:
    request: PredictRequest = Codec().decode(data, PredictRequest)
    return request


def decode_inputs(**inputs: Any) -> PredictRequest:
    return decode(predict_request("m", inputs).SerializeToString())


def checked(message: Any, datatype: str, *dims: Dim) -> Any:
    request = decode_inputs(x=message)
    return validate(request, [TensorSpec("x", BY_NAME[datatype], dims, None)])["x"]


def values_of(array: Any, datatype: str) -> list[Any]:
    bits: Any = array.view("<u2") if datatype == "FP16" else array
    elements: list[Any] = bits.reshape(-1).tolist()
    return elements


@st.composite
def numeric_arrays(draw: st.DrawFn) -> tuple[str, Any]:
    """Create an array of any numeric type and of any shape up to rank three, also empty ones."""
    datatype = draw(st.sampled_from(NUMERIC))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
    return datatype, draw(arrays.arrays(BY_NAME[datatype].numpy, shape))


@given(numeric_arrays())
def test_packed_elements_reach_the_model_unchanged(given_array: tuple[str, Any]) -> None:
    datatype, array = given_array
    found = checked(content(BY_DATATYPE[datatype].name, array), datatype, *[ANY_SIZE] * array.ndim)
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(numeric_arrays())
def test_single_values_reach_the_model_unchanged(given_array: tuple[str, Any]) -> None:
    datatype, array = given_array
    row = BY_DATATYPE[datatype]
    message = tensor(row.name, array.shape, **{row.values_field: values_of(array, datatype)})
    found = checked(message, datatype, *[ANY_SIZE] * array.ndim)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)


@given(numeric_arrays(), st.integers(0, 5))
def test_the_last_value_is_repeated_for_missing_ones(given_array: tuple[str, Any], more: int) -> None:
    datatype, array = given_array
    if not array.size:
        return
    row = BY_DATATYPE[datatype]
    message = tensor(row.name, (array.size + more,), **{row.values_field: values_of(array, datatype)})
    flat = array.reshape(-1)
    expected = np.concatenate([flat, np.full(more, flat[-1])])
    np.testing.assert_array_equal(checked(message, datatype, ANY_SIZE), expected)


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_strings_reach_the_model_unchanged(strings: list[bytes]) -> None:
    found = checked(tensor("DT_STRING", (len(strings),), string_val=strings), "BYTES", ANY_SIZE)
    assert found.tolist() == strings


def test_packed_values_are_preferred_to_single_ones_of_the_same_tensor() -> None:
    request = decode_inputs(x=content("DT_FLOAT", np.array([1.5], "f4")), n=tensor("DT_UINT64", (1,), uint64_val=[7]))
    specs = [TensorSpec("n", BY_NAME["UINT64"], (Dim.fixed(1),)), TensorSpec("x", BY_NAME["FP32"], (Dim.fixed(1),))]
    found = validate(request, specs)
    assert {name: array.tolist() for name, array in found.items()} == {"n": [7], "x": [1.5]}
    both = tensor("DT_INT32", (1,), tensor_content=b"\x05\0\0\0", int_val=[6])
    assert checked(both, "INT32", Dim.fixed(1)).tolist() == [5]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            content("DT_FLOAT", np.zeros(3, "f4")),
            "Invalid number of shape dimensions - Expected: (1,4); Actual: (3); input name: x",
        ),
        (content("DT_FLOAT", np.zeros((1, 3), "f4")), "Invalid input shape - Expected: (1,4); Actual: (1,3)"),
        (content("DT_DOUBLE", np.zeros((1, 4))), "Invalid input precision - Expected: FP32; Actual: FP64"),
        (tensor("DT_COMPLEX64", (1, 4), scomplex_val=[0] * 8), "Expected: FP32; Actual: DT_COMPLEX64; input name: x"),
        (tensor("DT_COMPLEX128", (1, 4), tensor_content=bytes(64)), "Expected: FP32; Actual: DT_COMPLEX128"),
        (tensor("DT_INVALID", (1, 4)), "Expected: FP32; Actual: DT_INVALID"),
        (
            tensor("DT_FLOAT", (1, 4), tensor_content=bytes(15)),
            "Invalid content size of tensor proto - Expected: 16 bytes; Actual: 15 bytes; input name: x",
        ),
        (tensor("DT_FLOAT", (1, 4)), "Invalid content size of tensor proto - Expected: 16 bytes; Actual: 0 bytes"),
        (tensor("DT_FLOAT", (1, 4), double_val=[0] * 4), "Expected: 16 bytes; Actual: 0 bytes"),
        (
            tensor("DT_FLOAT", (1, 4), float_val=[0] * 5),
            "Invalid number of values in tensor proto container - Expected: 4 values; Actual: 5 values; input name: x",
        ),
        (tensor("DT_FLOAT", (-1, 4), float_val=[0] * 4), "Invalid input shape - Expected: (1,4); Actual: (-1,4)"),
        (tensor("DT_STRING", (1,), string_val=[b"a"]), "Functionality not implemented - BYTES for an input of FP32"),
    ],
)
def test_tensors_that_do_not_match_the_input_are_refused_with_the_texts_of_ovms(message: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(message, "FP32", Dim.fixed(1), Dim.fixed(4))
    assert text in caught.value.message


UNKNOWN_TYPE = tensor("DT_FLOAT", (1,))
UNKNOWN_TYPE.dtype = 99


@pytest.mark.parametrize(
    ("message", "datatype", "text"),
    [
        (tensor("DT_HALF", (2,)), "FP16", "Invalid number of values in tensor proto container - Expected: 2 values"),
        (tensor("DT_UINT16", (2,)), "UINT16", "Expected: 2 values; Actual: 0 values"),
        (tensor("DT_UINT8", (1,), int_val=[300]), "UINT8", "300 is out of range of UINT8 [0, 255]; input name: x"),
        (tensor("DT_FLOAT", (2**30,), float_val=[1]), "FP32", "Expected: 1073741824 values; Actual: 1 values"),
        (UNKNOWN_TYPE, "FP32", "Expected: FP32; Actual: DataType 99"),
    ],
    ids=["missing FP16", "missing UINT16", "out of range", "one value for a large tensor", "unknown type"],
)
def test_invalid_values_and_types_are_refused(message: Any, datatype: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(text)):
        checked(message, datatype, ANY_SIZE)


def test_version_and_output_filter_are_read() -> None:
    found = decode(predict_request("m", {}, 3, output_filter=["a", "b"]).SerializeToString())
    assert (found.model_name, found.model_version) == ("m", "3")
    assert [output.name for output in found.outputs] == ["a", "b"]
    label = predict_request("m", {})
    label.model_spec.version_label = "stable"
    assert decode(label.SerializeToString()).model_version == "0"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (predict_request("m", {"x": tensor("DT_BFLOAT16", (1,), half_val=[70000])}), "70000 to 70000; input name: x"),
        (b"\xff", "malformed tensorflow.serving.PredictRequest: its 1 bytes are not a protobuf message of that type"),
        (predict_request("m", {"x": tensor("DT_FLOAT", (1,) * 1025)}), "at most 1024 dimensions, got 1025"),
        (predict_request("m", {str(n): tensor("DT_FLOAT", ()) for n in range(1025)}), "at most 1024 inputs, got 1025"),
        (predict_request("m", {}, output_filter=["a"] * 1025), "at most 1024 names in output_filter, got 1025"),
        (predict_request("m", {"x": tensor("DT_HALF", (1,), half_val=[-1])}), "half_val holds the 16 bits"),
        (predict_request("m", {"x": tensor("DT_HALF", (1,), half_val=[65536])}), "got 65536 to 65536; input name: x"),
    ],
)
def test_malformed_and_excessive_requests_are_invalid_arguments(data: Any, text: str) -> None:
    with pytest.raises(GRPCError) as caught:
        decode(data if isinstance(data, bytes) else data.SerializeToString())
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert text in (caught.value.message or "")


@given(st.binary(max_size=60))
def test_garbage_is_decoded_or_refused(data: bytes) -> None:
    status = None
    try:
        decode(data)
    except GRPCError as error:
        status = error.status
    assert status in {None, Status.INVALID_ARGUMENT}


PACKED = sorted(name for name in BY_DATATYPE if name not in {"BYTES", "UINT64"})


def encode(*outputs: Tensor | RawTensor) -> Any:
    answer = InferResponse("m", "3", list(outputs))
    return message_class("tensorflow.serving.PredictResponse").FromString(encode_predict(answer))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    datatype = BY_NAME[draw(st.sampled_from(PACKED))]
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=20))
    array = draw(arrays.arrays(datatype.numpy, shape))
    return Tensor(
        draw(st.text(st.characters(exclude_categories=["Cs"]))), datatype, draw(st.sampled_from([array, array.T]))
    )


@given(st.lists(tensors(), max_size=3, unique_by=lambda each: each.name))
def test_outputs_are_written_with_type_shape_and_packed_elements(outputs: list[Tensor]) -> None:
    message = encode(*outputs)
    assert (message.model_spec.name, message.model_spec.version.value) == ("m", 3)
    assert set(message.outputs) == {output.name for output in outputs}
    for output in outputs:
        found = message.outputs[output.name]
        assert found.dtype == BY_DATATYPE[output.datatype.name].number
        read = array_of(found, output.datatype.numpy.str)
        assert (read.shape, read.tobytes()) == (output.shape, output.array.tobytes())


@given(st.lists(st.integers(0, 2**64 - 1), max_size=80))
def test_uint64_outputs_are_written_as_single_values(numbers: list[int]) -> None:
    found = encode(Tensor("n", BY_NAME["UINT64"], np.array(numbers, "<u8"))).outputs["n"]
    assert (list(found.uint64_val), found.tensor_content) == (numbers, b"")


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_string_outputs_are_written_as_single_values(strings: list[bytes]) -> None:
    array = np.empty(len(strings), object)
    array[:] = strings
    found = encode(Tensor("s", BY_NAME["BYTES"], array)).outputs["s"]
    assert (found.dtype, list(found.string_val)) == (7, strings)
    assert [dim.size for dim in found.tensor_shape.dim] == [len(strings)]


def test_raw_outputs_are_written_by_their_type() -> None:
    message = encode(
        RawTensor("x", "INT16", (2,), b"\x01\0\x02\0"),
        RawTensor("n", "UINT64", (1,), memoryview(b"\x05" + bytes(7))),
        RawTensor("s", "BYTES", (1,), b"\x02\0\0\0hi"),
    )
    assert array_of(message.outputs["x"], "<i2").tolist() == [1, 2]
    assert list(message.outputs["n"].uint64_val) == [5]
    assert list(message.outputs["s"].string_val) == [b"hi"]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (RawTensor("x", "MY_TYPE", (1,), b"1"), "output 'x': TensorFlow has no element type MY_TYPE"),
        (RawTensor("x", "BYTES", (1,), b"12345"), "output 'x': bytes are not length-prefixed strings"),
    ],
)
def test_outputs_without_a_tensorflow_type_are_refused_by_name(output: RawTensor, text: str) -> None:
    with pytest.raises(NotSupported, match=text):
        encode(output)


def test_every_datatype_has_its_tensorflow_type() -> None:
    numbers = POOL.FindEnumTypeByName("tensorflow.DataType").values_by_number
    assert {number: row.name for number, row in BY_NUMBER.items()} == {n: numbers[n].name for n in BY_NUMBER}
    assert set(BY_DATATYPE) == set(BY_NAME)


@pytest.mark.parametrize("row", BY_NUMBER.values(), ids=lambda row: row.name)
def test_value_fields_exist_and_packed_ones_have_a_fixed_size(row: TensorFlowType) -> None:
    field = POOL.FindMessageTypeByName("tensorflow.TensorProto").fields_by_name[row.values_field]
    assert field.is_repeated
    assert row.packed == (field.cpp_type in {field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE, field.CPPTYPE_BOOL})
