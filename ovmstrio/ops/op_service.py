"""Service of one Op pipeline, for KServe v2 and for Paddle Serving's protocols."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import structlog

from ovmstrio.core.errors import (
    DeadlineExceeded,
    ErrorList,
    InvalidRequest,
    ModelFailure,
    NotReady,
    NotSupported,
    Overloaded,
    ServerError,
    add_error,
)
from ovmstrio.core.request import InferResponse, ServableMetadata
from ovmstrio.core.service import NO_INTROSPECTION, Introspection
from ovmstrio.core.tensor import BY_NAME, BYTES, Datatype, Dim, Tensor, TensorSpec
from ovmstrio.models.tensor_contents import bytes_elements, to_array
from ovmstrio.ops.messages import (
    STRINGS,
    ArrayTensor,
    CustomExceptionCode,
    PipelineRequest,
    PipelineResponse,
    PipelineTensor,
)
from ovmstrio.ops.messages import CustomExceptionCode as Code
from ovmstrio.ops.messages import to_array as array_of
from ovmstrio.serving.hosted_service import HostedService

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.request import Buffer, InferInput, InferRequest
    from ovmstrio.ops.observing.observers import PipelineObservers
    from ovmstrio.ops.settings import PipelineSettings
    from ovmstrio.util.drawing import Drawing

_VERSION: Final = "1"

_ERRORS: Final[Mapping[int, type[ServerError]]] = {
    Code.NOT_IMPLEMENTED.value: NotSupported,
    Code.CLOSED_ERROR.value: NotReady,
    Code.INIT_ERROR.value: NotReady,
    Code.INPUT_PARAMS_ERROR.value: InvalidRequest,
    Code.TIMEOUT.value: DeadlineExceeded,
    Code.RPC_PACKAGE_ERROR.value: InvalidRequest,
}
"""Error class by ``err_no`` for other protocols; all other codes become ModelFailure."""


def pipeline_request(request: InferRequest) -> PipelineRequest:
    """Convert a KServe request; arrays share its buffers where possible.  InvalidRequest lists all malformed inputs."""
    log_id = _log_id(request) if request.parameters else 0
    pipeline_input = PipelineRequest(name=request.model_name, method="infer", logid=log_id, keeps_arrays=True)
    wrong: ErrorList | None = None
    for index, given in enumerate(request.inputs):
        try:
            _add_input(pipeline_input, given, request.raw_inputs[index] if index < len(request.raw_inputs) else None)
        except InvalidRequest as error:
            wrong = add_error(wrong, error)
    if wrong is not None:
        wrong.raise_if_any()
    return pipeline_input


def _add_input(pipeline_input: PipelineRequest, given: InferInput, raw: Buffer | None) -> None:
    if given.datatype != BYTES.name:
        pipeline_input.tensors.append(ArrayTensor(given.name, _array(given, raw)))
        return
    texts = _texts(given, raw)
    if len(texts) == 1:
        pipeline_input.keys.append(given.name)
        pipeline_input.values.append(texts[0])
    else:
        pipeline_input.tensors.append(PipelineTensor(given.name, STRINGS, list(given.shape), str_data=texts))


def infer_response(name: str, request: InferRequest, response: PipelineResponse) -> InferResponse:
    """Convert a pipeline response to a KServe response; raises the error class of its ``err_no``."""
    if response.is_overload:
        raise Overloaded(response.err_msg)
    if response.err_no:
        error = _ERRORS.get(response.err_no, ModelFailure)
        raise error(f"{name}: err_no {response.err_no}: {response.err_msg}")
    outputs = _outputs(response)
    return InferResponse(name, _VERSION, [*outputs.values()], request.id)


def _log_id(request: InferRequest) -> int:
    given = request.parameters.get("log_id", 0)
    if not isinstance(given, int):
        raise InvalidRequest(f"parameter log_id: expected an integer, got {given!r}")
    return given


def _texts(given: InferInput, raw: Buffer | None) -> list[str]:
    elements = bytes_elements(given, raw, TensorSpec(given.name, _datatype(given), ()))
    if len(elements) != prod(given.shape):
        shape = list(given.shape)
        raise InvalidRequest(
            f"input {given.name}: expected {prod(shape)} elements of shape {shape}, got {len(elements)}"
        )
    try:
        return [*map(bytes.decode, elements)]
    except UnicodeDecodeError:
        raise InvalidRequest(f"input {given.name}: BYTES are not UTF-8; send base64 or a UINT8 tensor") from None


def _array(given: InferInput, raw: Buffer | None) -> np.ndarray[Any, Any]:
    spec = TensorSpec(given.name, _datatype(given), tuple(map(Dim.fixed, given.shape)))
    count = prod(given.shape)
    if raw is None:
        return to_array(given.contents, given.shape, count, spec)
    expected = count * spec.datatype.itemsize
    if len(raw) != expected:
        raise InvalidRequest(f"input {given.name}: expected {expected} bytes for {spec}, got {len(raw)}")
    return np.ndarray(given.shape, spec.datatype.numpy, raw)


def _datatype(given: InferInput) -> Datatype:
    datatype = BY_NAME.get(given.datatype)
    if datatype is None or min(given.shape, default=0) < 0:
        raise InvalidRequest(
            f"input {given.name}: expected one of {', '.join(BY_NAME)} and sizes of at least 0, "
            f"got {given.datatype} {list(given.shape)}"
        )
    return datatype


def _outputs(response: PipelineResponse) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = {}
    for name, value in zip(response.keys, response.values, strict=False):
        outputs[name] = _bytes_tensor(name, [value])
    for tensor in response.tensors:
        outputs[tensor.name] = _tensor(tensor)
        if tensor.lod:
            lod = f"{tensor.name}.lod"
            outputs[lod] = Tensor(lod, BY_NAME["INT32"], np.array(tensor.lod, np.int32))
    return outputs


def _tensor(tensor: PipelineTensor) -> Tensor:
    if tensor.elem_type == STRINGS:
        return _bytes_tensor(tensor.name, tensor.str_data)
    array = tensor.array if isinstance(tensor, ArrayTensor) else array_of(tensor)
    dtype = array.dtype.newbyteorder("<")
    datatype = next(known for known in BY_NAME.values() if known.numpy == dtype)
    return Tensor(tensor.name, datatype, array)


def _bytes_tensor(name: str, texts: list[str]) -> Tensor:
    array = np.empty(len(texts), object)
    array[:] = [*map(str.encode, texts)]
    return Tensor(name, BYTES, array)


DEFAULT_NAME: Final = "pipeline"
"""KServe v2 name of a service without a name."""

_PLATFORM: Final = "ovmstrio_ops"
_WRONG_NAME: Final = "Failed to inference: Service name error."
_CLOSED: Final = "dag closed."

log = structlog.get_logger(__name__)


class PipelineExecutor(Protocol):
    """Running pipeline."""

    async def infer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Run one request; raises only cancellation."""
        ...

    def unready_reason(self) -> str:
        """Return why requests cannot be served now, such as dead workers; empty if they can."""
        ...

    def close(self) -> None:
        """Reject waiting and new requests with 3001; running requests continue."""
        ...


