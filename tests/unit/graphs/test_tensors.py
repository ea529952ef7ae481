from __future__ import annotations

import array
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import FailedPrecondition, GraphFailure, InvalidRequest
from ovmstrio.core.request import Contents, InferInput, InferRequest, InferResponse, ParameterValue
from ovmstrio.core.tensor import BY_NAME, RawTensor
from ovmstrio.core.tensor import Tensor as OutputTensor
from ovmstrio.encoding.raw_contents import buffer_of
from ovmstrio.graphs.graph_config import Port, StreamRef
from ovmstrio.graphs.instance import output_of_value
from ovmstrio.graphs.packets import MAX, MIN
from ovmstrio.graphs.requests import GraphRequestParser, side_packets, timestamp_of
from pyovms import Tensor

PYTHON = "OVMS_PY_TENSOR"
KNOWN = sorted(set(BY_NAME) - {"BYTES", "BF16"})
NUMERIC = sorted(set(BY_NAME) - {"BYTES"})
HUGE = (2**31, 2**31, 2**31)


def read(tag: str, *requests: InferRequest) -> list[tuple[str, Any]]:
    reader = GraphRequestParser([StreamRef(Port(tag, index), name) for index, name in enumerate("xy")])
    return [packet for request in requests for packet in reader.packets(request)]


def one(tag: str, request: InferRequest) -> Any:
    ((_, value),) = read(tag, request)
    return value


def raw(datatype: str, shape: tuple[int, ...], data: bytes | memoryview, name: str = "x") -> InferRequest:
    return InferRequest("g", inputs=[InferInput(name, datatype, shape)], raw_inputs=[data])


def typed(datatype: str, shape: tuple[int, ...], values: list[Any], field: str = "") -> InferRequest:
    field = field or (BY_NAME[datatype].contents_field if datatype in BY_NAME else "")
    contents = Contents(field, values) if field else None
    return InferRequest("g", inputs=[InferInput("x", datatype, shape, contents)])


# Both directions


@given(
    st.sampled_from([PYTHON, "OVTENSOR", "TFTENSOR_A", "INPUT", ""]),
    st.sampled_from(NUMERIC),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.randoms(use_true_random=False),
)
def test_tensors_are_the_same_in_request_node_and_response(
    tag: str, datatype: str, shape: tuple[int, ...], random: Any
) -> None:
    row, count = BY_NAME[datatype], math.prod(shape)
    data = random.randbytes(count * row.itemsize) if datatype != "BOOL" else bytes(random.choices([0, 1], k=count))
    value = one(tag, raw(datatype, shape, data))
    output = output_of_value("x", value)
    assert not isinstance(output, InferResponse)
    if tag == PYTHON:
        assert (value.name, value.datatype, tuple(value.shape), value.size) == ("x", datatype, shape, len(data))
        values = np.array(value) if datatype != "BF16" else np.frombuffer(value, row.numpy).reshape(shape)
        assert isinstance(output, RawTensor)
        assert (output.datatype, bytes(output.data)) == (datatype, data)
    else:
        values = value.array
        assert isinstance(output, OutputTensor)
        assert value.datatype is output.datatype is row
        assert bytes(buffer_of(output.array)) == data
    assert (values.shape, values.dtype, values.tobytes()) == (shape, row.numpy, data)
    assert (output.name, tuple(output.shape)) == ("x", shape)


# Python tensors in raw contents


def test_raw_bytes_are_not_copied() -> None:
    data = bytes(range(16))
    tensor = one(PYTHON, raw("UINT8", (16,), memoryview(data)))
    assert np.frombuffer(tensor.data, np.uint8).ctypes.data == np.frombuffer(data, np.uint8).ctypes.data


@pytest.mark.parametrize("datatype", ["BYTES", "my_string", "BF16", ""])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (99, 99), HUGE])
def test_custom_datatype_and_shape_are_not_checked(datatype: str, shape: tuple[int, ...]) -> None:
    tensor = one(PYTHON, raw(datatype, shape, b"seven b"))
    assert (tensor.datatype, tuple(tensor.shape), tensor.data.shape) == (datatype, shape, (7,))
    assert bytes(tensor) == b"seven b"


@pytest.mark.parametrize(("datatype", "shape"), [("INT64", (0,)), ("FP32", (2, 0, 3)), ("BOOL", (0,)), ("BYTES", (0,))])
def test_a_tensor_without_elements_is_the_same_in_every_form(datatype: str, shape: tuple[int, ...]) -> None:
    for request in (typed(datatype, shape, []), raw(datatype, shape, b"")):
        tensor = one(PYTHON, request)
        assert (tensor.datatype, tuple(tensor.shape), bytes(tensor)) == (datatype, shape, b"")
    if datatype != "BYTES":
        with pytest.raises(InvalidRequest, match="Expected: 0 values; Actual: 1 values"):
            one(PYTHON, typed(datatype, shape, [True if datatype == "BOOL" else 1]))


