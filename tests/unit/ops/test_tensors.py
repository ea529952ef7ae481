from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ovmstrio.protocol.pipeline_messages import REQUEST
from ovmstrio.runtimes.ops.messages import from_message, tensor_from_message, to_message
from ovmstrio.runtimes.ops.tensors import from_array, to_array, unpack
from ovmstrio.runtimes.ops.values import PipelineRequest, PipelineResponse, PipelineTensor

DTYPES = ("int64", "float32", "int32", "float64", "int16", "float16", "uint16", "uint8", "int8", "bool")


@given(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.arrays(np.dtype(dtype), arrays.array_shapes(min_dims=0, max_dims=3, min_side=0))
    )
)
def test_arrays_of_every_type_travel_unchanged(array: np.ndarray[Any, Any]) -> None:
    """An array that goes through a message is the same at its end: type, shape and elements."""
    (sent,) = to_message(PipelineResponse(tensors=[from_array("x", array)])).tensors
    came = to_array(tensor_from_message(sent))
    assert (came.dtype, came.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(came, array)


def test_requests_become_a_dictionary() -> None:
    """Values are texts by key, tensors arrays by name, offsets stand beside them, and surplus values are left out."""
    tensor = PipelineTensor("t", 0, [3, 1], [0, 1, 3], int64_data=[1, 2, 3])
    text = PipelineTensor("s", 12, [2], str_data=["a", "b"])
    found = unpack(PipelineRequest(keys=["k"], values=["v", "surplus"], tensors=[tensor, text]))
    assert (found["k"], found["s"]) == ("v", "ab")
    np.testing.assert_array_equal(found["t"], np.array([[1], [2], [3]]))
    assert (found["t.lod"].dtype, found["t.lod"].tolist()) == (np.int32, [0, 1, 3])
    assert set(found) == {"k", "s", "t", "t.lod"}
    two = unpack(PipelineRequest(tensors=[PipelineTensor("t", 0, [2], [0, 1, 1, 2], int64_data=[1, 2])]))["t.lod"]
    assert (two.dtype, two.tolist()) == (np.int32, [[0, 1], [1, 2]])
    assert to_array(PipelineTensor("x", 1, [], float_data=[2.5])).shape == ()


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (PipelineTensor("x", 10, [1]), "elem_type 10"),
        (PipelineTensor("x", 0, [2], int64_data=[1]), r"shape \[2\] has 1 elements in int64_data"),
        (PipelineTensor("x", 7, [1], uint32_data=[300]), "no uint8"),
        (PipelineTensor("x", 0, [-1], int64_data=[1]), "shape"),
        (PipelineTensor("x", 13, byte_data=b"rubbish"), "."),
    ],
    ids=["complex", "elements", "range", "negative", "npy"],
)
def test_tensors_that_are_not_what_they_say(tensor: PipelineTensor, text: str) -> None:
    """A type that is not known, and elements that do not fit, are refused."""
    with pytest.raises(ValueError, match=text):
        to_array(tensor)


def test_fewer_values_than_keys() -> None:
    """A key without a value is refused."""
    with pytest.raises(ValueError, match="2 keys, but only 1 values"):
        unpack(PipelineRequest(keys=["a", "b"], values=["1"]))


class _Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("the payload was executed",))


def test_pickles_are_not_read() -> None:
    """An array file that would run code is refused and not run."""
    file = io.BytesIO()
    np.save(file, np.array([_Bomb()], object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        to_array(PipelineTensor("x", 13, byte_data=file.getvalue()))


def test_what_no_tensor_can_hold() -> None:
    """An array of a type that the wire has not is refused with its name."""
    with pytest.raises(ValueError, match="no tensor can hold x, whose type is complex64"):
        from_array("x", np.zeros(1, np.complex64))


def test_messages_become_values_and_back() -> None:
    """Every field of a request is read, and an answer that cannot be packed becomes error 8000."""
    message = REQUEST(key=["a"], value=["1"], name="n", method="m", logid=7, clientip="ip")
    assert from_message(message) == PipelineRequest(["a"], ["1"], [], "n", "m", 7, "ip")
    assert to_message(PipelineResponse(err_no=2**40)).err_no == 8000
