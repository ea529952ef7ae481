from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ovmstrio.encoding.messages import REQUEST
from ovmstrio.ops.messages import (
    ChannelData,
    ChannelDataType,
    PipelineRequest,
    PipelineResponse,
    PipelineTensor,
    from_array,
    pack_response,
    request_from_message,
    response_to_message,
    tensor_from_message,
    to_array,
    unpack_request,
)

DTYPES = ("int64", "float32", "int32", "float64", "int16", "float16", "uint16", "uint8", "int8", "bool")


@given(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.arrays(np.dtype(dtype), arrays.array_shapes(min_dims=0, max_dims=3, min_side=0))
    )
)
def test_arrays_of_every_type_survive_a_message(array: np.ndarray[Any, Any]) -> None:
    (sent,) = response_to_message(PipelineResponse(tensors=[from_array("x", array)])).tensors
    came = to_array(tensor_from_message(sent))
    assert (came.dtype, came.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(came, array)


def test_a_request_is_unpacked_by_key_and_tensor_name() -> None:
    tensor = PipelineTensor("t", 0, [3, 1], [0, 1, 3], int64_data=[1, 2, 3])
    text = PipelineTensor("s", 12, [2], str_data=["a", "b"])
    found = unpack_request(PipelineRequest(keys=["k"], values=["v", "surplus"], tensors=[tensor, text]))
    assert (found["k"], found["s"]) == ("v", "ab")
    np.testing.assert_array_equal(found["t"], np.array([[1], [2], [3]]))
    assert (found["t.lod"].dtype, found["t.lod"].tolist()) == (np.int32, [0, 1, 3])
    assert set(found) == {"k", "s", "t", "t.lod"}
    two = unpack_request(PipelineRequest(tensors=[PipelineTensor("t", 0, [2], [0, 1, 1, 2], int64_data=[1, 2])]))[
        "t.lod"
    ]
    assert (two.dtype, two.tolist()) == (np.int32, [[0, 1], [1, 2]])
    assert to_array(PipelineTensor("x", 1, [], float_data=[2.5])).shape == ()


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (PipelineTensor("x", 10, [1]), "elem_type 10"),
        (PipelineTensor("x", 0, [2], int64_data=[1]), r"shape \[2\] has 1 elements in int64_data"),
        (PipelineTensor("x", 7, [1], uint32_data=[300]), "do not fit uint8"),
        (PipelineTensor("x", 0, [-1], int64_data=[1]), "shape"),
        (PipelineTensor("x", 13, byte_data=b"rubbish"), "."),
    ],
    ids=["complex", "elements", "range", "negative", "npy"],
)
def test_wrong_tensors_are_refused(tensor: PipelineTensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        to_array(tensor)


def test_types_that_no_tensor_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="x: dtype complex64 is not supported by tensors"):
        from_array("x", np.zeros(1, np.complex64))


# Messages and answers

TENSOR = PipelineTensor("x", 1, [1, 2], [0, 1], float_data=[0.5, 1.5])


def test_every_field_of_a_message_is_read_and_written() -> None:
    message = REQUEST(key=["a"], value=["1"], name="n", method="m", logid=2**40, clientip="ip")
    message.tensors.add(name="x", elem_type=1, shape=[1, 2], lod=[0, 1], float_data=[0.5, 1.5])
    assert request_from_message(message) == PipelineRequest(["a"], ["1"], [TENSOR], "n", "m", 2**40, "ip")
    answer = response_to_message(PipelineResponse(5, "why", ["a"], ["1"], [TENSOR]))
    assert (answer.err_no, answer.err_msg, list(answer.key), list(answer.value)) == (5, "why", ["a"], ["1"])
    assert [tensor_from_message(one) for one in answer.tensors] == [TENSOR]


@pytest.mark.parametrize(
    "wrong",
    [{"err_no": 2**40}, {"keys": [5]}, {"tensors": [PipelineTensor(shape=[2**70])]}, {"err_msg": b"\xff"}],
)  # fmt: skip
def test_an_answer_that_cannot_be_written_is_8000(wrong: dict[str, Any]) -> None:
    message = response_to_message(PipelineResponse(**wrong))
    assert message.err_no == 8000
    assert message.err_msg.startswith("rpc package error: ")


def test_errors_have_no_output_and_product_codes_come_first() -> None:
    data = ChannelData(datatype=ChannelDataType.ERROR.value, data_id=7, log_id=8, error_code=6000, error_info="late")
    assert (data.id, data.data_id, data.log_id) == (7, 7, 8)
    assert pack_response(data) == PipelineResponse(6000, "late")
    data.prod_error_code, data.prod_error_info = 100001, "product"
    assert pack_response(data) == PipelineResponse(100001, "product")
