"""Parser of REST inference bodies: JSON, optionally followed by binary tensors, to an ``InferRequest``.

The rules are OVMS's, per its documentation of the KServe REST API and of binary inputs.  Where OVMS reports a client
error as internal, or rejects values that the protocol allows (64-bit integers, NUL in strings), the protocol applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from itertools import chain
from math import inf, nan
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.documents import to_short_json
from ovmstrio.core.errors import ErrorList, InvalidRequest, MalformedJson, add_error
from ovmstrio.core.request import Contents, InferInput, InferRequest, ParameterValue, RequestedOutput
from ovmstrio.core.tensor import BY_NAME, BYTES
from ovmstrio.encoding.json_reader import (
    AT_ONCE_BYTES,
    MAX_MEMBERS,
    PROTOCOL_DOCUMENT,
    JsonLimitExceeded,
    JsonLimits,
    JsonSyntaxError,
    check_arrays,
    parse_at_once,
    read_array,
    read_json,
)
from ovmstrio.encoding.number_arrays import NumberArray
from ovmstrio.protocols.kserve.large_document import LARGE_BYTES, LargeData, read_large_document
from ovmstrio.protocols.kserve.request_templates import (
    ELEMENT_TYPES,
    MAX_DIM,
    MAX_HEAD_BYTES,
    NUMBER_TYPES,
    are_dims,
    read_plain_request,
)
from ovmstrio.util.slices import run_in_slices, run_to_end
from ovmstrio.util.truncation import cut, shown

if TYPE_CHECKING:
    from collections.abc import Generator

    from ovmstrio.core.request import Buffer
    from ovmstrio.encoding.number_arrays import NumberKind
    from ovmstrio.protocols.kserve.request_templates import BinaryTemplates, RestTemplates

# General reader

_NOT_OBJECT: Final = "Request body should be JSON object"
NOT_JSON: Final = "The file is not valid json"
INPUT_UNREADABLE: Final = "Could not parse input content. Not valid ndarray detected"
NO_INPUTS: Final = "No inputs found"
_OUTPUT_UNREADABLE: Final = "Could not parse outputs content"
_PARAMETERS_UNREADABLE: Final = "Could not parse request parameters"
_UNSUPPORTED_PRECISION: Final = "Could not parse input content. Unsupported data precision detected"
SIZE_INVALID: Final = "Invalid value of the binary data size parameter"
_BUFFER_EXCEEDED: Final = "Received buffer size is smaller than binary_data_size parameter indicates"
_CONTENTS_NOT_EMPTY: Final = "Request contents field is not empty"
HEADER_INVALID: Final = "Invalid value of the Inference-Header-Content-Length header"
TOO_DEEP: Final = "JSON nesting depth exceeded"
HEADER_EXCEEDED: Final = "Value of the Inference-Header-Content-Length header is larger than the request body"

_MAX_DEPTH: Final = 100
_DATA_DEPTH: Final = 4  # Depth of the list ``data``: inside an object in a list in an object
_DATA_LEVELS: Final = _MAX_DEPTH - _DATA_DEPTH + 2
"""Maximum nesting of lists: the list of inputs, and the lists of the data."""
_DEPTH_ERRORS: Final = ("depth limit", "recursion limit")
"""Parts of orjson's error messages for too deep documents, by version."""
_MAX_BYTES: Final = 2**63 - 1
_NO_TAIL: Final = memoryview(b"")
_NOT_FINITE: Final = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
"""Strings for non-finite numbers, as in responses and in protobuf's JSON."""
NUMBER_KINDS: Final[dict[str, NumberKind]] = {
    "int_contents": "i",
    "int64_contents": "i",
    "uint_contents": "i",
    "uint64_contents": "u",
    "fp32_contents": "d",
    "fp64_contents": "d",
}


def read_infer_request(
    model: str, version: str, body: Buffer, head_length: str | None = None, cache: RestTemplates | None = None
) -> InferRequest:
    """Parse a body: JSON of ``head_length`` bytes (None: all), then the tensors of the binary extension.

    ``cache`` caches earlier documents.  Raises ``MalformedJson``, or ``InvalidRequest`` with all problems.
    """
    if head_length is None and len(body) < LARGE_BYTES:
        if cache is None or type(body) is not bytes:
            return _read_small(model, version, body)
        same = cache.json.read(model, version, body)
        if same is None:
            same = _read_small(model, version, body)
            cache.json.note(body, same)
        return same
    head, tail = split_body(memoryview(body), head_length)
    if cache is not None and len(head) <= MAX_HEAD_BYTES:
        return _read_known(model, version, bytes(head), tail, cache.binary)
    if len(head) > AT_ONCE_BYTES:
        return run_to_end(read_large_infer_request(model, version, head, tail))
    large = read_large_document(head, _DATA_LEVELS) if len(head) >= LARGE_BYTES else None
    return _read_general(InferRequest(model, version), parse_document(head) if large is None else large, tail)


