from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc.service_pb2 import ModelInferRequest

from ovmstrio.api.grpc_codec import Codec
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.request import InferRequest
from tests.unit.api.grpc.wire_samples import mutations, request_fields

LARGE = b"\x3a\xc0\xb8\x02" + b"\x3a" * 40_000
"""A field of raw contents that makes any message a large one."""

GROUP_WIRE_TYPES = {3, 4}

messages = request_fields.map(lambda fields: ModelInferRequest(**fields).SerializeToString())


def decode(data: bytes) -> InferRequest:
    """Decode as the transport does."""
    request: InferRequest = Codec().decode(data, InferRequest)
    return request


def outcome(data: bytes) -> InferRequest | GRPCError:
    """Give what bytes are decoded to, or the error with which they are refused."""
    try:
        return decode(data)
    except GRPCError as error:
        return error


def refusal(data: bytes) -> str:
    """Give the text with which bytes are refused as an invalid argument."""
    error = outcome(data)
    assert isinstance(error, GRPCError)
    assert error.status is Status.INVALID_ARGUMENT
    return error.message or ""


def parameters(messages: Any) -> dict[str, Any]:
    """Read parameters by Google's class."""
    choices = {name: message.WhichOneof("parameter_choice") for name, message in messages.items()}
    return {name: getattr(messages[name], choice) for name, choice in choices.items() if choice}


def shown(values: dict[str, Any]) -> dict[str, str]:
    """Make values comparable, NaN included."""
    return {name: repr(value) for name, value in values.items()}


def assert_same(request: InferRequest, oracle: Any) -> None:
    """Compare every field with what Google's own class, as tritonclient has it, reads."""
    assert (request.model_name, request.model_version, request.id) == (
        oracle.model_name,
        oracle.model_version,
        oracle.id,
    )
    assert shown(request.parameters) == shown(parameters(oracle.parameters))
    assert [(output.name, shown(output.parameters)) for output in request.outputs] == [
        (output.name, shown(parameters(output.parameters))) for output in oracle.outputs
    ]
    assert [bytes(raw or b"") for raw in request.raw_inputs] == list(oracle.raw_input_contents)
    assert len(request.inputs) == len(oracle.inputs)
    for ours, theirs in zip(request.inputs, oracle.inputs, strict=True):
        assert (ours.name, ours.datatype, ours.shape) == (theirs.name, theirs.datatype, tuple(theirs.shape))
        assert shown(ours.parameters) == shown(parameters(theirs.parameters))
        assert (ours.contents is not None) == bool(theirs.contents.ListFields())
        if ours.contents is not None:
            expected = list(getattr(theirs.contents, ours.contents.field)) if ours.contents.field else []
            np.testing.assert_array_equal(list(ours.contents.values), expected)


@settings(deadline=None)
@given(fields=request_fields)
def test_every_field_is_read_as_google_reads_it(fields: dict[str, Any]) -> None:
    """What tritonclient's message class writes arrives with every value, in small and in large messages."""
    message = ModelInferRequest(**fields)

    assert_same(decode(message.SerializeToString()), message)


