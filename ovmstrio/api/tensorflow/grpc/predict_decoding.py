"""``PredictRequest``: from the bytes of a message to an :class:`InferRequest`.

``tensor_content`` becomes a raw buffer and the fields for single values become contents, side by side in one request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from ovmstrio.api.kserve.grpc.elements import read_elements
from ovmstrio.api.tensorflow.tensorflow_types import BY_NUMBER
from ovmstrio.core.datatypes import BYTES
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Contents, InferInput, InferRequest
from ovmstrio.protocol.descriptors import POOL, message_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.api.tensorflow.tensorflow_types import TensorFlowType
    from ovmstrio.core.request import Buffer

__all__ = ["PredictRequest", "decode_predict"]

_NAME: Final = "tensorflow.serving.PredictRequest"
_Request: Final = message_class(_NAME)
_DATA_TYPES: Final = POOL.FindEnumTypeByName("tensorflow.DataType").values_by_number

_MAX_ENTRIES: Final = 1_024
"""Inputs, filters and dimensions of a shape: each takes a few bytes on the wire and hundreds as an object."""

_ONLY_AS_VALUES: Final = frozenset({"DT_STRING", "DT_HALF", "DT_UINT16"})
"""Of these OVMS takes single values alone, and says how many of them are missing."""

_MAX_BITS: Final = 2**16 - 1


@dataclass(slots=True)
class PredictRequest:
    """One call: what is to be inferred, and the names of the outputs that are wanted, none for all of them."""

    request: InferRequest
    output_filter: tuple[str, ...] = ()


def decode_predict(data: bytes) -> PredictRequest:
    """Read a ``PredictRequest``.

    Raises:
        InvalidRequest: the bytes are not such a message, or have more entries than any honest one.
    """
    try:
        message = _Request.FromString(data)
    except DecodeError:
        raise InvalidRequest(
            f"malformed {_NAME}: its {len(data)} bytes are not a protobuf message of that type"
        ) from None
    spec = message.model_spec
    request = InferRequest(spec.name, str(spec.version.value), received=len(data))
    for name, tensor in _bounded(message.inputs, "inputs").items():
        given, raw = _decode_tensor(name, tensor)
        request.inputs.append(given)
        request.raw_inputs.append(raw)
    return PredictRequest(request, tuple(_bounded(message.output_filter, "names in output_filter")))


def _decode_tensor(name: str, message: Any) -> tuple[InferInput, Buffer | None]:
    """Read one tensor; the message is used up."""
    shape = tuple(dim.size for dim in _bounded(message.tensor_shape.dim, "dimensions"))
    number = message.dtype
    row = BY_NUMBER.get(number)
    if row is None:
        return InferInput(name, _show_type(number), shape), b""
    datatype = row.datatype
    content = b"" if datatype is BYTES else message.tensor_content
    if content or not (getattr(message, row.values_field) or row.name in _ONLY_AS_VALUES):
        return InferInput(name, datatype.name, shape), content
    contents = Contents(datatype.contents_field, _decode_values(name, message, row), repeat_last=datatype is not BYTES)
    return InferInput(name, datatype.name, shape, contents), None


def _decode_values(name: str, message: Any, row: TensorFlowType) -> Sequence[Any] | np.ndarray[Any, Any]:
    if row.datatype is BYTES:
        return list(message.string_val)
    values = read_elements(message, row.values_field, row.values_dtype, packed=row.packed)
    return _halves(name, values) if row.name == "DT_HALF" else values


def _halves(name: str, values: Sequence[Any] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Make numbers of the bits that ``half_val`` holds."""
    bits = np.asarray(values, "<i4")
    if bits.size and (bits.min() < 0 or bits.max() > _MAX_BITS):
        raise InvalidRequest(
            "Invalid values in tensor proto container - half_val holds the 16 bits of each number, "
            f"expected 0 to {_MAX_BITS}, got {bits.min()} to {bits.max()}; input name: {name}"
        )
    return bits.astype("<u2").view("<f2")


def _show_type(number: int) -> str:
    """Name a type that no servable has."""
    known = _DATA_TYPES.get(number)
    return f"DataType {number}" if known is None else str(known.name)


def _bounded(repeated: Any, what: str) -> Any:
    if len(repeated) > _MAX_ENTRIES:
        raise InvalidRequest(f"{_NAME}: expected at most {_MAX_ENTRIES} {what}, got {len(repeated)}")
    return repeated
