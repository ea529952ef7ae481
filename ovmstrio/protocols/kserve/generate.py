"""Triton's generate extension: ``/generate`` (one answer) and ``/generate_stream`` (server-sent events).

The response starts with the first event; an error before the first event has its own HTTP status.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import ErrorList, InvalidRequest, NotFound, ServerError
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.request import Contents, InferInput, InferRequest, StreamProblem
from ovmstrio.core.tensor import BY_NAME, BYTES, INVALID, RawTensor, Tensor
from ovmstrio.encoding.json_output import json_values
from ovmstrio.encoding.json_reader import AT_ONCE_BYTES, check_arrays, without_arrays
from ovmstrio.encoding.number_arrays import read_numbers
from ovmstrio.encoding.raw_contents import raw_contents
from ovmstrio.protocols.kserve.rest_requests import (
    NUMBER_KINDS,
    document_in_slices,
    json_errors,
    json_kind,
    read_contents,
    read_id,
)
from ovmstrio.protocols.kserve.rest_routes import check_version, model_paths
from ovmstrio.serving.interfaces import KSERVE_REST
from ovmstrio.serving.ovms_errors import decompressed_call_body, make_admission
from ovmstrio.transport.http.responses import JSON_TYPE, error_response
from ovmstrio.transport.http.router import rule
from ovmstrio.transport.http.sse import stream_events
from ovmstrio.util.slices import run_in_slices, run_to_end
from ovmstrio.util.truncation import cut, utf8

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.request import Buffer, InferResponse, StreamReply
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.encoding.number_arrays import NumberArray, NumberKind
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.transport.http.router import Rule
    from ovmstrio.transport.http.sse import EventSink

_PARAMETERS: Final = "parameters"
_ID: Final = "id"
_INT64: Final = range(-(2**63), 2**63)
_UINT64: Final = range(2**64)
_MAX_LEVELS: Final = 32  # Maximum number of numpy dimensions

Array = np.ndarray[Any, Any]


def read_generate_request(model: str, version: str, body: Buffer, inputs: Sequence[TensorSpec]) -> InferRequest:
    """Parse a body; raise ``MalformedJson``, or ``InvalidRequest`` with all problems."""
    return run_to_end(_request_in_slices(model, version, body, inputs))


def _request_in_slices(
    model: str, version: str, body: Buffer, inputs: Sequence[TensorSpec]
) -> Generator[None, None, InferRequest]:
    arrays: list[NumberArray] = []
    document = yield from document_in_slices(body, arrays)
    yield
    specs = {spec.name: spec for spec in inputs}
    request = InferRequest(model, version, "" if _ID in specs else read_id(document))
    if _PARAMETERS not in specs:
        nested = {} if document.get(_PARAMETERS) is None else document[_PARAMETERS]
        if not isinstance(nested, dict):
            raise InvalidRequest(f"{_PARAMETERS}: expected an object, got {json_kind(nested)}")
        document = {name: value for name, value in document.items() if name != _PARAMETERS} | nested
    errors = ErrorList()
    for name, value in document.items():
        with errors:
            if name in specs:
                _add_input(request, specs[name], value)
            elif name != _ID and value is not None:
                _add_parameter(request, name, value, specs)
    errors.raise_if_any()
    with json_errors():
        yield from check_arrays(arrays)
    return request


def _add_parameter(request: InferRequest, name: str, value: Any, specs: dict[str, TensorSpec]) -> None:
    if not isinstance(value, str | bool | int | float):
        known = ", ".join(specs) or "none"
        kind = json_kind(value)
        raise InvalidRequest(
            f"{cut(name, 80)}: expected a text, number or boolean for a parameter, got {kind}; inputs are: {known}"
        )
    request.parameters[name] = value


def _add_input(request: InferRequest, spec: TensorSpec, value: Any) -> None:
    if spec.datatype is not INVALID:
        request.inputs.append(_typed_input(spec, value))
        return
    if isinstance(value, str):
        raw: Buffer = utf8(value)
        given = InferInput(spec.name, BYTES.name, (len(raw),))
    else:
        tensor = _infer_tensor(spec.name, value)
        raw = raw_contents(tensor)
        given = InferInput(spec.name, tensor.datatype.name, tensor.shape)
    request.inputs.append(given)
    request.raw_inputs.append(raw)


def _elements(name: str, value: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return the elements depth first and the shape; a scalar has shape (1,)."""
    with json_errors():
        lists = without_arrays(value)
    level = lists if isinstance(lists, list) else [lists]
    shape = [len(level)]
    while list in (kinds := set(map(type, level))):
        sizes = set(map(len, level)) if len(kinds) == 1 else set()
        if len(sizes) != 1:
            raise InvalidRequest(f"input {name}: ragged nested list: expected equal lengths on each level")
        shape.append(sizes.pop())
        if len(shape) > _MAX_LEVELS:
            raise InvalidRequest(f"input {name}: expected lists of at most {_MAX_LEVELS} levels, got more")
        level = list(chain.from_iterable(level))
    if not kinds <= {str, int, float, bool}:
        found = json_kind({} if dict in kinds else None)
        raise InvalidRequest(f"input {name}: expected texts, numbers or booleans, got {found}")
    return level, tuple(shape)