@settings(deadline=None)
@given(data=st.one_of(st.binary(max_size=200), mutations(messages), mutations(messages).map(lambda data: data + LARGE)))
@example(b"\x0a\x01\xff")  # not UTF-8
@example(b"\x0a\x05ab")  # cut off
@example(b"\x3b\x3c")  # a group
@example(b"\x00\x00")  # field number 0
@example(b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" + LARGE)  # a negative length
@example(b"\xff" * 12 + LARGE)  # a tag without end
@example(b"\x2a\x02\x1a\x7f" + LARGE)  # a packed shape longer than its input
def test_no_bytes_do_worse_than_invalid_argument(data: bytes) -> None:
    """Garbage and mutilated messages are refused, or mean exactly what Google's parser makes of them."""
    result = outcome(data)
    if isinstance(result, InferRequest):
        assert_same(result, ModelInferRequest.FromString(data))
    else:
        assert "inference.ModelInferRequest" in refusal(data)


@settings(deadline=None)
@given(data=st.one_of(st.binary(max_size=200), mutations(messages)))
def test_what_google_accepts_is_accepted(data: bytes) -> None:
    """Nothing is refused that a client could rightly send; groups, which no message here has, may be."""
    try:
        ModelInferRequest.FromString(data)
    except DecodeError:
        return
    assert isinstance(outcome(data), InferRequest) or any(octet & 7 in GROUP_WIRE_TYPES for octet in data[32_768:])


@pytest.mark.parametrize("padding", [b"", LARGE])
def test_unknown_fields_and_wrong_wire_types_are_passed_over(padding: bytes) -> None:
    """Fields of a newer protocol, and fields of a known number with another wire type, change nothing."""
    message = ModelInferRequest(model_name="m", raw_input_contents=[b"abc"]).SerializeToString()
    strange = b"\xf8\x7f\x01" + b"\x38\x05" + b"\x3d\x00\x00\x00\x00" + b"\x39" + bytes(8)

    request = decode(strange + message + strange + padding)

    assert (request.model_name, request.raw_inputs[0]) == ("m", b"abc")
    assert len(request.raw_inputs) == (2 if padding else 1)


def test_tensors_of_a_large_message_are_views_of_it() -> None:
    """Raw contents from 32 KiB on are not copied."""
    raw = np.arange(20_000, dtype="<f4")
    data = ModelInferRequest(model_name="m", raw_input_contents=[raw.tobytes(), b"", b"x"]).SerializeToString()

    request = decode(data)

    assert all(isinstance(view, memoryview) and view.obj is data for view in request.raw_inputs)
    assert np.shares_memory(np.frombuffer(request.raw_inputs[0] or b"", "u1"), np.frombuffer(data, "u1"))
    assert [bytes(view or b"") for view in request.raw_inputs] == [raw.tobytes(), b"", b"x"]


@pytest.mark.parametrize("datatype", sorted(BY_NAME))
def test_the_field_that_fits_the_datatype_wins(datatype: str) -> None:
    """Of several filled fields the one that the datatype calls for is taken."""
    fitting = BY_NAME[datatype].contents_field
    filled = {"bool_contents": [True], "fp64_contents": [0.5], "bytes_contents": [b"x"], fitting: [1, 0]}
    if datatype == "BYTES":
        filled["bytes_contents"] = [b"1", b"0"]
    message = ModelInferRequest(inputs=[{"datatype": datatype, "contents": filled}])

    contents = decode(message.SerializeToString()).inputs[0].contents

    assert contents is not None
    assert (contents.field, len(contents.values)) == (fitting, 2)


def test_without_a_fitting_field_the_first_filled_one_is_kept() -> None:
    """Validation can name what came instead of what the datatype calls for."""
    filled = {"uint64_contents": [7], "fp64_contents": [0.5]}
    message = ModelInferRequest(inputs=[{"datatype": "FP16", "contents": filled}, {"datatype": "FP32", "contents": {}}])

    wrong, nothing = (tensor.contents for tensor in decode(message.SerializeToString()).inputs)

    assert wrong is not None
    assert (wrong.field, list(wrong.values)) == ("uint64_contents", [7])
    assert nothing is None


def test_many_values_keep_their_bits() -> None:
    """Long lists of floats become arrays without a change, NaN's payload included, whatever else is filled."""
    values = np.arange(5_000, dtype="<f4")
    values[7:9] = np.array([0x7FC00123, 0x80000000], "<u4").view("<f4")
    contents = {"fp32_contents": values, "fp64_contents": [1.5]}
    message = ModelInferRequest(inputs=[{"datatype": "FP32", "shape": [5_000], "contents": contents}])
    message.inputs[0].contents.MergeFromString(b"\xf8\x7f\x01")  # a field of a newer protocol

    decoded = decode(message.SerializeToString()).inputs[0].contents

    assert decoded is not None
    assert isinstance(decoded.values, np.ndarray)
    np.testing.assert_array_equal(decoded.values.view("<u4"), values.view("<u4"))


@pytest.mark.parametrize("entry", [b"\x2a\x00", b"\x3a\x00", b"\xf8\x7f\x00"])
def test_a_flood_of_fields_is_refused(entry: bytes) -> None:
    """A message of nothing but tiny fields, each of which would become an object, is refused."""
    assert "at most 16384 fields" in refusal(entry * 40_000)


def test_a_flood_of_dimensions_or_parameters_is_refused() -> None:
    """A shape or a set of parameters beyond any use is refused with the number that came."""
    dimensions = ModelInferRequest(inputs=[{"shape": [1] * 50_000}]).SerializeToString()
    entries = ModelInferRequest(parameters={str(n): {"bool_param": True} for n in range(2_000)}).SerializeToString()

    assert "at most 1024 dimensions, got 50000" in refusal(dimensions)
    assert "at most 1024 parameters, got 2000" in refusal(entries)