def read_large_infer_request(
    model: str, version: str, head: memoryview, tail: memoryview
) -> Generator[None, None, InferRequest]:
    """Parse a body in slices, as :func:`read_infer_request`, already split into JSON and tensors."""
    arrays: list[NumberArray] = []
    document = yield from document_in_slices(head, arrays)
    request = _read_general(InferRequest(model, version), document, tail)
    with json_errors():
        yield from check_arrays(arrays)
    return request


def _read_small(model: str, version: str, body: Buffer) -> InferRequest:
    document = parse_document(body)
    plain = read_plain_request(model, version, document)
    return _read_general(InferRequest(model, version), document, _NO_TAIL) if plain is None else plain


def _read_known(model: str, version: str, head: bytes, tail: memoryview, known: BinaryTemplates) -> InferRequest:
    same = known.read(model, version, head, tail)
    if same is None:
        same = _read_general(InferRequest(model, version), parse_document(head), tail)
        known.note(head, same)
    return same


def _read_general(request: InferRequest, document: dict[str, Any], tail: memoryview) -> InferRequest:
    errors: ErrorList | None = None
    try:
        request.id = read_id(document)
    except InvalidRequest as error:
        errors = add_error(errors, error)
    try:
        request.parameters = _parameters(document)
    except InvalidRequest as error:
        errors = add_error(errors, error)
    try:
        request.outputs = _outputs(document)
    except InvalidRequest as error:
        errors = add_error(errors, error)
    errors = _read_inputs(request, document, errors)
    if errors:
        raise errors.error()
    _assign_tail(request, tail)
    return request


def _refuse(text: str, detail: str = "") -> InvalidRequest:
    return InvalidRequest(f"{text} - {detail}" if detail else text)


def split_body(body: memoryview, head_length: str | None) -> tuple[memoryview, memoryview]:
    """Split a body into its JSON and its binary tensors."""
    if head_length is None:
        return body, body[len(body) :]
    if not (head_length.isascii() and head_length.isdigit()):
        raise _refuse(HEADER_INVALID, f"expected an integer number of bytes, got {shown(head_length, 40)}")
    digits = head_length.lstrip("0") or "0"
    # Compare digit counts first: converting a very long number is slow.
    if len(digits) > len(str(len(body))) or int(digits) > len(body):
        raise _refuse(HEADER_EXCEEDED, f"{cut(digits, 20)} against {len(body)} bytes")
    length = int(digits)
    return body[:length], body[length:]


def parse_document(head: Buffer) -> dict[str, Any]:
    """Parse a JSON object in this thread; raise ``MalformedJson``, or ``InvalidRequest`` unless it is an object."""
    if len(head) > AT_ONCE_BYTES:
        return run_to_end(document_in_slices(head, None))
    try:
        document = parse_at_once(head)
    except JsonSyntaxError as error:
        raise _refuse_syntax(error) from None
    return document if type(document) is dict else _as_object(document)


async def read_document(text: Buffer, limits: JsonLimits = PROTOCOL_DOCUMENT) -> dict[str, Any]:
    """Parse a JSON object, in a worker thread if it is large; raises as :func:`parse_document`."""
    if len(text) <= AT_ONCE_BYTES:
        return parse_document(text)
    return await run_in_slices(document_in_slices(text, None, limits))


def document_in_slices(
    text: Buffer, arrays: list[NumberArray] | None, limits: JsonLimits = PROTOCOL_DOCUMENT
) -> Generator[None, None, dict[str, Any]]:
    """Parse a JSON object in slices; ``arrays`` as in :func:`read_json`; raises as :func:`parse_document`."""
    if len(text) <= AT_ONCE_BYTES:
        return parse_document(text)
    with json_errors():
        document = yield from read_json(text, limits, arrays=arrays)
    return _as_object(document)


@contextmanager
def json_errors() -> Iterator[None]:
    """Convert errors of the JSON reader in the block to ``MalformedJson`` and ``InvalidRequest``."""
    try:
        yield
    except JsonSyntaxError as error:
        raise _refuse_syntax(error) from None
    except JsonLimitExceeded as error:
        raise _refuse(TOO_DEEP if error.is_depth else INPUT_UNREADABLE, str(error)) from None


