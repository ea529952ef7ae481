from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest

from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest, ModelFailure, NotReady, Overloaded, ServerError
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.tensor import Tensor
from ovmstrio.ops.messages import (
    ArrayTensor,
    ChannelData,
    ChannelDataType,
    PipelineRequest,
    PipelineResponse,
    from_array,
    pack_response,
    unpack_request,
)
from ovmstrio.ops.op_service import OpService
from ovmstrio.ops.settings import PipelineSettings


class _Pipeline:
    """Pipeline that records requests, and returns one response."""

    def __init__(self, response: PipelineResponse | None = None) -> None:
        self.response = response or PipelineResponse()
        self.requests: list[PipelineRequest] = []
        self.service = OpService("uci", self, None, PipelineSettings())

    async def infer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        self.requests.append(request)
        return self.response

    def unready_reason(self) -> str:
        return ""

    def close(self) -> None:
        pass


def _request(*inputs: tuple[InferInput, bytes], **parameters: Any) -> InferRequest:
    return InferRequest(
        model_name="uci",
        inputs=[tensor for tensor, _ in inputs],
        raw_inputs=[raw for _, raw in inputs],
        parameters=parameters,
        deadline=math.inf,
    )


def _text(name: str, *values: bytes) -> tuple[InferInput, bytes]:
    return InferInput(name, "BYTES", (len(values),)), b"".join(len(one).to_bytes(4, "little") + one for one in values)


async def test_one_text_is_a_key_and_other_inputs_are_tensors() -> None:
    pipeline = _Pipeline()
    array = np.array([[1, 2]], np.float16)
    tensor = InferInput("t", "FP16", (1, 2)), array.tobytes()
    await pipeline.service.infer(_request(_text("k", b"v"), _text("s", b"a", b"b"), tensor, log_id=7))
    (request,) = pipeline.requests
    assert (request.keys, request.values, request.name, request.logid) == (["k"], ["v"], "uci", 7)
    found = unpack_request(request)
    assert found["s"] == "ab"
    assert found["t"].dtype == np.float16
    np.testing.assert_array_equal(found["t"], array)


async def test_answers_are_tensors_with_their_offsets() -> None:
    tensor = from_array("t", np.array([[1], [2]], np.int64), [0, 2])
    pipeline = _Pipeline(PipelineResponse(keys=["k"], values=["v"], tensors=[tensor]))
    response = await pipeline.service.infer(_request())
    outputs = [(each.name, np.asarray(each.array).tolist()) for each in response.outputs if isinstance(each, Tensor)]
    assert outputs == [("k", [b"v"]), ("t", [[1], [2]]), ("t.lod", [0, 2])]


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (PipelineResponse(5000, "why"), InvalidRequest),
        (PipelineResponse(8000, "why"), InvalidRequest),
        (PipelineResponse(6000, "why"), DeadlineExceeded),
        (PipelineResponse(3001, "why"), NotReady),
        (PipelineResponse(10000, "why"), ModelFailure),
        (PipelineResponse(100001, "why"), ModelFailure),
        (PipelineResponse(3000, "why", is_overload=True), Overloaded),
    ],
    ids=["input", "package", "timeout", "closed", "unknown", "product", "overload"],
)
async def test_error_codes_become_errors(response: PipelineResponse, error: type[ServerError]) -> None:
    with pytest.raises(error, match="why"):
        await _Pipeline(response).service.infer(_request())


@pytest.mark.parametrize(
    ("inputs", "messages"),
    [
        ([(InferInput("x", "FP32", (2,)), b"1234")], ["expected 8 bytes"]),
        ([(InferInput("x", "NOPE", (1,)), b"")], ["expected one of"]),
        ([(InferInput("x", "FP32", (-1,)), b"")], ["sizes of at least 0"]),
        ([(InferInput("x", "BYTES", (2,)), b"\x01\x00\x00\x00a")], ["expected 2 elements"]),
        ([_text("x", b"\xff")], ["not UTF-8"]),
        (
            [(InferInput("a", "FP32", (2,)), b"four"), _text("good", b"1"), (InferInput("b", "FP8", (1,)), b"1")],
            ["input a: expected 8 bytes for ", "input b: expected one of "],
        ),
    ],
    ids=["bytes", "type", "shape", "elements", "encoding", "several"],
)
async def test_wrong_inputs_are_all_reported(inputs: list[tuple[InferInput, bytes]], messages: list[str]) -> None:
    pipeline = _Pipeline()
    with pytest.raises(InvalidRequest) as caught:
        await pipeline.service.infer(_request(*inputs))
    reported = caught.value.message.split(". Also: ")
    assert len(reported) == len(messages)
    assert all(message in text for message, text in zip(messages, reported, strict=True))
    assert pipeline.requests == []


async def test_arrays_are_not_copied_until_they_are_unpacked() -> None:
    pipeline = _Pipeline()
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    raw = array.tobytes()
    await pipeline.service.infer(_request((InferInput("x", "FP32", (2, 3)), raw)))
    (request,) = pipeline.requests
    (tensor,) = request.tensors
    assert isinstance(tensor, ArrayTensor)
    assert np.shares_memory(tensor.array, np.frombuffer(raw, np.float32))
    unpacked = unpack_request(request)["x"]
    unpacked += 1
    assert tensor.array.tolist() == array.tolist()
    assert (tensor.elem_type, tensor.shape, tensor.float_data) == (13, [2, 3], [])
    np.testing.assert_array_equal(np.load(io.BytesIO(tensor.byte_data)), array)


async def test_arrays_of_answers_are_not_converted() -> None:
    array = np.array([[1.5, 2.5]], np.float32)
    data = ChannelData(ChannelDataType.CHANNEL_NPDATA.value, npdata={"x": array}, keeps_arrays=True)
    answer = pack_response(data, as_tensors=True)
    array[:] = 0
    response = await _Pipeline(answer).service.infer(_request())
    (tensor,) = answer.tensors
    assert isinstance(tensor, ArrayTensor)
    (output,) = response.outputs
    assert isinstance(output, Tensor)
    assert output.array is tensor.array
    assert output.array.tolist() == [[1.5, 2.5]]
    assert (tensor.elem_type, tensor.float_data, tensor.int_data, tensor.byte_data) == (1, [1.5, 2.5], [], b"")
