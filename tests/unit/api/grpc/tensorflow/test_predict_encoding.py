from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ovmstrio.api.tensorflow.grpc.predict_messages import encode_predict
from ovmstrio.api.tensorflow.tensorflow_types import BY_DATATYPE
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import NotSupported
from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.protocol.descriptors import message_class
from tests.unit.api.grpc.tensorflow.calls import array_of

PACKED = sorted(name for name in BY_DATATYPE if name not in {"BYTES", "UINT64"})


def encode(*outputs: Tensor | RawTensor) -> Any:
    """Encode as the transport does, and read by Google's class."""
    answer = InferResponse("m", "3", list(outputs))
    return message_class("tensorflow.serving.PredictResponse").FromString(encode_predict(answer))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Make a tensor of any type whose elements are packed, contiguous or not."""
    datatype = BY_NAME[draw(st.sampled_from(PACKED))]
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=20))
    array = draw(arrays.arrays(datatype.numpy, shape))
    return Tensor(
        draw(st.text(st.characters(exclude_categories=["Cs"]))), datatype, draw(st.sampled_from([array, array.T]))
    )


@given(st.lists(tensors(), max_size=3, unique_by=lambda each: each.name))
def test_packed_elements_are_those_of_the_servable(outputs: list[Tensor]) -> None:
    """Every output is there with its type, shape and bits, and the model that answered."""
    message = encode(*outputs)
    assert (message.model_spec.name, message.model_spec.version.value) == ("m", 3)
    assert set(message.outputs) == {output.name for output in outputs}
    for output in outputs:
        found = message.outputs[output.name]
        assert found.dtype == BY_DATATYPE[output.datatype.name].number
        read = array_of(found, output.datatype.numpy.str)
        assert (read.shape, read.tobytes()) == (output.shape, output.array.tobytes())


@given(st.lists(st.integers(0, 2**64 - 1), max_size=80))
def test_uint64_is_in_single_values(numbers: list[int]) -> None:
    """``uint64_val`` is where clients look for the id of their sequence."""
    found = encode(Tensor("n", BY_NAME["UINT64"], np.array(numbers, "<u8"))).outputs["n"]
    assert (list(found.uint64_val), found.tensor_content) == (numbers, b"")


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_strings_are_in_single_values(strings: list[bytes]) -> None:
    """``string_val`` has every element."""
    array = np.empty(len(strings), object)
    array[:] = strings
    found = encode(Tensor("s", BY_NAME["BYTES"], array)).outputs["s"]
    assert (found.dtype, list(found.string_val)) == (7, strings)
    assert [dim.size for dim in found.tensor_shape.dim] == [len(strings)]


def test_buffers_of_user_code_are_read_by_their_type() -> None:
    """What a graph's handler made is written as a model's output would be."""
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
        (RawTensor("x", "MY_TYPE", (1,), b"1"), "TensorFlow has no element type MY_TYPE, which the output 'x' has"),
        (RawTensor("x", "BYTES", (1,), b"12345"), "the bytes of the output 'x' are no strings"),
    ],
)
def test_what_tensorflow_has_no_form_for_is_refused(output: RawTensor, text: str) -> None:
    """The text says which output it is, and that KServe can carry it."""
    with pytest.raises(NotSupported, match=text):
        encode(output)