class OpService(HostedService):
    """Service of one running pipeline; without a name it answers only requests without a name.

    Attributes:
        unready_reason: returns why requests cannot be served now; empty if they can.
        request_name: required request name; empty for a service without a name.
        keeps_order: true, because an Op with one worker may keep state between requests.
    """

    keeps_order: Final = True

    def __init__(
        self,
        name: str | None,
        executor: PipelineExecutor,
        figures: PipelineObservers | None,
        settings: PipelineSettings,
        drawing: Drawing | None = None,
    ) -> None:
        super().__init__()
        self.name = name or DEFAULT_NAME
        self.settings = settings
        self.metadata = ServableMetadata(self.name, _PLATFORM, (), ())
        self.unready_reason = executor.unready_reason
        self.snapshot = None if figures is None else figures.snapshot
        self.render_metrics = None if figures is None else figures.render_metrics
        self.metrics: Sequence[Any] = () if figures is None else figures.collectors
        self.request_name = name or ""
        self._figures = figures
        self._drawing = drawing
        self._executor = executor
        self._is_closed = False

    @property
    def inside(self) -> Introspection:
        """Ops with their statistics."""
        return NO_INTROSPECTION if self._figures is None else self._figures.inside(self._drawing)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run one KServe request, whose buffers must not change meanwhile; raises InvalidRequest or ServerError."""
        pipeline_input = pipeline_request(request)
        return infer_response(self.name, request, await self._executor.infer(pipeline_input, request.deadline))

    async def answer(self, request: PipelineRequest, deadline: float) -> PipelineResponse:
        """Run one pipeline request; failures become responses with an error number."""
        if request.name and request.name != self.request_name:
            return unknown_service_response(request, name=self.request_name)
        if self._is_closed:
            return PipelineResponse(CustomExceptionCode.CLOSED_ERROR.value, _CLOSED)
        return await self._executor.infer(request, deadline)

    def begin_drain(self) -> None:
        """Reject waiting and new requests with 3001; running requests continue."""
        self._is_closed = True
        self._executor.close()


def unknown_service_response(request: PipelineRequest, **known: str) -> PipelineResponse:
    """Return the response to a request with an unknown service name; ``known`` is logged."""
    log.error("service name error", log_id=request.logid, requested=request.name[:80], **known)
    return PipelineResponse(CustomExceptionCode.NO_SERVICE.value, _WRONG_NAME)
