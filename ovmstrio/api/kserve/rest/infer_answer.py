"""An ``InferResponse`` as the answer of a REST inference: JSON, and behind it the tensors that go as bytes.

Keys stand in the order in which OVMS answers over the KServe REST API.  Floating-point numbers are printed as the
shortest text that reads back as the same number; NaN and infinities, which JSON has no numbers for, are the texts
``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as protobuf's JSON has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from ovmstrio.api.kserve.rest.raw_values import read_raw
from ovmstrio.api.raw_contents import raw_contents
from ovmstrio.core.datatypes import from_bf16
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.http import HttpAnswer
from ovmstrio.core.tensor import RawTensor
from ovmstrio.wire.http.answers import JSON_TYPE

if TYPE_CHECKING:
    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.core.tensor import Tensor

__all__ = ["HEAD_LENGTH", "json_values", "render_infer_answer"]

HEAD_LENGTH: Final = "inference-header-content-length"


def render_infer_answer(request: InferRequest, response: InferResponse) -> HttpAnswer:
    """Render a response in the form that its request asked for.

    Raises:
        InvalidRequest: an output that goes as JSON has elements that JSON cannot carry.
    """
    wants_binary = _binary_outputs(request)
    buffers: list[Any] = []
    outputs = []
    for tensor in response.outputs:
        datatype = tensor.datatype if isinstance(tensor, RawTensor) else tensor.datatype.name
        head: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": datatype}
        if wants_binary is None or tensor.name in wants_binary:
            raw = raw_contents(tensor)
            buffers.append(raw)
            head["parameters"] = {"binary_data_size": len(raw)}
        else:
            head["data"] = json_values(tensor)
        outputs.append(head)
    document: dict[str, Any] = {"model_name": response.model_name}
    if response.id:
        document["id"] = response.id
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = response.parameters
    document["outputs"] = outputs
    body = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    if not buffers:
        return HttpAnswer(200, JSON_TYPE, body)
    return HttpAnswer(200, (*JSON_TYPE, (HEAD_LENGTH, str(len(body)))), b"".join([body, *buffers]))


_NOTHING: Final[frozenset[str]] = frozenset()


def _binary_outputs(request: InferRequest) -> frozenset[str] | set[str] | None:
    """Tell which outputs go as bytes, None for all.

    An output that is not listed is JSON even if the request asks for bytes (OVMS's rule), unless none is listed at all:
    then, as with Triton, the request speaks for every output.
    """
    everything = request.parameters.get("binary_data_output") is True if request.parameters else False
    if not request.outputs:
        return None if everything else _NOTHING
    chosen = set()
    for output in request.outputs:
        own = output.parameters.get("binary_data")
        if own is True or (everything and not isinstance(own, bool)):
            chosen.add(output.name)
    return chosen


def json_values(tensor: Tensor | RawTensor) -> Any:
    """Give the elements, flat, as what orjson prints.

    Raises:
        InvalidRequest: JSON cannot carry them.
    """
    if isinstance(tensor, RawTensor):
        tensor = read_raw(tensor)
    array = tensor.array
    if array.dtype.hasobject:
        return [_text(element, tensor) for element in array.flat]
    if tensor.datatype.name == "BF16":
        array = from_bf16(array)
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        return [_number(value) for value in flat.tolist()]
    return flat


def _number(value: float) -> float | str:
    if value != value:  # noqa: PLR0124 - the definition of NaN
        return "NaN"
    return value if abs(value) != np.inf else "Infinity" if value > 0 else "-Infinity"


def _text(element: bytes, tensor: Tensor) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"output {tensor.name}: its BYTES are not UTF-8, which JSON cannot carry; ask for it as a binary tensor"
        ) from None
