"""Sequence controls of requests: OVMS's two special inputs, or Triton's three parameters.

Inputs: ``sequence_id`` (UINT64 [1], 0 for none) and ``sequence_control_input`` (UINT32 [1]: 0 = step, 1 = start, 2 =
end). Parameters: ``sequence_id`` (number or text) and the flags ``sequence_start`` and ``sequence_end``; both flags
together are a sequence of one request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

import numpy as np

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import SEQUENCE_CONTROL, SEQUENCE_ID, InferRequest, ParameterValue
from ovmstrio.core.tensor import BY_NAME, Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.models.request_errors import format_shape, input_mismatch, invalid_request
from ovmstrio.models.validation import InputValidator, check_content_style
from ovmstrio.util.truncation import utf8

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ovmstrio.core.tensor import Array

SPECIAL_INPUTS: Final = (SEQUENCE_ID, SEQUENCE_CONTROL)
"""In the order in which they are validated."""

_START: Final = 1
_END: Final = 2
_MAX_ID: Final = 2**64 - 1
_MAX_DIGITS: Final = 20
_MAX_CHARACTERS: Final = 256
_SHOWN_CHARACTERS: Final = 40

_CHECKS: Final = {
    SEQUENCE_ID: InputValidator(TensorSpec(SEQUENCE_ID, BY_NAME["UINT64"], (Dim.fixed(1),), None)),
    SEQUENCE_CONTROL: InputValidator(TensorSpec(SEQUENCE_CONTROL, BY_NAME["UINT32"], (Dim.fixed(1),), None)),
}
_NOT_FOUND: Final = {
    SEQUENCE_ID: "Could not find sequence id in expected tensor proto field uint64_val",
    SEQUENCE_CONTROL: "Could not find sequence control input in expected tensor proto field uint32_val",
}
_NO_SHAPE: Final = "Special input proto does not contain tensor shape information"
_NO_ID: Final = "Sequence ID has not been provided in request inputs"
_BAD_CONTROL: Final = "Unexpected value of sequence control input"


class SequenceControl(NamedTuple):
    """Sequence id of a request (0 if none), and whether the request starts or ends the sequence."""

    id: int | str
    start: bool = False
    end: bool = False


def read_control(request: InferRequest) -> tuple[SequenceControl, InferRequest]:
    """Parse the sequence control of a request; return it and the request without the special inputs.

    Raises:
        InvalidRequest: a special input or parameter is invalid, the id is missing in a request that does not start a
            sequence, or inputs and parameters name different sequences.
    """
    positions: dict[str, int] = {}
    for position, given in enumerate(request.inputs):
        if given.name in _CHECKS:
            positions.setdefault(given.name, position)
    if positions and request.raw_inputs:
        check_content_style(request.inputs, request.raw_inputs)
    identity = _value(request, positions[SEQUENCE_ID]) if SEQUENCE_ID in positions else 0
    control = _value(request, positions[SEQUENCE_CONTROL]) if SEQUENCE_CONTROL in positions else 0
    if control not in {0, _START, _END}:
        raise invalid_request(_BAD_CONTROL, f"Expected: 0, {_START} (start) or {_END} (end); Actual: {control}")
    found = SequenceControl(identity, control == _START, control == _END)
    if request.parameters:
        found = _merge_parameters(found, request.parameters)
    if not found.id and not found.start:
        raise invalid_request(_NO_ID)
    return found, _without_inputs(request, positions.values()) if positions else request


def _value(request: InferRequest, position: int) -> int:
    given = request.inputs[position]
    check = _CHECKS[given.name]
    raw = request.raw_inputs[position] if request.raw_inputs else None
    datatype = check.spec.datatype
    # Fast path of nearly all requests; the checks below are the same and report errors.
    if raw is not None and given.shape == (1,) and given.datatype == datatype.name and len(raw) == datatype.itemsize:
        return int.from_bytes(raw, "little")
    if not given.shape:
        raise invalid_request(_NO_SHAPE, f"Expected: (1); input name: {given.name}")
    if len(given.shape) > 1:
        raise input_mismatch("Invalid number of shape dimensions", "(1)", format_shape(given.shape), check.spec)
    if given.shape != (1,):
        raise input_mismatch("Invalid input shape", "(1)", format_shape(given.shape), check.spec)
    try:
        array = check(given, raw)
    except InvalidRequest as error:
        raise invalid_request(_NOT_FOUND[given.name], error.message) from None
    return int(array[0])


def _merge_parameters(control: SequenceControl, parameters: Mapping[str, ParameterValue]) -> SequenceControl:
    given = _parse_id(parameters.get("sequence_id", 0))
    if control.id and given and control.id != given:
        raise InvalidRequest(f"input sequence_id {control.id} contradicts parameter sequence_id {given}")
    return SequenceControl(
        control.id or given,
        control.start or _flag("sequence_start", parameters.get("sequence_start", False)),
        control.end or _flag("sequence_end", parameters.get("sequence_end", False)),
    )


def _parse_id(value: ParameterValue) -> int | str:
    """Parse an id: a number, its decimal digits as text, or another text; an empty text is no id."""
    text = str(value)
    if isinstance(value, int | str) and text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS:
        number = int(text)
        if number <= _MAX_ID:
            return number
    # An unpaired surrogate could be neither stored nor sent to the worker that owns the sequence.
    if isinstance(value, str) and len(value) <= _MAX_CHARACTERS and _is_encodable(value):
        return value or 0
    found = f"{value!r}"[:_SHOWN_CHARACTERS]
    raise InvalidRequest(
        f"the parameter sequence_id must be an integer of 0 to {_MAX_ID}, or a text of at most {_MAX_CHARACTERS} "
        f"characters without unpaired surrogates, got {found}"
    )


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _flag(name: str, value: ParameterValue) -> bool:
    if not isinstance(value, bool):
        found = f"{value!r}"[:_SHOWN_CHARACTERS]
        raise InvalidRequest(f"the parameter {name} must be true or false, got {found}")
    return value


def _without_inputs(request: InferRequest, positions: Iterable[int]) -> InferRequest:
    inputs, raws = [*request.inputs], [*request.raw_inputs]
    for position in sorted(positions, reverse=True):
        del inputs[position]
        if raws:
            del raws[position]
    # dataclasses.replace would be several times slower, in each step of each sequence.
    return InferRequest(
        request.model_name,
        request.model_version,
        request.id,
        request.parameters,
        inputs,
        request.outputs,
        raws,
        request.deadline,
    )


# Requests to other workers

_ID_BYTES: Final = 8


def owner_index(identity: int | str, owners: int) -> int:
    """Return the index of the owner of a sequence among ``owners``, by a hash of its id."""
    data = utf8(identity) if isinstance(identity, str) else identity.to_bytes(_ID_BYTES, "little")
    return crc32(data) % owners


def encode_arrays(arrays: Iterable[tuple[str, str, Array]]) -> tuple[list[Any], list[Any]] | None:
    """Encode arrays, each with its name and a text that is passed through; return None if an array contains objects."""
    heads, buffers = [], []
    for name, entry, array in arrays:
        if array.dtype.hasobject:
            return None
        heads.append([name, entry, array.dtype.str, array.shape])
        buffers.append(array.tobytes())
    return heads, buffers


def decode_arrays(heads: Sequence[Sequence[Any]], tail: Any) -> Iterator[tuple[str, str, Array]]:
    """Decode the result of :func:`encode_arrays`; the buffers are joined in ``tail``.

    Raises:
        ValueError: ``tail`` is too short.
    """
    at = 0
    for name, entry, kind, shape in heads:
        dtype = np.dtype(kind)
        count = math.prod(shape)
        # Copied: the result must be aligned and writable.
        yield (
            name,
            entry,
            np.frombuffer(tail, dtype, count, at).reshape(shape).copy() if count else np.empty(shape, dtype),
        )
        at += count * dtype.itemsize


def encode_outputs(outputs: Sequence[Tensor | RawTensor]) -> list[list[Any]]:
    """Encode outputs of a model as plain data."""
    return [[each.name, each.datatype_name, each.array] for each in outputs if isinstance(each, Tensor)]


def decode_outputs(entry: Sequence[Sequence[Any]]) -> list[Tensor | RawTensor]:
    """Decode outputs encoded by :func:`encode_outputs`."""
    return [Tensor(name, BY_NAME[datatype], np.asarray(array)) for name, datatype, array in entry]
