from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ovmstrio.api.grpc_codec import Codec
from ovmstrio.api.tensorflow.grpc.predict_messages import PredictRequest
from ovmstrio.api.tensorflow.tensorflow_types import BY_DATATYPE
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import ANY_SIZE, Dim, TensorSpec
from tests.support.validation import validate
from tests.unit.api.grpc.tensorflow.calls import content, predict_request, tensor

NUMERIC = sorted(name for name in BY_DATATYPE if name != "BYTES")


def decode(data: bytes) -> PredictRequest:
    """Decode as the transport does."""
    request: PredictRequest = Codec().decode(data, PredictRequest)
    return request


def decode_inputs(**inputs: Any) -> PredictRequest:
    """Decode a request with these tensors."""
    return decode(predict_request("m", inputs).SerializeToString())


def checked(message: Any, datatype: str, *dims: Dim) -> Any:
    """Give the array that a model with one input makes of a tensor."""
    request = decode_inputs(x=message)
    return validate(request, [TensorSpec("x", BY_NAME[datatype], dims, None)])["x"]


def values_of(array: Any, datatype: str) -> list[Any]:
    """Give an array's elements as the field for single values holds them."""
    bits: Any = array.view("<u2") if datatype == "FP16" else array
    elements: list[Any] = bits.reshape(-1).tolist()
    return elements


@st.composite
def numeric_arrays(draw: st.DrawFn) -> tuple[str, Any]:
    """Make an array of any numeric type and of a shape from scalar to rank three, empty ones included."""
    datatype = draw(st.sampled_from(NUMERIC))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
    return datatype, draw(arrays.arrays(BY_NAME[datatype].numpy, shape))


@given(numeric_arrays())
def test_packed_elements_reach_the_model_bit_by_bit(given_array: tuple[str, Any]) -> None:
    """``tensor_content`` of every type and shape is what the model gets."""
    datatype, array = given_array
    found = checked(content(BY_DATATYPE[datatype].name, array), datatype, *[ANY_SIZE] * array.ndim)
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(numeric_arrays())
def test_single_values_reach_the_model_bit_by_bit(given_array: tuple[str, Any]) -> None:
    """Elements in the field that is for their type are as good as packed ones."""
    datatype, array = given_array
    row = BY_DATATYPE[datatype]
    message = tensor(row.name, array.shape, **{row.values_field: values_of(array, datatype)})
    found = checked(message, datatype, *[ANY_SIZE] * array.ndim)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)


@given(numeric_arrays(), st.integers(0, 5))
def test_the_last_value_stands_for_all_that_are_missing(given_array: tuple[str, Any], more: int) -> None:
    """TensorFlow leaves out equal values at the end; one value may stand for a whole tensor."""
    datatype, array = given_array
    if not array.size:
        return
    row = BY_DATATYPE[datatype]
    message = tensor(row.name, (array.size + more,), **{row.values_field: values_of(array, datatype)})
    flat = array.reshape(-1)
    expected = np.concatenate([flat, np.full(more, flat[-1])])
    np.testing.assert_array_equal(checked(message, datatype, ANY_SIZE), expected)


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_strings_reach_the_model(strings: list[bytes]) -> None:
    """``string_val`` keeps every element, with zeros and empty ones."""
    found = checked(tensor("DT_STRING", (len(strings),), string_val=strings), "BYTES", ANY_SIZE)
    assert found.tolist() == strings


def test_packed_and_single_values_side_by_side() -> None:
    """One request may carry one tensor packed and the other in single values, as stateful clients send them."""
    request = decode_inputs(x=content("DT_FLOAT", np.array([1.5], "f4")), n=tensor("DT_UINT64", (1,), uint64_val=[7]))
    specs = [TensorSpec("n", BY_NAME["UINT64"], (Dim.fixed(1),)), TensorSpec("x", BY_NAME["FP32"], (Dim.fixed(1),))]
    found = validate(request, specs)
    assert {name: array.tolist() for name, array in found.items()} == {"n": [7], "x": [1.5]}


def test_packed_elements_come_first() -> None:
    """As in TensorFlow, single values beside ``tensor_content`` are not looked at."""
    message = tensor("DT_INT32", (1,), tensor_content=b"\x05\0\0\0", int_val=[6])
    assert checked(message, "INT32", Dim.fixed(1)).tolist() == [5]


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
def test_what_does_not_fit_is_refused_in_the_words_of_ovms(message: Any, text: str) -> None:
    """Validation is that of every protocol, and its texts name what was expected and what came."""
    with pytest.raises(InvalidRequest) as caught:
        checked(message, "FP32", Dim.fixed(1), Dim.fixed(4))
    assert text in caught.value.message


@pytest.mark.parametrize("datatype", ["FP16", "UINT16"])
def test_types_that_ovms_takes_in_single_values_alone_count_them(datatype: str) -> None:
    """Without any value it is the values that are missing, not the content."""
    message = tensor(BY_DATATYPE[datatype].name, (2,))
    with pytest.raises(InvalidRequest, match=r"Invalid number of values.*Expected: 2 values; Actual: 0 values"):
        checked(message, datatype, ANY_SIZE)


def test_numbers_that_the_type_cannot_hold_are_refused() -> None:
    """Narrow integers travel in a wider field and are not cut."""
    with pytest.raises(InvalidRequest, match=r"300 is out of range of UINT8 \[0, 255\]; input name: x"):
        checked(tensor("DT_UINT8", (1,), int_val=[300]), "UINT8", ANY_SIZE)


def test_a_small_message_does_not_ask_for_a_large_array() -> None:
    """One value for gigabytes of elements is refused instead of repeated."""
    message = tensor("DT_FLOAT", (2**30,), float_val=[1])
    with pytest.raises(InvalidRequest, match="Expected: 1073741824 values; Actual: 1 values"):
        checked(message, "FP32", ANY_SIZE)


def test_model_version_and_filter_are_taken_over() -> None:
    """The version is the text that look-ups take, 0 for none; labels stand for the default version."""
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
def test_what_no_client_means_is_an_invalid_argument(data: Any, text: str) -> None:
    """Broken messages and those that cost more than they weigh are refused with the reason."""
    with pytest.raises(GRPCError) as caught:
        decode(data if isinstance(data, bytes) else data.SerializeToString())
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert text in (caught.value.message or "")


@given(st.binary(max_size=60))
def test_garbage_is_decoded_or_refused(data: bytes) -> None:
    """Whatever comes, the decoder ends with a request or an invalid argument."""
    status = None
    try:
        decode(data)
    except GRPCError as error:
        status = error.status
    assert status in {None, Status.INVALID_ARGUMENT}


def test_an_unknown_number_of_a_type_is_named() -> None:
    """A type newer than the server is told by its number."""
    message = tensor("DT_FLOAT", (1,))
    message.dtype = 99
    with pytest.raises(InvalidRequest, match="Expected: FP32; Actual: DataType 99"):
        checked(message, "FP32", ANY_SIZE)
