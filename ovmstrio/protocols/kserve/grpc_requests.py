"""Decoder of ``ModelInferRequest``: from message bytes to an :class:`InferRequest`.

Google's C parser reads the message; the raw tensors of a large message are views of the received bytes, not copies.

::

    model_name | id | inputs (names, shapes) | raw_input_contents | raw_input_contents
    └────────────── C parser ──────────────┘   └──── view ──────┘   └──── view ──────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.request import Contents, InferInput, InferRequest, RequestedOutput
from ovmstrio.core.tensor import BY_NAME
from ovmstrio.encoding.messages import message_class
from ovmstrio.encoding.tensor_slices import encode_varint, split_raw_contents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.request import Buffer, ParameterValue

# Request templates

_MAX_SIZES: Final = 256
_MAX_HEAD_BYTES: Final = 1_024


@dataclass(slots=True)
class _Template:
    """Template of the requests of one size.

    ``raws`` has the size of each raw content and the bytes that follow; ``missed`` counts requests that did not match.
    """

    begin: bytes
    raws: Sequence[tuple[int, bytes]]
    request: InferRequest
    missed: int = 0

    def tensors(self, data: bytes) -> list[Buffer | None] | None:
        """Return the raw contents of a message of this size; None if it does not match."""
        if not data.startswith(self.begin):
            return None
        found: list[Buffer | None] = []
        at = len(self.begin)
        for size, following in self.raws:
            end = at + size
            found.append(data[at:end])
            if following and not data.startswith(following, end):
                return None
            at = end + len(following)
        return found


class RequestTemplateCache:
    """Cache of request templates, one per message size, for requests with raw or shared-memory tensors."""

    __slots__ = ("_by_size", "_message", "_raw_tag")

    def __init__(self, raw_tag: int, message: str) -> None:
        self._raw_tag = raw_tag
        self._message = message
        self._by_size: dict[int, _Template] = {}

    def read(self, data: bytes) -> InferRequest | None:
        """Return the request of a message that matches the template of its size; None otherwise."""
        known = self._by_size.get(len(data))
        if known is None:
            return None
        raws = known.tensors(data)
        if raws is None:
            known.missed += 1
            return None
        same = known.request
        return InferRequest(
            same.model_name,
            same.model_version,
            same.id,
            {**same.parameters} if same.parameters else {},
            _copy_inputs(same.inputs),
            [RequestedOutput(output.name, {**output.parameters}) for output in same.outputs] if same.outputs else [],
            raws,
            received=len(data),
        )

    def note(self, data: bytes, request: InferRequest) -> None:
        """Store a template; while templates of a size keep missing, fewer and fewer messages are examined."""
        known = self._by_size.get(len(data))
        if known is not None and known.missed & (known.missed - 1):
            return
        if not _is_plain(request):
            return
        begin, raws = self._parts(data)
        if begin and len(begin) <= _MAX_HEAD_BYTES:
            if known is None and len(self._by_size) >= _MAX_SIZES:
                self._by_size.clear()
            kept = InferRequest(request.model_name, request.model_version, request.id, {**request.parameters})
            kept.inputs = _copy_inputs(request.inputs)
            kept.outputs = [RequestedOutput(output.name, {**output.parameters}) for output in request.outputs]
            self._by_size[len(data)] = _Template(begin, raws, kept, 0 if known is None else known.missed)

    def _parts(self, data: bytes) -> tuple[bytes, Sequence[tuple[int, bytes]]]:
        """Return the bytes before the raw contents and the parts; empty unless raw contents come last."""
        try:
            head, found = split_raw_contents(data, self._raw_tag, self._message)
        except (IndexError, InvalidRequest):
            # The message has unknown groups, which the parser skips: parse such messages every time.
            return b"", ()
        if not found:
            return data, ()
        sizes = [len(raw) for raw in found if raw is not None]
        before = [bytes((self._raw_tag,)) + encode_varint(size) for size in sizes]
        begin = head + before[0]
        pieces = [
            begin,
            *(piece for raw, following in zip(found, [*before[1:], b""], strict=True) for piece in (raw, following)),
        ]
        if b"".join(piece for piece in pieces if piece) != data:
            return b"", ()
        return begin, tuple(zip(sizes, [*before[1:], b""], strict=True))


def _copy_inputs(inputs: Sequence[InferInput]) -> list[InferInput]:
    return [
        InferInput(given.name, given.datatype, given.shape, None, {**given.parameters} if given.parameters else {})
        for given in inputs
    ]


def _is_plain(request: InferRequest) -> bool:
    raws = request.raw_inputs
    if not request.inputs or (raws and len(raws) != len(request.inputs)):
        return False
    return all(given.contents is None for given in request.inputs) and all(raw is not None for raw in raws)


# Parsing

_LIST_MAX_ELEMENTS: Final = 64  # Element count up to which a list is cheaper than an array


def read_elements(
    message: Any, field: str, dtype: np.dtype[Any], *, packed: bool
) -> Sequence[Any] | np.ndarray[Any, Any]:
    """Return the elements of a repeated field; ``packed``: the wire format is numpy's.  Consumes the message."""
    elements = getattr(message, field)
    count = len(elements)
    if count <= _LIST_MAX_ELEMENTS:
        return list(elements)
    if not packed:
        return np.fromiter(elements, dtype, count)
    # Serialised alone, the field is a tag, a length and the elements in numpy's layout.
    for other, _ in message.ListFields():
        if other.name != field:
            message.ClearField(other.name)
    message.DiscardUnknownFields()
    serialised: bytes = message.SerializeToString()
    return np.frombuffer(serialised, dtype, offset=len(serialised) - count * dtype.itemsize)