def _refuse_syntax(error: JsonSyntaxError) -> InvalidRequest:
    if any(text in str(error).lower() for text in _DEPTH_ERRORS):
        return _refuse(TOO_DEEP, f"expected at most {_MAX_DEPTH} nested lists and objects")
    return MalformedJson(f"{NOT_JSON} - {error}")


def _as_object(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise _refuse(_NOT_OBJECT, f"got {json_kind(document)}")
    return document


def json_kind(value: Any) -> str:
    """Return the kind of a JSON value for error messages."""
    kinds = {
        dict: "an object",
        list: "a list",
        NumberArray: "a list",
        str: "a text",
        bool: "a boolean",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")


def read_id(document: dict[str, Any]) -> str:
    """Return the request id, or an empty string; raise ``InvalidRequest`` unless it is a string."""
    given = document.get("id")
    if given is not None and not isinstance(given, str):
        raise _refuse(INPUT_UNREADABLE, f"id: expected a text, got {json_kind(given)}")
    return given or ""


def _parameters(holder: dict[str, Any]) -> dict[str, ParameterValue]:
    given = holder.get("parameters")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise _refuse(_PARAMETERS_UNREADABLE, f"expected an object, got {json_kind(given)}")
    for name, value in given.items():
        if value is not None and not isinstance(value, (str, bool, int, float)):
            detail = f"{cut(name, 80)}: expected a text, number or boolean, got {json_kind(value)}"
            raise _refuse(_PARAMETERS_UNREADABLE, detail)
    return {name: value for name, value in given.items() if value is not None} if None in given.values() else given


def _outputs(document: dict[str, Any]) -> list[RequestedOutput]:
    given = document.get("outputs")
    if given is None:
        return []
    if not isinstance(given, list):
        raise _refuse(INPUT_UNREADABLE, f"outputs: expected a list, got {json_kind(given)}")
    check_count("outputs", given)
    requested: list[RequestedOutput] = []
    if not given:
        return requested
    errors = ErrorList()
    for number, output in enumerate(given):
        with errors:
            if not isinstance(output, dict) or not isinstance(output.get("name"), str):
                raise _refuse(_OUTPUT_UNREADABLE, f"outputs[{number}]: expected an object with a name")
            requested.append(RequestedOutput(output["name"], _parameters(output)))
    errors.raise_if_any()
    return requested


def _read_inputs(request: InferRequest, document: dict[str, Any], errors: ErrorList | None) -> ErrorList | None:
    """Parse the inputs into a request; return all errors so far."""
    try:
        all_given = _inputs(document)
    except InvalidRequest as error:
        return add_error(errors, error)
    for given in all_given:
        try:
            request.inputs.append(_input(given))
        except InvalidRequest as error:
            errors = add_error(errors, error)
    return errors


def _inputs(document: dict[str, Any]) -> list[Any]:
    if "inputs" not in document:
        raise _refuse(NO_INPUTS)
    given = document["inputs"]
    if not isinstance(given, list):
        found = "a list of other values" if isinstance(given, NumberArray) else json_kind(given)
        raise _refuse(INPUT_UNREADABLE, f"inputs: expected a list of objects, got {found}")
    check_count("inputs", given)
    return given


def check_count(name: str, items: Sized) -> None:
    """Raise ``InvalidRequest`` if a list has more than :data:`MAX_MEMBERS` items."""
    if len(items) > MAX_MEMBERS:
        raise _refuse(INPUT_UNREADABLE, f"{name}: expected at most {MAX_MEMBERS}, got {len(items)}")


def _input(given: Any) -> InferInput:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise _refuse(INPUT_UNREADABLE, "expected an object with a name for each input")
    name, shape, datatype = given["name"], given.get("shape"), given.get("datatype")
    if not are_dims(shape):
        detail = f"expected a list of whole numbers from 0 to {MAX_DIM}, got {to_short_json(shape)}"
        raise _refuse(INPUT_UNREADABLE, f"input {name}: shape: {detail}")
    if not isinstance(datatype, str):
        raise _refuse(INPUT_UNREADABLE, f"input {name}: datatype must be a text such as FP32")
    read = InferInput(name, datatype, tuple(shape), None, _parameters(given))
    if given.get("data") is not None:
        read.contents = read_contents(read, given["data"])
    return read


def read_contents(read: InferInput, data: Any) -> Contents | None:
    """Return the JSON elements of an input; None if there are none although the shape is not empty."""
    if isinstance(data, LargeData | NumberArray):
        contents = _large_contents(read, data)
        if contents is not None:
            return contents
        with json_errors():
            data = read_array(data) if isinstance(data, NumberArray) else data.as_list()
    if not isinstance(data, list):
        raise _refuse(INPUT_UNREADABLE, f"input {read.name}: data must be a list, got {json_kind(data)}")
    values = _flatten(data)
    if not values and 0 not in read.shape:
        # Treat as missing: the tensor may be in the binary part.
        return None
    datatype = BY_NAME.get(read.datatype)
    if datatype is None:
        raise _refuse(_UNSUPPORTED_PRECISION, f"input {read.name}: {read.datatype!r} is none of {', '.join(BY_NAME)}")
    allowed = ELEMENT_TYPES[datatype.contents_field]
    if allowed is NUMBER_TYPES and str in (kinds := set(map(type, values))) and kinds <= NUMBER_TYPES | {str}:
        values = [_NOT_FINITE.get(value, value) for value in values]
    unexpected = set(map(type, values)) - allowed
    if unexpected:
        found = ", ".join(sorted(each.__name__ for each in unexpected))
        example = to_short_json(next(value for value in values if type(value) in unexpected))
        detail = f"input {read.name}: {datatype.name} data holds {found}, such as {example}"
        raise _refuse(INPUT_UNREADABLE, detail)
    return Contents(datatype.contents_field, values)


def _large_contents(read: InferInput, data: LargeData | NumberArray) -> Contents | None:
    datatype = BY_NAME.get(read.datatype)
    kind = None if datatype is None else NUMBER_KINDS.get(datatype.contents_field)
    array = None if kind is None else data.numbers(kind)
    if datatype is None or array is None or not array.size:
        return None
    return Contents(datatype.contents_field, array)


def _flatten(data: list[Any]) -> list[Any]:
    """Return the elements depth first; a level may mix lists and elements."""
    for _ in range(_DATA_DEPTH, _MAX_DEPTH + 1):
        kinds = set(map(type, data))
        if list not in kinds:
            return data
        if len(kinds) == 1:
            data = list(chain.from_iterable(data))
        else:
            data = list(chain.from_iterable(each if type(each) is list else (each,) for each in data))
    raise _refuse(TOO_DEEP, f"expected at most {_MAX_DEPTH} nested lists and objects")


def _assign_tail(request: InferRequest, tail: memoryview) -> None:
    """Assign slices of the binary part, in order, to the inputs without JSON data."""
    sizes: list[int | None] = []
    errors: ErrorList | None = None
    for given in request.inputs:
        try:
            sizes.append(_binary_size(given, len(tail), sole=len(request.inputs) == 1))
        except InvalidRequest as error:
            errors = add_error(errors, error)
    if errors:
        raise errors.error()
    at = 0
    raw: list[Buffer | None] = []
    is_any_raw = False
    for given, size in zip(request.inputs, sizes, strict=True):
        if size is None:
            raw.append(None)
            continue
        if size > len(tail) - at:
            detail = f"input {given.name}: {size} bytes announced, {len(tail) - at} left"
            raise _refuse(_BUFFER_EXCEEDED, detail)
        raw.append(tail[at : at + size])
        at += size
        is_any_raw = True
    if is_any_raw:
        request.raw_inputs = raw


def _binary_size(given: InferInput, tail_length: int, *, sole: bool) -> int | None:
    """Return the size of an input's binary data; None if its data is in the JSON or in shared memory."""
    if "shared_memory_region" in given.parameters and "binary_data_size" not in given.parameters:
        return None
    if "binary_data_size" in given.parameters:
        size = given.parameters["binary_data_size"]
        if given.contents is not None and len(given.contents.values):
            raise _refuse(_CONTENTS_NOT_EMPTY, f"input {given.name} has both data and binary_data_size")
        given.contents = None
        if type(size) is not int or size < 0:
            raise _refuse(SIZE_INVALID, f"input {given.name}: expected a whole number, 0 or more, got {size!r}")
        return size
    if given.contents is not None:
        return None
    if given.datatype == BYTES.name and 0 not in given.shape:
        if not sole or given.shape != (1,):
            detail = f"input {given.name}: BYTES needs data or binary_data_size"
            raise _refuse(INPUT_UNREADABLE, detail)
        return tail_length
    return _size_of(given)


def _size_of(given: InferInput) -> int:
    datatype = BY_NAME.get(given.datatype)
    size = datatype.itemsize if datatype is not None else 0
    for dim in given.shape:
        size *= dim
        if size > _MAX_BYTES:
            raise _refuse("Invalid content size of tensor proto", f"the shape of input {given.name} overflows")
    return size
