from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import FailedPrecondition, InvalidRequest
from ovmstrio.core.request import Contents, InferInput, InferRequest
from ovmstrio.runtimes.graphs.config.graph_config import Port, StreamRef
from ovmstrio.runtimes.graphs.graph_requests import RequestReader, side_packets, timestamp_of
from ovmstrio.runtimes.graphs.timestamps import MAX, MIN
from ovmstrio.runtimes.models.buffers import framed
from pyovms import Tensor

PYTHON = "OVMS_PY_TENSOR"
KNOWN = sorted(set(BY_NAME) - {"BYTES", "BF16"})
NUMERIC = sorted(set(BY_NAME) - {"BYTES"})
HUGE = (2**31, 2**31, 2**31)


def read(tag: str, *requests: InferRequest) -> list[tuple[str, Any]]:
    reader = RequestReader([StreamRef(Port(tag, index), name) for index, name in enumerate("xy")])
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


# Python tensors in raw contents


@given(st.sampled_from(KNOWN), st.lists(st.integers(0, 4), max_size=4), st.randoms(use_true_random=False))
def test_python_tensor_has_the_bytes_of_the_request(datatype: str, dims: list[int], random: Any) -> None:
    shape, row = tuple(dims), BY_NAME[datatype]
    count = math.prod(shape)
    data = random.randbytes(count * row.itemsize) if datatype != "BOOL" else bytes(random.choices([0, 1], k=count))
    tensor = one(PYTHON, raw(datatype, shape, data))
    assert isinstance(tensor, Tensor)
    assert (tensor.name, tensor.datatype, tuple(tensor.shape), tensor.size) == ("x", datatype, shape, len(data))
    array = np.array(tensor)
    assert array.shape == shape
    assert array.dtype == row.numpy
    assert array.tobytes() == data


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


@pytest.mark.parametrize(
    ("invalid", "text"),
    [
        (raw("FP32", (3,), bytes(8)), "Invalid Python tensor buffer size. Actual: 8; Expected: 12"),
        (raw("FP32", (3,), bytes(16)), "Invalid Python tensor buffer size. Actual: 16; Expected: 12"),
        (raw("FP32", (), b""), "Invalid Python tensor buffer size. Actual: 0; Expected: 4"),
        (raw("FP64", HUGE, b"x"), "Provided shape and datatype declare too large buffer."),
        (typed("FP64", HUGE, [1.0]), "Provided shape and datatype declare too large buffer."),
        (typed("FP32", (0,), []), "Input does not have input tensor contents field"),
        (typed("FP32", (2, 0), [1.0]), "Input does not have input tensor contents field"),
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
    assert framed([b"ab", b"", b"c"]) == bytes(tensor)


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


@pytest.mark.parametrize("tag", ["OVTENSOR", "TFTENSOR_a", "input", ""])
@pytest.mark.parametrize("datatype", NUMERIC)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 1)])
def test_arrays_are_views_of_raw_bytes(tag: str, datatype: str, shape: tuple[int, ...]) -> None:
    row = BY_NAME[datatype]
    data = bytes(i % 2 for i in range(math.prod(shape) * row.itemsize))
    value = one(tag.upper(), raw(datatype, shape, data))
    assert value.datatype is row
    assert (value.array.shape, value.array.dtype, value.array.tobytes()) == (shape, row.numpy, data)


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
    reader = RequestReader([StreamRef(Port(PYTHON, index), name) for index, name in enumerate("xy")])
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


def test_parameters_of_other_types_are_refused() -> None:
    parameters: dict[str, Any] = {"a": 0.5, "b": 2**63, "c": 1, "d": None}
    with pytest.raises(InvalidRequest) as caught:
        side_packets(InferRequest("g", parameters=parameters))
    problems = [text.split("; ") for text in caught.value.message.split(". Also: ")]
    assert [parameter for _, parameter in problems] == [
        "parameter 'a' is 0.5",
        f"parameter 'b' is {2**63}",
        "parameter 'd' is None",
    ]
    assert {text for text, _ in problems} == {
        "Functionality not implemented - Handling parameters of other types than: bool, string, int64 is not supported"
    }
