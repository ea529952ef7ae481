"""A pipeline of Ops as a servable, so that KServe v2 reaches it, too.

``BYTES`` inputs of one element are the request's keys and values; every other input is one of its tensors.  Answers
go the same way: texts are ``BYTES`` tensors of one element.  An answer with an error becomes an error of the server.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelFailure,
    NotReady,
    NotSupported,
    Overloaded,
    ServerError,
)
from ovmstrio.core.request import InferResponse, ServableMetadata
from ovmstrio.core.tensor import Dim, Tensor, TensorSpec
from ovmstrio.runtimes.models.contents import to_array
from ovmstrio.runtimes.models.strings import elements_of
from ovmstrio.runtimes.ops.codes import CustomExceptionCode as Code
from ovmstrio.runtimes.ops.tensors import to_array as array_of
from ovmstrio.runtimes.ops.values import PipelineRequest, PipelineResponse, PipelineTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.core.request import Buffer, InferInput, InferRequest

__all__ = ["OpPipelineServable", "PipelineDoor", "PipelineInfer"]

_PLATFORM: Final = "ovmstrio_ops"
_VERSION: Final = "1"
_STRINGS: Final = 12
_NPY: Final = 13

_ERRORS: Final[Mapping[int, type[ServerError]]] = {
    Code.NOT_IMPLEMENTED.value: NotSupported,
    Code.CLOSED_ERROR.value: NotReady,
    Code.INIT_ERROR.value: NotReady,
    Code.INPUT_PARAMS_ERROR.value: InvalidRequest,
    Code.TIMEOUT.value: DeadlineExceeded,
    Code.RPC_PACKAGE_ERROR.value: InvalidRequest,
}
"""What an ``err_no`` is to the callers of other protocols; all others are failures of the pipeline."""


class PipelineInfer(Protocol):
    """Answers requests of a pipeline; its failures are in the answer."""

    async def __call__(self, request: PipelineRequest, deadline: float, /) -> PipelineResponse:
        """Answer one request; raises nothing but cancellation."""
        ...


class NamedCalls(Protocol):
    """A pipeline as its own protocols call it, by the service's name."""

    name: str | None

    async def answer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Answer one request; raises nothing but cancellation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDoor:
    """What a pipeline's own HTTP paths lead to.

    Attributes:
        calls: its requests.
        http_status: whether requests that failed have a status of their own, instead of 200.
        render_metrics: prints what scrapers get; None for nothing.
        snapshot: gives the figures for a live view; None for none.
    """

    calls: NamedCalls
    http_status: bool = False
    render_metrics: Callable[[], bytes] | None = None
    snapshot: Callable[[], dict[str, Any]] | None = None


