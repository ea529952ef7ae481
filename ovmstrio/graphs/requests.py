"""Conversion of requests to packets, timestamps and side packets, and of node failures to errors.

Clients match on the fixed parts of the messages, which are OVMS's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from ovmstrio.core.errors import ErrorList, FailedPrecondition, GraphFailure, InvalidRequest, ServerError, error_type
from ovmstrio.core.request import Buffer, InferInput, InferRequest, ParameterValue
from ovmstrio.graphs.calculator import NodeFailure
from ovmstrio.graphs.graph_config import StreamRef
from ovmstrio.graphs.packets import (
    ImageFrame,
    MediaPipeTensor,
    OvTensor,
    TfTensor,
    format_timestamp,
    is_range_value,
    stream_type,
)
from ovmstrio.graphs.python_nodes.api import Tensor
from ovmstrio.graphs.streams import TimestampMismatch
from ovmstrio.graphs.tensors import (
    read_image,
    read_mediapipe_tensor,
    read_ov_tensor,
    read_python_tensor,
    read_tf_tensor,
)
from ovmstrio.models.request_errors import invalid_request
from ovmstrio.models.validation import check_content_style
from ovmstrio.util.truncation import text_of

TIMESTAMP_PARAMETER: Final = "OVMS_MP_TIMESTAMP"

_BAD_TIMESTAMP: Final = "Malformed packet timestamp"
_PYTHON_SIDE_PACKET: Final = "py"
_SERVER_SIDE_PACKETS: Final = frozenset(
    {"llm", "llm_ctx", "pipes", "embeddings_servable", "rerank_servable", "s2t_servable", "t2s_servable"}
)
_COUNTS: Final = "Size of raw_input_contents: {actual} is different than number of inputs: {expected}"
_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1

_READERS: Final[dict[type, Callable[[InferInput, Buffer | None], Any]]] = {
    Tensor: read_python_tensor,
    OvTensor: read_ov_tensor,
    MediaPipeTensor: read_mediapipe_tensor,
    TfTensor: read_tf_tensor,
    ImageFrame: read_image,
}


class GraphRequestParser:
    """Parser of the requests of one graph, by the types of its inputs."""

    __slots__ = ("_readers", "_request_inputs")

    def __init__(self, inputs: Sequence[StreamRef]) -> None:
        types = {ref.name: stream_type(ref.port.tag) for ref in inputs}
        self._readers = {name: _READERS[kind] for name, kind in types.items() if kind in _READERS}
        self._request_inputs = frozenset(name for name, kind in types.items() if kind is InferRequest)

    def packets(self, request: InferRequest) -> Iterator[tuple[str, Any]]:
        """Yield name and value of each input, in the order of the request.

        Raises:
            InvalidRequest: the request is malformed, or inputs are unknown or do not fit their types. Lists all bad
                inputs; valid inputs before the first bad one have already been yielded.
        """
        inputs, raws = request.inputs, request.raw_inputs
        if raws:
            check_content_style(inputs, raws, _COUNTS)
        wrong = ErrorList()
        for position, source in enumerate(inputs):
            try:
                value = self._value(request, source, raws[position] if raws else None)
            except InvalidRequest as error:
                wrong.add(error.with_traceback(None))
                continue
            if not wrong:
                yield source.name, value
        wrong.raise_if_any()

    def _value(self, request: InferRequest, source: InferInput, raw: Buffer | None) -> Any:
        read = self._readers.get(source.name)
        if read is not None:
            return read(source, raw)
        if source.name in self._request_inputs:
            return request
        raise invalid_request("Unexpected input", f"{source.name} is unexpected")


def _is_int64(value: ParameterValue) -> bool:
    return type(value) is int and _INT64_MIN <= value <= _INT64_MAX


def timestamp_of(request: InferRequest) -> int | None:
    """Return the timestamp of a request; None if the client set none."""
    value = request.parameters.get(TIMESTAMP_PARAMETER)
    if value is None:
        return None
    if not _is_int64(value):
        detail = f"Invalid timestamp format in request parameter {TIMESTAMP_PARAMETER}. Should be int64"
        raise invalid_request(_BAD_TIMESTAMP, detail)
    timestamp = int(value)
    if not is_range_value(timestamp):
        raise invalid_request(_BAD_TIMESTAMP, format_timestamp(timestamp))
    return timestamp


def side_packets(request: InferRequest) -> dict[str, ParameterValue]:
    """Return the request's parameters as side packets by name, without names reserved for the server.

    OVMS refuses fractions and integers from 2**63 on.

    Raises:
        FailedPrecondition: a parameter has the name of the Python nodes' side packet.
    """
    packets: dict[str, ParameterValue] = {}
    for name, value in request.parameters.items():
        if name == TIMESTAMP_PARAMETER or name in _SERVER_SIDE_PACKETS:
            continue
        if name == _PYTHON_SIDE_PACKET:
            fixed = "Failed to initialize mediapipe graph"
            detail = f"Incoming input side packet: {name} is special reserved name and cannot be used"
            raise FailedPrecondition(f"{fixed} - {detail}")
        packets[name] = value
    return packets


# Failures

_EXECUTION: Final = "Mediapipe execution failed. MP status"
_RUN_FAILED: Final = "CalculatorGraph::Run() failed: \n"

DEADLOCK_MESSAGE: Final = (
    "Detected a deadlock due to input throttling: every queue that would have to be emptied first is full; raise "
    "max_queue_size, or remove report_deadlock"
)


def graph_failure(detail: str, code: str = "INTERNAL") -> GraphFailure:
    """Create the error of a failed run; ``code`` is the absl status that MediaPipe would return."""
    return GraphFailure(f"{_EXECUTION} - {code}: {_RUN_FAILED}{detail}")


def node_failure(node: str, phase: str, error: Exception) -> ServerError:
    """Convert an exception raised by a calculator in ``Open``, ``Process`` or ``Close`` to the error of the run."""
    match error:
        case ServerError():
            return error
        case TimestampMismatch():
            return graph_failure(str(error), "INVALID_ARGUMENT")
        case NodeFailure():
            message, code = error.message, error.code
        case _:
            message, code = f"{type(error).__name__}: {text_of(error)}", "INTERNAL"
    failure = graph_failure(f'Calculator::{phase}() for node "{node}" failed: {message}', code)
    if not isinstance(error, NodeFailure) or error.user_type:
        failure.user_type = error_type(error)
    return failure
