"""A servable that gives back what it gets, for tests of what lies around servables."""

from __future__ import annotations

from pathlib import Path
from struct import unpack_from
from typing import Any

import numpy as np
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import InvalidRequest, ModelFailure
from ovmstrio.core.request import Buffer, InferInput, InferRequest, InferResponse, ServableMetadata
from ovmstrio.core.tensor import ANY_SIZE, Dim, RawTensor, Tensor, TensorSpec


class PassThrough:
    """Returns its inputs; the request's parameters ``fail`` and ``block`` make it raise and wait for ever.

    Attributes:
        requests: everything that it was asked.
        blocked: set when a call waits for ever.
        cancelled: set when such a call was cancelled.
    """

    def __init__(self, spec: ModelSpec, version: int) -> None:
        inputs = (
            TensorSpec("text", BY_NAME["BYTES"], (ANY_SIZE,)),
            TensorSpec("x", BY_NAME["FP32"], (Dim.fixed(1), Dim.fixed(10))),
        )
        self.metadata = ServableMetadata(spec.name, "OpenVINO", inputs, inputs)
        self.version = version
        self.requests: list[InferRequest] = []
        self.blocked = trio.Event()
        self.cancelled = trio.Event()

    async def infer(self, request: InferRequest) -> InferResponse:
        self.requests.append(request)
        if "fail" in request.parameters:
            raise ModelFailure(str(request.parameters["fail"]))
        if "block" in request.parameters:
            self.blocked.set()
            try:
                await trio.sleep_forever()
            finally:
                self.cancelled.set()
        await trio.lowlevel.checkpoint()
        raw: list[Buffer | None] = [*request.raw_inputs] or [None] * len(request.inputs)
        outputs: list[Tensor | RawTensor] = [
            _tensor(tensor, buffer) for tensor, buffer in zip(request.inputs, raw, strict=True)
        ]
        return InferResponse(request.model_name, str(self.version), outputs, id=request.id, is_private=True)

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def load_pass_through(spec: ModelSpec, version: int, directory: Path) -> PassThrough:
    await trio.lowlevel.checkpoint()
    return PassThrough(spec, version)


def _tensor(tensor: InferInput, buffer: Buffer | None) -> Tensor:
    datatype = BY_NAME[tensor.datatype]
    values: Any
    if buffer is None:
        assert tensor.contents is not None
        values = tensor.contents.values
    elif datatype.itemsize:
        values = np.frombuffer(buffer, datatype.numpy)
    else:
        values = _split(buffer)
    array = np.empty(len(values), datatype.numpy)
    array[:] = values
    if array.size != np.prod(tensor.shape):
        raise InvalidRequest(f"{array.size} elements do not fill {tensor.shape}")
    return Tensor(tensor.name, datatype, array.reshape(tensor.shape))


def _split(buffer: Buffer) -> list[bytes]:
    elements = []
    position = 0
    while position < len(buffer):
        (length,) = unpack_from("<I", buffer, position)
        elements.append(bytes(buffer[position + 4 : position + 4 + length]))
        position += 4 + length
    return elements