class OpPipelineServable:
    """One running pipeline.

    Args:
        name: under which it is served.
        infer: answers its requests; whoever opened the pipeline closes it.
        door: what its own HTTP paths lead to.
    """

    def __init__(self, name: str, infer: PipelineInfer, door: PipelineDoor | None = None) -> None:
        self._name = name
        self._infer = infer
        self.door = door
        self.metadata = ServableMetadata(name, _PLATFORM, (), ())

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one call.

        The caller owns the request, whose buffers must stay unchanged until this returns.

        Raises:
            InvalidRequest: an input is not what it says it is, or the pipeline refused it.
            ServerError: of the kind that the pipeline's ``err_no`` stands for.

        Cancellation: at any checkpoint; the pipeline gives back what the call held.
        """
        response = await self._infer(_read(request), request.deadline)
        if response.is_overload:
            raise Overloaded(response.err_msg)
        if response.err_no:
            error = _ERRORS.get(response.err_no, ModelFailure)
            raise error(f"{self._name}: err_no {response.err_no}: {response.err_msg}")
        outputs = _outputs(response)
        wanted = [output.name for output in request.outputs]
        unknown = [name for name in wanted if name not in outputs]
        if unknown:
            raise InvalidRequest(f"outputs: expected some of {', '.join(outputs) or 'none'}, got {', '.join(unknown)}")
        chosen: list[Any] = [outputs[name] for name in wanted or outputs]
        return InferResponse(self._name, _VERSION, chosen, request.id)

    async def aclose(self) -> None:
        """Do nothing: the pipeline belongs to whoever opened it."""


def _read(request: InferRequest) -> PipelineRequest:
    made = PipelineRequest(name=request.model_name, method="infer", logid=_log_id(request))
    for index, given in enumerate(request.inputs):
        raw = request.raw_inputs[index] if index < len(request.raw_inputs) else None
        if given.datatype != BYTES.name:
            made.tensors.append(PipelineTensor(given.name, _NPY, list(given.shape), byte_data=_npy(_array(given, raw))))
            continue
        texts = _texts(given, raw)
        if len(texts) == 1:
            made.keys.append(given.name)
            made.values.append(texts[0])
        else:
            made.tensors.append(PipelineTensor(given.name, _STRINGS, list(given.shape), str_data=texts))
    return made


def _log_id(request: InferRequest) -> int:
    given = request.parameters.get("log_id", 0)
    if not isinstance(given, int):
        raise InvalidRequest(f"parameter log_id: expected a whole number, got {given!r}")
    return given


def _texts(given: InferInput, raw: Buffer | None) -> list[str]:
    elements = elements_of(given, raw, _spec(given))
    if len(elements) != prod(given.shape):
        shape = list(given.shape)
        raise InvalidRequest(
            f"input {given.name}: expected {prod(shape)} elements of shape {shape}, got {len(elements)}"
        )
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise InvalidRequest(f"input {given.name}: its BYTES are not UTF-8; send base64, or a UINT8 tensor") from None


def _array(given: InferInput, raw: Buffer | None) -> np.ndarray[Any, Any]:
    spec = _spec(given)
    count = prod(given.shape)
    if raw is None:
        return to_array(given.contents, given.shape, count, spec)
    expected = count * spec.datatype.itemsize
    if len(raw) != expected:
        raise InvalidRequest(f"input {given.name}: expected {expected} bytes for {spec}, got {len(raw)}")
    return np.ndarray(given.shape, spec.datatype.numpy, raw)


def _spec(given: InferInput) -> TensorSpec:
    datatype = BY_NAME.get(given.datatype)
    if datatype is None or any(size < 0 for size in given.shape):
        raise InvalidRequest(
            f"input {given.name}: expected one of {', '.join(BY_NAME)} and sizes of at least 0, "
            f"got {given.datatype} {list(given.shape)}"
        )
    return TensorSpec(given.name, datatype, tuple(map(Dim.fixed, given.shape)))


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _outputs(response: PipelineResponse) -> dict[str, Tensor]:
    """Give the outputs by name, in the order in which they are shown."""
    texts = zip(response.keys, response.values, strict=False)
    outputs = {name: _bytes_tensor(name, [value]) for name, value in texts}
    for tensor in response.tensors:
        outputs[tensor.name] = _tensor(tensor)
        if tensor.lod:
            lod = f"{tensor.name}.lod"
            outputs[lod] = Tensor(lod, BY_NAME["INT32"], np.array(tensor.lod, np.int32))
    return outputs


def _tensor(tensor: PipelineTensor) -> Tensor:
    if tensor.elem_type == _STRINGS:
        return _bytes_tensor(tensor.name, tensor.str_data)
    array = array_of(tensor)
    dtype = array.dtype.newbyteorder("<")
    datatype = next(known for known in BY_NAME.values() if known.numpy == dtype)
    return Tensor(tensor.name, datatype, array)


def _bytes_tensor(name: str, texts: list[str]) -> Tensor:
    array = np.empty(len(texts), object)
    array[:] = [text.encode() for text in texts]
    return Tensor(name, BYTES, array)