@pytest.mark.parametrize(
    ("invalid", "text"),
    [
        (raw("FP32", (3,), bytes(8)), "Invalid Python tensor buffer size. Actual: 8; Expected: 12"),
        (raw("FP32", (3,), bytes(16)), "Invalid Python tensor buffer size. Actual: 16; Expected: 12"),
        (raw("FP32", (), b""), "Invalid Python tensor buffer size. Actual: 0; Expected: 4"),
        (raw("FP64", HUGE, b"x"), "Provided shape and datatype declare too large buffer."),
        (typed("FP64", HUGE, [1.0]), "Provided shape and datatype declare too large buffer."),
        (typed("BYTES", (1,), []), "Input does not have input tensor contents field"),
    ],
)
def test_python_tensors_of_wrong_size_are_refused(invalid: InferRequest, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        one(PYTHON, invalid)
    assert caught.value.message.startswith(f"Invalid content size of tensor proto - {text}")
    assert "input name: x" in caught.value.message


@pytest.mark.parametrize("tag", [PYTHON, "OVTENSOR", "TENSOR", "TFTENSOR", ""])
@pytest.mark.parametrize("datatype", ["FP32", "INT8"])
def test_negative_dimensions_are_refused(tag: str, datatype: str) -> None:
    for request in (raw(datatype, (2, -1), b""), typed(datatype, (2, -1), [])):
        with pytest.raises(InvalidRequest, match=r"^Invalid input shape - Negative .*\(2,-1\); input name: x$"):
            one(tag, request)


# Typed contents


@pytest.mark.parametrize("tag", [PYTHON, "OVTENSOR1", "TFTENSOR", "ANYTHING", ""])
@pytest.mark.parametrize("datatype", sorted(set(KNOWN) - {"FP16"}))
def test_typed_contents_become_arrays(tag: str, datatype: str) -> None:
    values = [True, False] if datatype == "BOOL" else [1, 2]
    value = one(tag, typed(datatype, (1, 2), values))
    array = np.array(value) if tag == PYTHON else value.array
    assert array.dtype == BY_NAME[datatype].numpy
    assert array.tolist() == [values]


def test_typed_strings_are_framed() -> None:
    tensor = one(PYTHON, typed("BYTES", (7,), [b"ab", b"", b"c"]))
    assert bytes(tensor) == struct.pack("<I2sII1s", 2, b"ab", 0, 1, b"c")
    assert (tensor.datatype, tuple(tensor.shape)) == ("BYTES", (7,))


@pytest.mark.parametrize("tag", [PYTHON, "OVTENSOR", "TFTENSOR", "TENSOR"])
@pytest.mark.parametrize(
    "invalid",
    [
        typed("FP32", (3,), [1.0]),
        typed("FP32", (3,), [1] * 3, "int_contents"),
        typed("FP16", (3,), [1] * 3, "int_contents"),
    ],
)
def test_wrong_number_of_values_is_refused(tag: str, invalid: InferRequest) -> None:
    with pytest.raises(InvalidRequest, match=r"^Invalid number of values in tensor proto container - Expected: 3 val"):
        one(tag, invalid)


@pytest.mark.parametrize("datatype", ["BF16", "mine", ""])
def test_custom_datatypes_need_raw_contents(datatype: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        one(PYTHON, typed(datatype, (1,), [1], "int_contents"))
    assert caught.value.message.startswith(
        "Invalid input precision - Provided datatype is invalid, custom datatypes are allowed only when "
        "raw_input_contents is used."
    )


# Arrays and images


def test_unaligned_bytes_are_copied() -> None:
    data = memoryview(b"x" + np.arange(3, dtype=np.int64).tobytes())[1:]
    array = one("OVTENSOR", raw("INT64", (3,), data)).array
    assert array.flags.aligned
    assert array.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("tag", "invalid", "text"),
    [
        ("OVTENSOR", raw("FP32", (2,), b"x"), "Invalid content size of tensor proto - Expected: 8 bytes; Actual: 1 by"),
        ("OVTENSOR", raw("BYTES", (2,), b"x"), "Invalid input precision - Expected: BF16, BOOL, "),
        ("OVTENSOR", raw("FP32", HUGE, b"x"), "Invalid content size of tensor proto - Provided shape and datatype"),
        ("TENSOR", raw("FP64", (1,), bytes(8)), "Invalid input precision - Expected: BOOL, FP16, FP32, INT32, INT8, U"),
        ("TENSOR", raw("INT8", (2, 0), b""), "Invalid input shape - Negative or zero dimension size is not accepta"),
        ("IMAGE", raw("UINT8", (2, 2), bytes(4)), "Invalid input shape - Expected: (height,width,channels)"),
        ("IMAGE", raw("UINT8", (2, 0, 3), b""), "Invalid input shape - Negative or zero dimension"),
        ("IMAGE", raw("UINT8", (2, -2, 3), b""), "Invalid input shape - Negative or zero dimension"),
        ("IMAGE", raw("FP64", (1, 1, 1), bytes(8)), "Inputs inside buffer does not match expected format. - Expected"),
        ("IMAGE", raw("FP32", (1, 1, 3), bytes(12)), "Inputs inside buffer does not match expected format. - Expected"),
        ("IMAGE", raw("UINT8", (1, 1, 2), bytes(2)), "Inputs inside buffer does not match expected format. - Expected"),
        (
            "IMAGE",
            raw("UINT16", (1, 2, 3), bytes(6)),
            "Invalid content size of tensor proto - Invalid Mediapipe Image input buffer size. Actual: 6; Expected: 12",
        ),
        ("IMAGE", raw("UINT8", (2**40, 2**40, 3), b""), "Invalid content size of tensor proto - Provided shape"),
        ("IMAGE", typed("UINT8", (1, 1, 1), [1]), "Mediapipe execution failed. MP status - images must be in raw"),
    ],
)
def test_invalid_arrays_and_images_are_refused(tag: str, invalid: InferRequest, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        one(tag, invalid)
    assert caught.value.message.startswith(text)
    assert caught.value.message.endswith("input name: x")


@pytest.mark.parametrize(
    ("datatype", "channels", "becomes"),
    [
        *[(name, channels, "UINT8") for name in ("UINT8", "INT8") for channels in (1, 3, 4)],
        *[(name, channels, "UINT16") for name in ("UINT16", "INT16", "FP16") for channels in (1, 3, 4)],
        *[("FP32", channels, "FP32") for channels in (1, 2, 4)],
    ],
)
def test_images_have_a_pixel_format(datatype: str, channels: int, becomes: str) -> None:
    data = bytes(range(2 * channels * BY_NAME[datatype].itemsize))
    image = one("IMAGE", raw(datatype, (1, 2, channels), data))
    assert image.datatype is BY_NAME[becomes]
    assert (image.array.shape, image.array.tobytes()) == ((1, 2, channels), data)


# The request as a whole


def test_request_tag_passes_the_request() -> None:
    request = raw("anything", (-5,), b"")
    assert one("REQUEST", request) is request


def test_inputs_before_an_invalid_one_are_read() -> None:
    request = InferRequest(
        "g",
        inputs=[InferInput("y", "INT8", (1,)), InferInput("x", "INT8", (1,)), InferInput("z", "INT8", (1,))],
        raw_inputs=[b"1", b"2", b"3"],
    )
    reader = GraphRequestParser([StreamRef(Port(PYTHON, index), name) for index, name in enumerate("xy")])
    packets = reader.packets(request)
    seen = [next(packets), next(packets)]
    with pytest.raises(InvalidRequest, match=r"^Unexpected input - z is unexpected$"):
        next(packets)
    assert [(name, bytes(tensor)) for name, tensor in seen] == [("y", b"1"), ("x", b"2")]


@pytest.mark.parametrize(
    ("raws", "contents", "text"),
    [
        ([b"1"], None, "Size of raw_input_contents: 1 is different than number of inputs: 2"),
        ([b"1"] * 3, None, "Size of raw_input_contents: 3 is different than number of inputs: 2"),
        ([b"1"] * 2, Contents("int_contents", [1]), "input name: y"),
    ],
)
def test_raw_contents_of_every_input_or_none(raws: list[Any], contents: Any, text: str) -> None:
    request = InferRequest(
        "g",
        inputs=[InferInput("x", "INT8", (1,)), InferInput("y", "INT8", (1,), contents)],
        raw_inputs=raws,
    )
    with pytest.raises(InvalidRequest) as caught:
        read(PYTHON, request)
    assert caught.value.message == (
        f"Passing data both in InferInputTensor::contents and in raw_input_contents is not allowed - {text}"
    )


def test_request_without_inputs_has_no_packets() -> None:
    assert read(PYTHON, InferRequest("g")) == []


# Parameters


@pytest.mark.parametrize(
    ("parameters", "timestamp"),
    [*(({"OVMS_MP_TIMESTAMP": value}, value) for value in (0, -5, MIN, MAX)), ({"other": 1}, None)],
)
def test_timestamp_of_the_request(parameters: dict[str, Any], timestamp: int | None) -> None:
    assert timestamp_of(InferRequest("g", parameters=parameters)) == timestamp


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[
            (value, "Invalid timestamp format in request parameter OVMS_MP_TIMESTAMP. Should be int64")
            for value in ("5", 5.0, True, 2**63, -(2**63) - 1)
        ],
        (-(2**63), "Timestamp::Unset()"),
        (-(2**63) + 1, "Timestamp::Unstarted()"),
        (-(2**63) + 2, "Timestamp::PreStream()"),
        (2**63 - 3, "Timestamp::PostStream()"),
        (2**63 - 2, "Timestamp::OneOverPostStream()"),
        (2**63 - 1, "Timestamp::Done()"),
    ],
)
def test_invalid_timestamps_are_refused(value: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        timestamp_of(InferRequest("g", parameters={"OVMS_MP_TIMESTAMP": value}))
    assert caught.value.message == f"Malformed packet timestamp - {text}"


def test_parameters_become_side_packets() -> None:
    parameters: dict[str, Any] = {"s": "x", "i": -(2**63), "b": True, "OVMS_MP_TIMESTAMP": 1, "llm": "mine"}
    packets = side_packets(InferRequest("g", parameters=parameters))
    assert packets == {"s": "x", "i": -(2**63), "b": True}
    assert packets["b"] is True


def test_reserved_parameter_is_refused() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        side_packets(InferRequest("g", parameters={"py": "x"}))
    assert caught.value.message == (
        "Failed to initialize mediapipe graph - Incoming input side packet: py is special reserved name and cannot be "
        "used"
    )


def test_all_invalid_inputs_are_reported_together() -> None:
    request = InferRequest(
        "g",
        inputs=[InferInput("z", "INT8", (1,)), InferInput("x", "INT8", (2,)), InferInput("y", "INT8", (1,))],
        raw_inputs=[b"1", b"2", b"3"],
    )
    with pytest.raises(InvalidRequest) as caught:
        read(PYTHON, request)
    unexpected, size = caught.value.message.split(". Also: ")
    assert unexpected == "Unexpected input - z is unexpected"
    assert size.startswith("Invalid content size of tensor proto - Invalid Python tensor buffer size.")


@pytest.mark.parametrize("datatype", ["mine", "BF16"])
def test_negative_dimensions_of_custom_datatypes_are_refused(datatype: str) -> None:
    with pytest.raises(InvalidRequest, match="Negative dimension size is not acceptable"):
        one(PYTHON, raw(datatype, (-1,), b"abc"))


def test_parameters_of_every_type_become_side_packets() -> None:
    parameters: dict[str, ParameterValue] = {"a": 0.5, "b": 2**63, "c": 1, "d": "text", "e": True}
    assert side_packets(InferRequest("g", parameters={**parameters, "OVMS_MP_TIMESTAMP": 3, "llm": 1})) == parameters


# Responses


def raw_output(value: Any) -> RawTensor:
    made = output_of_value("stream", value)
    assert isinstance(made, RawTensor)
    return made


@pytest.mark.parametrize("datatype", ["9w", "", "BYTES", "FP32"])
@pytest.mark.parametrize("shape", [(), (-1, 2), (1000,)])
def test_python_tensor_has_its_own_name_datatype_and_shape(datatype: str, shape: tuple[int, ...]) -> None:
    made = raw_output(Tensor("mine", b"bytes", shape, datatype))
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
    assert bytes(raw_output(Tensor("o", source)).data) == source.tobytes()


@pytest.mark.parametrize("source", [b"abc", bytearray(b"abc"), memoryview(b"abc"), array.array("H", [1, 2])])
def test_any_buffer_is_written(source: Any) -> None:
    assert bytes(raw_output(Tensor("o", source)).data) == memoryview(source).tobytes()


def test_writable_array_is_copied() -> None:
    source = np.zeros(4, np.uint8)
    made = raw_output(Tensor("o", Tensor("inner", source)))
    source[:] = 7
    assert bytes(made.data) == bytes(4)


def test_read_only_array_is_not_copied() -> None:
    source = np.arange(4, dtype=np.uint8)
    source.flags.writeable = False
    made = raw_output(Tensor("o", Tensor("inner", source)))
    assert np.frombuffer(made.data, np.uint8).ctypes.data == source.ctypes.data


def test_response_of_a_node_is_copied() -> None:
    packet = InferResponse("m", "7", [OutputTensor("a", BY_NAME["INT8"], np.zeros(1, np.int8))], "id", {"p": 1})
    made = output_of_value("stream", packet)
    assert made == packet
    assert isinstance(made, InferResponse)
    made.parameters["q"] = 2
    made.outputs.clear()
    assert packet.parameters == {"p": 1}
    assert len(packet.outputs) == 1


@pytest.mark.parametrize("value", [True, None, "text", [1]])
def test_values_that_are_no_tensors_fail_the_graph(value: Any) -> None:
    with pytest.raises(GraphFailure) as caught:
        output_of_value("stream", value)
    assert 'output stream "stream"' in caught.value.message
    assert type(value).__name__ in caught.value.message
