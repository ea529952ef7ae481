from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest

from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest, ModelFailure, NotReady, Overloaded, ServerError
from ovmstrio.core.request import InferInput, InferRequest, RequestedOutput
from ovmstrio.core.tensor import Tensor
from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings
from ovmstrio.runtimes.ops.op_service import OpService
from ovmstrio.runtimes.ops.tensors import ArrayTensor, from_array, pack, unpack
from ovmstrio.runtimes.ops.values import ChannelData, ChannelDataType, PipelineRequest, PipelineResponse


class _Pipeline:
    def __init__(self, answer: PipelineResponse | None = None) -> None:
        self.answer = answer or PipelineResponse()
        self.requests: list[PipelineRequest] = []

    async def infer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        self.requests.append(request)
        return self.answer

    def obstacle(self) -> str:
        return ""

    def close(self) -> None:
        """Do nothing."""


def service_of(pipeline: _Pipeline) -> OpService:
    """Give the service of a pipeline."""
    return OpService("uci", pipeline, None, PipelineSettings())


def asking(*inputs: tuple[InferInput, bytes], outputs: tuple[str, ...] = (), **parameters: Any) -> InferRequest:
    """Make a call with raw inputs."""
    return InferRequest(
        model_name="uci",
        inputs=[given for given, _ in inputs],
        raw_inputs=[raw for _, raw in inputs],
        outputs=[RequestedOutput(name) for name in outputs],
        parameters=parameters,
        deadline=math.inf,
    )


def text(name: str, *values: bytes) -> tuple[InferInput, bytes]:
    """Make an input of BYTES."""
    return InferInput(name, "BYTES", (len(values),)), b"".join(len(one).to_bytes(4, "little") + one for one in values)


async def test_texts_are_keys_and_arrays_are_tensors() -> None:
    """One text is a key with its value, several are a tensor of texts, and numbers are arrays of their type."""
    pipeline = _Pipeline()
    array = np.array([[1, 2]], np.float16)
    given = InferInput("t", "FP16", (1, 2))
    await service_of(pipeline).infer(asking(text("k", b"v"), text("s", b"a", b"b"), (given, array.tobytes()), log_id=7))
    (request,) = pipeline.requests
    assert (request.keys, request.values, request.name, request.logid) == (["k"], ["v"], "uci", 7)
    found = unpack(request)
    assert found["s"] == "ab"
    assert found["t"].dtype == np.float16
    np.testing.assert_array_equal(found["t"], array)


async def test_answers_are_tensors_by_name() -> None:
    """Keys are BYTES, tensors are what they are with their offsets beside them."""
    tensor = from_array("t", np.array([[1], [2]], np.int64), [0, 2])
    answer = PipelineResponse(keys=["k"], values=["v"], tensors=[tensor])
    servable = service_of(_Pipeline(answer))
    response = await servable.infer(asking())
    assert [each.name for each in response.outputs] == ["k", "t", "t.lod"]
    assert [np.asarray(each.array).tolist() for each in response.outputs if isinstance(each, Tensor)] == [
        [b"v"],
        [[1], [2]],
        [0, 2],
    ]


@pytest.mark.parametrize(
    ("answer", "error"),
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
async def test_codes_are_errors(answer: PipelineResponse, error: type[ServerError]) -> None:
    """What a pipeline says in its answer is an error of its kind in other protocols."""
    with pytest.raises(error, match="why"):
        await service_of(_Pipeline(answer)).infer(asking())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((InferInput("x", "FP32", (2,)), b"1234"), "expected 8 bytes"),
        ((InferInput("x", "NOPE", (1,)), b""), "expected one of"),
        ((InferInput("x", "FP32", (-1,)), b""), "sizes of at least 0"),
        ((InferInput("x", "BYTES", (2,)), b"\x01\x00\x00\x00a"), "expected 2 elements"),
        (text("x", b"\xff"), "not UTF-8"),
    ],
    ids=["bytes", "type", "shape", "elements", "encoding"],
)
async def test_inputs_that_are_not_what_they_say(given: tuple[InferInput, bytes], words: str) -> None:
    """An input that cannot be read is refused, and the pipeline is not asked."""
    pipeline = _Pipeline()
    with pytest.raises(InvalidRequest, match=words):
        await service_of(pipeline).infer(asking(given))
    assert pipeline.requests == []


async def test_arrays_stay_arrays() -> None:
    """An array is over the caller's bytes until it is unpacked, and is a file only for those who ask for one."""
    pipeline = _Pipeline()
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    raw = array.tobytes()
    await service_of(pipeline).infer(asking((InferInput("x", "FP32", (2, 3)), raw)))
    (request,) = pipeline.requests
    (tensor,) = request.tensors
    assert isinstance(tensor, ArrayTensor)
    assert np.shares_memory(tensor.array, np.frombuffer(raw, np.float32))
    unpacked = unpack(request)["x"]
    unpacked += 1
    assert tensor.array.tolist() == array.tolist()
    assert (tensor.elem_type, tensor.shape, tensor.float_data) == (13, [2, 3], [])
    np.testing.assert_array_equal(np.load(io.BytesIO(tensor.byte_data)), array)


async def test_arrays_of_answers_stay_arrays() -> None:
    """An output that is packed as a tensor is not spelled out on its way to a caller that takes arrays."""
    array = np.array([[1.5, 2.5]], np.float32)
    data = ChannelData(ChannelDataType.CHANNEL_NPDATA.value, npdata={"x": array}, keeps_arrays=True)
    answer = pack(data, as_tensors=True)
    array[:] = 0
    response = await service_of(_Pipeline(answer)).infer(asking())
    (tensor,) = answer.tensors
    assert isinstance(tensor, ArrayTensor)
    (output,) = response.outputs
    assert isinstance(output, Tensor)
    assert output.array is tensor.array
    assert output.array.tolist() == [[1.5, 2.5]]
    assert (tensor.elem_type, tensor.float_data, tensor.int_data, tensor.byte_data) == (1, [1.5, 2.5], [], b"")


async def test_every_input_that_is_not_what_it_says_is_told_at_once() -> None:
    """The pipeline is not called."""
    pipeline = _Pipeline()
    short = (InferInput("a", "FP32", (2,)), b"four")
    unknown = (InferInput("b", "FP8", (1,)), b"1")
    with pytest.raises(InvalidRequest) as caught:
        await service_of(pipeline).infer(asking(short, text("good", b"1"), unknown))
    first, second = caught.value.message.split(". Also: ")
    assert first.startswith("input a: expected 8 bytes for ")
    assert second.startswith("input b: expected one of ")
    assert pipeline.requests == []
