"""Requests that may be sent as they are: for each servable one, made of what its metadata tells."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.datatypes import INVALID

if TYPE_CHECKING:
    from ovmstrio.core.request import ServableMetadata
    from ovmstrio.core.tensor import Dim, TensorSpec

__all__ = ["generate_example", "infer_example", "input_notes"]

_MOST_ELEMENTS: Final = 1024
"""An example with more would be read by nobody."""
_VALUES: Final[dict[str, Any]] = {"BOOL": False, "BYTES": "text", "INVALID": "text"}
_FLOATS: Final = ("FP", "BF")


_SEQUENCE: Final[dict[str, Any]] = {"sequence_start": True, "sequence_end": True}
"""A whole sequence, whose id is the server's to choose."""
_SEQUENCE_NOTE: Final = (
    "a sequence of one request; without sequence_end it goes on with those that have its sequence_id, which is answered"
)


def infer_example(known: ServableMetadata) -> dict[str, Any]:
    """Give a body for KServe's ``infer``: zeros of the smallest shape that fits.

    Inputs of more than 1024 elements have one value for all, which has to be filled in.
    """
    parameters = {"parameters": _SEQUENCE} if known.has_sequences else {}
    return {**parameters, "inputs": [_input(spec) for spec in known.inputs]}


def generate_example(known: ServableMetadata) -> dict[str, Any]:
    """Give a body for ``generate``."""
    return {spec.name: _nested(spec) for spec in known.inputs} | (_SEQUENCE if known.has_sequences else {})


def input_notes(known: ServableMetadata) -> list[str]:
    """Say what each input takes."""
    return [_note(spec) for spec in known.inputs] + ([_SEQUENCE_NOTE] if known.has_sequences else [])


def _note(spec: TensorSpec) -> str:
    if spec.datatype is INVALID:
        return f"{spec.name}: of the type and shape that its node expects"
    count = prod(_sizes(spec))
    filled = f"; fill in {count} values" if count > _MOST_ELEMENTS else ""
    return f"{spec.name}: {spec.datatype.name} {spec.reported_shape}{filled}"


def _input(spec: TensorSpec) -> dict[str, Any]:
    sizes = _sizes(spec)
    count = prod(sizes)
    datatype = "BYTES" if spec.datatype is INVALID else spec.datatype.name
    data = [_value(spec)] * (count if count <= _MOST_ELEMENTS else 1)
    return {"name": spec.name, "shape": sizes, "datatype": datatype, "data": data}


def _nested(spec: TensorSpec) -> Any:
    """Give lists of the input's shape, or one value where that would be too many."""
    value, sizes = _value(spec), _sizes(spec)
    if spec.datatype is INVALID or prod(sizes) > _MOST_ELEMENTS:
        return value
    for size in reversed(sizes):
        value = [value] * size
    return value


def _sizes(spec: TensorSpec) -> list[int]:
    return [1] if spec.datatype is INVALID else [_size(dim) for dim in spec.shape]


def _size(dim: Dim) -> int:
    return dim.low if dim.is_fixed else max(dim.low, 1)


def _value(spec: TensorSpec) -> Any:
    name = spec.datatype.name
    return _VALUES.get(name, 0.0 if name.startswith(_FLOATS) else 0)