def _typed_input(spec: TensorSpec, value: Any) -> InferInput:
    kind = NUMBER_KINDS.get(spec.datatype.contents_field)
    array = None if kind is None else read_numbers(value, kind)
    elements, shape = _elements(spec.name, value) if array is None else ([], array.shape)
    given = InferInput(spec.name, spec.datatype.name, (1,) * (len(spec.shape) - len(shape)) + shape)
    if array is None:
        given.contents = read_contents(given, elements)
    else:
        given.contents = Contents(spec.datatype.contents_field, array.ravel())
    return given


_KINDS: Final[dict[NumberKind, str]] = {"i": "INT64", "u": "UINT64", "d": "FP64"}


def _infer_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor of the narrowest datatype that holds all elements."""
    for kind, datatype in _KINDS.items():
        numbers = read_numbers(value, kind)
        # The values may be integers that fit no common integer type.
        is_too_wide = kind == "d" and numbers is not None and numbers.min() < 0 and numbers.max() >= _INT64.stop
        if numbers is not None and not is_too_wide:
            return Tensor(name, BY_NAME[datatype], numbers)
    elements, shape = _elements(name, value)
    if not elements:
        raise InvalidRequest(f"input {name}: expected at least one element, got an empty list")
    kinds = set(map(type, elements))
    if kinds == {str}:
        texts = np.empty(len(elements), object)
        texts[:] = list(map(utf8, elements))
        return Tensor(name, BYTES, texts.reshape(shape))
    if kinds == {bool}:
        datatype = "BOOL"
    elif kinds == {int}:
        datatype = _integer_type(name, elements)
    elif kinds <= {int, float}:
        datatype = "FP64"
    else:
        words = {str: "texts", bool: "booleans", int: "numbers", float: "numbers"}
        found = " and ".join(sorted({words[kind] for kind in kinds}))
        raise InvalidRequest(f"input {name}: expected elements of one type, got {found}")
    return Tensor(name, BY_NAME[datatype], np.array(elements, BY_NAME[datatype].numpy).reshape(shape))


def _integer_type(name: str, elements: list[int]) -> str:
    smallest, largest = min(elements), max(elements)
    if smallest in _INT64 and largest in _INT64:
        return "INT64"
    if smallest in _UINT64 and largest in _UINT64:
        return "UINT64"
    raise InvalidRequest(f"input {name}: {smallest} and {largest} fit no integer type together")


_CONTROL: Final = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
"""Control characters: UINT8 bytes that contain one are numbers and not text."""


def generate_document(response: InferResponse) -> dict[str, Any]:
    """Return a response as JSON: a scalar or flat list per output; streamed text is joined, other chunks are listed."""
    document: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        document["id"] = response.id
    if response.parameters:
        document["parameters"] = response.parameters
    pieces: dict[str, list[Tensor | RawTensor]] = {}
    for tensor in response.outputs:
        pieces.setdefault(tensor.name, []).append(tensor)
    for name, several in pieces.items():
        document[name] = _value(several[0]) if len(several) == 1 else _joined(several)
    return document


def encode_event(response: InferResponse) -> bytes:
    """Encode a response as an event."""
    return b"data: %b\n\n" % orjson.dumps(generate_document(response), option=orjson.OPT_SERIALIZE_NUMPY)


def encode_error_event(error: Exception) -> bytes:
    """Encode an error as the last event."""
    return b"event: error\ndata: %b\n\n" % error_response(error).content


def _joined(pieces: Sequence[Tensor | RawTensor]) -> Any:
    """Join text chunks, which may split a UTF-8 character; return other values as a list."""
    raw = [piece for piece in pieces if isinstance(piece, RawTensor)]
    if len(raw) == len(pieces) and len({piece.datatype for piece in raw}) == 1:
        data = b"".join(piece.data for piece in raw)
        text = _text(RawTensor(raw[0].name, raw[0].datatype, (len(data),), data))
        if text is not None and all(len(piece.shape) == 1 for piece in raw):
            return text
    values = [_value(piece) for piece in pieces]
    return "".join(values) if all(isinstance(each, str) for each in values) else values


def _value(tensor: Tensor | RawTensor) -> Any:
    if isinstance(tensor, RawTensor):
        text = _text(tensor)
        if text is not None:
            return text
    values = json_values(tensor)
    if len(values) != 1:
        return values
    return values[0].item() if isinstance(values, np.ndarray) else values[0]


def _text(tensor: RawTensor) -> str | None:
    """Decode text from Python nodes, which send it as UINT8 unless they set a datatype."""
    if tensor.datatype == "BYTES" and not len(tensor.data):
        return ""
    if tensor.datatype != "UINT8" or len(tensor.shape) != 1:
        return None
    try:
        text = bytes(tensor.data).decode()
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(text) else text


def generate_rules(plane: DataPlane, max_body_bytes: int) -> list[Rule]:
    """Return the routes over one data plane."""

    async def generate(request: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        parsed = await _read(plane, request, model, check_version(version), max_body_bytes)
        parsed.wants_all_packets, parsed.max_output_bytes = True, max_body_bytes
        return await plane.infer(parsed, KSERVE_REST, _render)

    async def generate_stream(request: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        parsed = await _read(plane, request, model, check_version(version), max_body_bytes, streamed=True)
        return await stream_events(request, partial(_stream, plane, parsed), encode_error_event)

    admit = make_admission(plane, KSERVE_REST)
    return [
        *(rule(path, "POST", generate, admit=admit, need=Permission.INFER) for path in model_paths("/generate")),
        *(
            rule(path, "POST", generate_stream, is_hot=True, has_tasks=True, admit=admit, need=Permission.INFER)
            for path in model_paths("/generate_stream")
        ),
    ]


async def _read(
    plane: DataPlane, request: HttpRequest, model: str, version: str, limit: int, *, streamed: bool = False
) -> InferRequest:
    described = await plane.describe(model, version, KSERVE_REST)
    if streamed and not described.has_streams:
        raise NotFound(f'"{cut(model, 80)}" does not stream, only graphs do; POST to /generate instead')
    body = await decompressed_call_body(plane, request, model, version, limit=limit)
    try:
        if len(body) <= AT_ONCE_BYTES:
            parsed = read_generate_request(model, version, body, described.inputs)
        else:
            parsed = await run_in_slices(_request_in_slices(model, version, body, described.inputs))
        if streamed and not parsed.inputs:
            known = ", ".join(spec.name for spec in described.inputs)
            raise InvalidRequest(f"expected at least one input, got none; the inputs of {cut(model, 80)} are: {known}")
    except ServerError as error:
        plane.count_unreadable_call(model, version, error, KSERVE_REST, len(body))
        raise
    return parsed


def _render(response: InferResponse) -> tuple[HttpAnswer, int]:
    body = orjson.dumps(generate_document(response), option=orjson.OPT_SERIALIZE_NUMPY)
    return HttpAnswer(200, JSON_TYPE, body), len(body)


async def _stream(plane: DataPlane, request: InferRequest, events: EventSink) -> None:
    async with plane.open_stream(request, KSERVE_REST) as stream:
        stream.end()
        async for reply in stream:
            await events.send(_event(reply))


def _event(reply: StreamReply) -> bytes:
    """Encode a reply; an error ends the stream, which has a single request."""
    if isinstance(reply, StreamProblem):
        raise InvalidRequest(reply.message)
    return encode_event(reply)