_Request: Final = message_class("inference.ModelInferRequest")

_VIEW_MIN_BYTES: Final = 32 * 1024  # Message size from which on locating raw tensors is cheaper than copying them

_MAX_ENTRIES: Final = 1_024
"""Limit of dimensions and parameters: an entry takes two bytes on the wire and many as an object."""

_PACKED_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "bool_contents": np.dtype("?"),
    "fp32_contents": np.dtype("<f4"),
    "fp64_contents": np.dtype("<f8"),
}
"""Fields whose wire format equals numpy's memory layout."""

_VARINT_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "int_contents": np.dtype("<i4"),
    "int64_contents": np.dtype("<i8"),
    "uint_contents": np.dtype("<u4"),
    "uint64_contents": np.dtype("<u8"),
}

_REGION: Final = "shared_memory_region"

_MESSAGE: Final = "inference.ModelInferRequest"
_RAW_INPUT_TAG: Final = 0x3A
_templates: Final = RequestTemplateCache(_RAW_INPUT_TAG, _MESSAGE)


def decode_request(data: bytes | memoryview) -> InferRequest:
    """Parse a ``ModelInferRequest``; the raw inputs of a large message are views of ``data``."""
    if len(data) >= _VIEW_MIN_BYTES or not isinstance(data, bytes):
        return _parse(data)
    request = _templates.read(data)
    if request is None:
        request = _parse(data)
        _templates.note(data, request)
    return request


def _parse(data: bytes | memoryview) -> InferRequest:
    try:
        head, views = (
            split_raw_contents(data, _RAW_INPUT_TAG, _MESSAGE) if len(data) >= _VIEW_MIN_BYTES else (data, None)
        )
        message = _Request.FromString(head)
    except (DecodeError, IndexError):
        raise InvalidRequest(
            f"malformed inference.ModelInferRequest: its {len(data)} bytes are not a protobuf message of that type"
        ) from None
    inputs = [_decode_input(tensor) for tensor in message.inputs]
    raws: list[Buffer | None] = list(message.raw_input_contents) if views is None else views
    if len(raws) != len(inputs) and raws:
        raws = _by_position(inputs, raws)
    return InferRequest(
        message.model_name,
        message.model_version,
        message.id,
        _decode_parameters(message.parameters),
        inputs,
        [RequestedOutput(output.name, _decode_parameters(output.parameters)) for output in message.outputs],
        raws,
        received=len(data),
    )


def _by_position(inputs: Sequence[InferInput], raws: list[Buffer | None]) -> list[Buffer | None]:
    """Insert None for inputs in shared memory if exactly these lack raw contents."""
    loaded_keys = [_REGION in given.parameters for given in inputs]
    if loaded_keys.count(False) != len(raws):
        return raws
    rest = iter(raws)
    return [None if is_in_memory else next(rest) for is_in_memory in loaded_keys]


def _decode_input(message: Any) -> InferInput:
    datatype = message.datatype
    return InferInput(
        message.name,
        datatype,
        tuple(_bounded(message.shape, "dimensions")),
        _decode_contents(message.contents, datatype) if message.HasField("contents") else None,
        _decode_parameters(message.parameters),
    )


def _decode_contents(message: Any, datatype: str) -> Contents | None:
    """Return the field that fits the datatype, else the first filled field, which validation reports.

    None if no field is filled: some clients send an empty message in addition to raw contents.
    """
    filled = [field.name for field, _ in message.ListFields()]
    if not filled:
        return None
    known = BY_NAME.get(datatype)
    fitting = known.contents_field if known is not None else ""
    if fitting in filled:
        return Contents(fitting, _decode_elements(message, fitting))
    return Contents(filled[0], _decode_elements(message, filled[0]))


def _decode_elements(message: Any, field: str) -> Sequence[Any] | np.ndarray[Any, Any]:
    if field == "bytes_contents":
        return list(message.bytes_contents)
    packed = _PACKED_DTYPES.get(field)
    if packed is not None:
        return read_elements(message, field, packed, packed=True)
    return read_elements(message, field, _VARINT_DTYPES[field], packed=False)


def _decode_parameters(messages: Any) -> dict[str, ParameterValue]:
    parameters: dict[str, ParameterValue] = {}
    if messages:
        for name, message in _bounded(messages, "parameters").items():
            choice = message.WhichOneof("parameter_choice")
            if choice is not None:
                parameters[name] = getattr(message, choice)
    return parameters


def _bounded(repeated: Any, what: str) -> Any:
    if len(repeated) > _MAX_ENTRIES:
        raise InvalidRequest(
            f"inference.ModelInferRequest: expected at most {_MAX_ENTRIES} {what}, got {len(repeated)}"
        )
    return repeated
