from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import BY_NAME, BYTES, Array, RawTensor, Tensor
from ovmstrio.encoding.generated import inference as pb
from ovmstrio.encoding.messages import message_class
from ovmstrio.encoding.raw_contents import WrittenMessage
from ovmstrio.protocols.grpc_codec import Codec
from ovmstrio.protocols.kserve.grpc_messages import StreamInferResponse, encode_response, encode_stream_response
from ovmstrio.util.buffers import PiecedMessage

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


def arrays_of(name: str) -> st.SearchStrategy[Any]:
    datatype = BY_NAME[name]
    elements = st.binary(max_size=300) if datatype is BYTES else None
    arrays = hnp.arrays(datatype.numpy, SHAPES, elements=elements)
    return st.one_of(arrays, arrays.map(np.transpose)).map(lambda array: (datatype, array))


tensors = st.builds(lambda name, pair: Tensor(name, *pair), texts, st.sampled_from(sorted(BY_NAME)).flatmap(arrays_of))
values = st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), texts)
responses = st.builds(
    InferResponse, texts, texts, st.lists(tensors, max_size=3), texts, st.dictionaries(texts, values, max_size=3)
)


def _copied(message: WrittenMessage) -> bytes:
    assert not isinstance(message, PiecedMessage)
    return bytes(message)


def encode(response: InferResponse) -> bytes:
    return _copied(encode_response(response))


def packed(tensor: Tensor) -> bytes:
    if tensor.datatype is BYTES:
        return b"".join(len(element).to_bytes(4, "little") + element for element in tensor.array.ravel())
    return tensor.array.tobytes()


def assert_same(oracle: Any, response: InferResponse) -> None:
    """Compare what Google's class, as tritonclient has it, reads with what was written."""
    written = [tensor for tensor in response.outputs if isinstance(tensor, Tensor)]
    assert len(written) == len(response.outputs)
    assert (oracle.model_name, oracle.model_version, oracle.id) == (
        response.model_name,
        response.model_version,
        response.id,
    )
    choices = {name: message.WhichOneof("parameter_choice") for name, message in oracle.parameters.items()}
    read = {name: getattr(oracle.parameters[name], choice) for name, choice in choices.items()}
    assert read == response.parameters
    assert {name: type(value) for name, value in read.items()} == {
        name: type(value) for name, value in response.parameters.items()
    }
    assert [(output.name, output.datatype, tuple(output.shape)) for output in oracle.outputs] == [
        (tensor.name, tensor.datatype.name, tensor.shape) for tensor in written
    ]
    assert list(oracle.raw_output_contents) == [packed(tensor) for tensor in written]


@settings(deadline=None)
@given(response=responses)
def test_responses_are_written_as_google_reads_them(response: InferResponse) -> None:
    assert_same(ModelInferResponse.FromString(encode(response)), response)


@settings(deadline=None)
@given(response=responses, text=texts)
def test_messages_of_a_stream_hold_an_error_or_a_response(response: InferResponse, text: str) -> None:
    written = encode_stream_response(StreamInferResponse(response=response))
    assert_same(ModelStreamInferResponse.FromString(written).infer_response, response)
    oracle = ModelStreamInferResponse.FromString(encode_stream_response(StreamInferResponse(text)))
    assert (oracle.error_message, oracle.HasField("infer_response")) == (text, False)


def test_responses_of_one_model_keep_their_own_shapes_and_values() -> None:
    for size in (1, 2, 300):
        array = np.full((1, size), size, "<f4")
        response = InferResponse("m", "1", [Tensor("x", BY_NAME["FP32"], array)], id=str(size))
        assert_same(ModelInferResponse.FromString(encode(response)), response)


def test_a_message_of_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="expected a message of ServerLiveResponse, got ServerLiveRequest"):
        Codec().encode(pb.ServerLiveRequest(), pb.ServerLiveResponse)


raw_tensors = st.builds(
    RawTensor,
    texts,
    texts,
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple),
    st.binary(max_size=300).flatmap(lambda data: st.sampled_from([data, bytearray(data), memoryview(data)])),
)
stream_replies = st.builds(
    lambda tensor, name, value: InferResponse("g", "1", [tensor], "", {name: value}),
    raw_tensors,
    texts,
    st.integers(-(2**63), 2**64 - 1),
)


@settings(deadline=None)
@given(response=stream_replies)
def test_raw_tensors_of_a_stream_are_written_as_google_reads_them(response: InferResponse) -> None:
    written = encode_stream_response(StreamInferResponse(response=response))
    oracle = ModelStreamInferResponse.FromString(written).infer_response
    (tensor,) = response.outputs
    (output,) = oracle.outputs
    assert isinstance(tensor, RawTensor)
    assert (output.name, output.datatype, tuple(output.shape)) == (tensor.name, tensor.datatype, tensor.shape)
    assert list(oracle.raw_output_contents) == [bytes(tensor.data)]
    choices = {name: message.WhichOneof("parameter_choice") for name, message in oracle.parameters.items()}
    assert {name: getattr(oracle.parameters[name], choice) for name, choice in choices.items()} == response.parameters
    (value,) = response.parameters.values()
    assert list(choices.values()) == ["int64_param" if int(value) < 2**63 else "uint64_param"]


def test_buffers_of_wider_items_are_written_by_their_bytes() -> None:
    for size in (3, 0):
        data = np.arange(size, dtype="<i8").data
        response = InferResponse("g", "1", [RawTensor("x", "INT64", (size,), data)])
        assert list(ModelInferResponse.FromString(encode(response)).raw_output_contents) == [data.tobytes()]


def _joined(message: PiecedMessage) -> bytes:
    return b"".join([part for pieces in message.pieces for part in pieces])


def test_large_private_outputs_are_written_without_a_copy() -> None:
    arrays: list[Array] = [
        np.arange(400_000, dtype=np.float32).reshape(2, -1),
        np.arange(3, dtype=np.int64),
        np.ones(300_000),
    ]
    names = ("FP32", "INT64", "FP64")
    outputs: list[Tensor | RawTensor] = [
        Tensor(name, BY_NAME[name], array) for name, array in zip(names, arrays, strict=True)
    ]
    shared = InferResponse("m", "1", outputs, "id")
    private = InferResponse("m", "1", outputs, "id", is_private=True)
    message = encode_response(private)
    assert isinstance(message, PiecedMessage)
    assert _joined(message) == encode(shared)
    assert [np.shares_memory(piece, array) for (_, piece), array in zip(message.pieces, arrays[::2], strict=True)] == [
        True,
        True,
    ]
    streamed = encode_stream_response(StreamInferResponse("", private))
    assert isinstance(streamed, PiecedMessage)
    assert _joined(streamed) == _copied(encode_stream_response(StreamInferResponse("", shared)))


def test_other_messages_are_written_as_google_reads_them() -> None:
    tensor = pb.ModelMetadataResponseTensorMetadata("x", "FP32", [1, -1])
    message = pb.ModelMetadataResponse("m", ["1", "2"], "OpenVINO", [tensor], [], {"layout": "NCHW"})
    written = Codec().encode(message, pb.ModelMetadataResponse)
    oracle = message_class("inference.ModelMetadataResponse")
    assert oracle.FromString(written) == oracle(
        name="m",
        versions=["1", "2"],
        platform="OpenVINO",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1, -1]}],
        properties={"layout": "NCHW"},
    )
