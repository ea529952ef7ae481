from __future__ import annotations

import array
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import GraphFailure
from ovmstrio.core.request import InferInput, InferRequest, InferResponse
from ovmstrio.core.tensor import RawTensor, Tensor
from ovmstrio.runtimes.graphs.config.graph_config import Port, StreamRef
from ovmstrio.runtimes.graphs.graph_requests import RequestReader
from ovmstrio.runtimes.graphs.packets import ImageFrame, MediaPipeTensor, OvTensor, TfTensor
from ovmstrio.runtimes.graphs.sinks import to_output
from ovmstrio.runtimes.models.buffers import buffer_of
from pyovms import Tensor as PythonTensor

NUMERIC = sorted(set(BY_NAME) - {"BYTES"})


def raw_output(value: Any) -> RawTensor:
    made = to_output("stream", value)
    assert isinstance(made, RawTensor)
    return made


@given(
    st.sampled_from(["OVMS_PY_TENSOR", "OVTENSOR", "TFTENSOR"]),
    st.sampled_from(NUMERIC),
    st.lists(st.integers(0, 3), max_size=4),
    st.randoms(use_true_random=False),
)
def test_tensors_are_the_same_in_request_and_response(tag: str, datatype: str, dims: list[int], random: Any) -> None:
    shape, row = tuple(dims), BY_NAME[datatype]
    data = random.randbytes(math.prod(shape) * row.itemsize)
    if datatype == "BOOL":
        data = bytes(byte & 1 for byte in data)
    request = InferRequest("g", inputs=[InferInput("x", datatype, shape)], raw_inputs=[data])
    ((name, value),) = RequestReader([StreamRef(Port(tag, 0), "x")]).packets(request)
    made = to_output(name, value)
    assert not isinstance(made, InferResponse)
    assert (made.name, tuple(made.shape)) == ("x", shape)
    if isinstance(made, RawTensor):
        assert (made.datatype, bytes(made.data)) == (datatype, data)
    else:
        assert made.datatype is row
        assert bytes(buffer_of(made.array)) == data


@pytest.mark.parametrize("datatype", ["9w", "", "BYTES", "FP32"])
@pytest.mark.parametrize("shape", [(), (-1, 2), (1000,)])
def test_python_tensor_has_its_own_name_datatype_and_shape(datatype: str, shape: tuple[int, ...]) -> None:
    made = raw_output(PythonTensor("mine", b"bytes", shape, datatype))
    assert (made.name, made.datatype, made.shape, bytes(made.data)) == ("mine", datatype, shape, b"bytes")


@pytest.mark.parametrize(
    "source",
    [
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.arange(12, dtype=np.float16)[::-2],
        np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)),
        np.arange(4, dtype=">u4"),
        np.array([1 + 2j]),
        np.array(["text"]),
        np.zeros((2, 0, 3), np.float32),
        np.array(5, np.int64),
        np.broadcast_to(np.float64(1.5), (2, 2)),
    ],
)
def test_arrays_are_written_in_row_major_order(source: np.ndarray[Any, Any]) -> None:
    assert bytes(raw_output(PythonTensor("o", source)).data) == source.tobytes()


@pytest.mark.parametrize("source", [b"abc", bytearray(b"abc"), memoryview(b"abc"), array.array("H", [1, 2])])
def test_any_buffer_is_written(source: Any) -> None:
    assert bytes(raw_output(PythonTensor("o", source)).data) == memoryview(source).tobytes()


def test_writable_array_is_copied() -> None:
    source = np.zeros(4, np.uint8)
    made = raw_output(PythonTensor("o", PythonTensor("inner", source)))
    source[:] = 7
    assert bytes(made.data) == bytes(4)


def test_read_only_array_is_not_copied() -> None:
    source = np.arange(4, dtype=np.uint8)
    source.flags.writeable = False
    made = raw_output(PythonTensor("o", PythonTensor("inner", source)))
    assert np.frombuffer(made.data, np.uint8).ctypes.data == source.ctypes.data


@pytest.mark.parametrize("kind", [OvTensor, MediaPipeTensor, TfTensor, ImageFrame])
def test_other_tensors_have_the_name_of_their_stream(kind: type[OvTensor]) -> None:
    pixels = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    made = to_output("stream", kind(BY_NAME["UINT8"], pixels))
    assert isinstance(made, Tensor)
    assert (made.name, made.datatype.name, made.shape) == ("stream", "UINT8", (1, 2, 3))
    assert made.array is pixels


def test_response_of_a_node_is_copied() -> None:
    packet = InferResponse("m", "7", [Tensor("a", BY_NAME["INT8"], np.zeros(1, np.int8))], "id", {"p": 1})
    made = to_output("stream", packet)
    assert made == packet
    assert isinstance(made, InferResponse)
    made.parameters["q"] = 2
    made.outputs.clear()
    assert packet.parameters == {"p": 1}
    assert len(packet.outputs) == 1


@pytest.mark.parametrize("value", [True, None, "text", [1]])
def test_values_that_are_no_tensors_fail_the_graph(value: Any) -> None:
    with pytest.raises(GraphFailure) as caught:
        to_output("stream", value)
    assert 'output stream "stream"' in caught.value.message
    assert type(value).__name__ in caught.value.message
