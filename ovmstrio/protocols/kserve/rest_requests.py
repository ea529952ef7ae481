"""The body of a REST inference, JSON with or without tensors behind it, read into an ``InferRequest``.

The rules are OVMS's, as its documentation of the KServe REST API and of its binary inputs has them.  Where OVMS calls a
caller's mistake an internal error, or cannot take a value that the protocol allows (64-bit integers, NUL in strings),
the protocol is followed instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from itertools import chain
from math import inf, nan
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from ovmstrio.core.errors import Gathered, InvalidRequest, MalformedJson, noted
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
from ovmstrio.util.slices import run_in_slices, run_to_end

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from ovmstrio.core.request import Buffer
    from ovmstrio.encoding.number_arrays import NumberKind

__all__ = [
    "ELEMENT_TYPES",
    "INPUT_UNREADABLE",
    "MOST_HEAD_BYTES",
    "MOST_SIZE",
    "NUMBER",
    "NUMBER_KINDS",
    "TOO_DEEP",
    "KnownDocuments",
    "KnownHeads",
    "as_object",
    "check_count",
    "document_in_slices",
    "json_errors",
    "kind_of",
    "parse_document",
    "read_contents",
    "read_document",
    "read_id",
    "read_infer_request",
    "read_large_infer_request",
    "read_plain_request",
    "split_body",
]

# ----------------------------------------------------------------------
# The documents that most REST inferences are: tensors of flat numbers with nothing said about them, read in one go
# ----------------------------------------------------------------------

MOST_SIZE: Final = 2**31 - 1
"""Of a dimension."""

NUMBER: Final[frozenset[type]] = frozenset({int, float})
ELEMENT_TYPES: Final[Mapping[str, frozenset[type]]] = {
    "bool_contents": frozenset({bool}),
    "int_contents": frozenset({int}),
    "int64_contents": frozenset({int}),
    "uint_contents": frozenset({int}),
    "uint64_contents": frozenset({int}),
    "fp32_contents": NUMBER,
    "fp64_contents": NUMBER,
    "bytes_contents": frozenset({str}),
}
"""What the elements of a list of JSON may be, by the field of gRPC that carries them."""

_FIELDS: Final = {name: (row.contents_field, ELEMENT_TYPES[row.contents_field]) for name, row in BY_NAME.items()}
_MEMBERS: Final = 4
"""Of an input of which nothing is said but its name, shape, datatype and data."""


def read_plain_request(model: str, version: str, document: dict[str, Any]) -> InferRequest | None:
    """Read a document whose inputs all have their elements in flat lists, and whose tensors have no parameters.

    None for any other.
    """
    given, wanted, id_ = document.get("inputs"), document.get("outputs"), document.get("id", "")
    if type(given) is not list or type(id_) is not str or "parameters" in document:
        return None
    inputs = []
    for each in given:
        read = _plain_input(each)
        if read is None:
            return None
        inputs.append(read)
    if wanted is None:
        return None if "outputs" in document else InferRequest(model, version, id_, {}, inputs)
    if type(wanted) is not list:
        return None
    outputs = []
    for each in wanted:
        if type(each) is not dict or len(each) != 1 or type(name := each.get("name")) is not str:
            return None
        outputs.append(RequestedOutput(name))
    return InferRequest(model, version, id_, {}, inputs, outputs)


def _plain_input(given: Any) -> InferInput | None:
    if type(given) is not dict or len(given) != _MEMBERS:
        return None
    name, shape, datatype, data = given.get("name"), given.get("shape"), given.get("datatype"), given.get("data")
    if type(name) is not str or type(datatype) is not str:
        return None
    if type(shape) is not list or type(data) is not list or not data:
        return None
    for size in shape:
        if type(size) is not int or not 0 <= size <= MOST_SIZE:
            return None
    field = _FIELDS.get(datatype)
    if field is None or not field[1].issuperset(map(type, data)):
        return None
    return InferInput(name, datatype, tuple(shape), Contents(field[0], data, is_checked=True))


# ----------------------------------------------------------------------
# Requests whose tensors stand behind their JSON, of which the JSON has come before: it is not parsed again
# ----------------------------------------------------------------------

MOST_HEAD_BYTES: Final = 1_024
_MOST_KNOWN: Final = 256
_SIZE: Final = "binary_data_size"


class _Input(NamedTuple):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Mapping[str, ParameterValue]
    size: int


class _KnownHead(NamedTuple):
    """What a head means, and how many bytes its inputs have together."""

    id: str
    parameters: Mapping[str, ParameterValue]
    inputs: Sequence[_Input]
    outputs: Sequence[RequestedOutput]
    size: int


class KnownHeads:
    """Remembers heads that say of each input how many bytes it has behind them.

    Attributes:
        missed: how many were read since one was known; where all are others, ever fewer are kept.
    """

    __slots__ = ("_known", "missed")

    def __init__(self) -> None:
        self._known: dict[bytes, _KnownHead] = {}
        self.missed = 0

    def read(self, model: str, version: str, head: bytes, tail: memoryview) -> InferRequest | None:
        """Read a request whose head is known; None for any other, right or wrong."""
        known = self._known.get(head)
        if known is None or known.size > len(tail):
            return None
        self.missed = 0
        inputs: list[InferInput] = []
        raws: list[Buffer | None] = []
        at = 0
        for name, datatype, shape, parameters, size in known.inputs:
            inputs.append(InferInput(name, datatype, shape, None, {**parameters}))
            raws.append(tail[at : at + size])
            at += size
        return InferRequest(model, version, known.id, {**known.parameters}, inputs, [*known.outputs], raws)

    def note(self, head: bytes, request: InferRequest) -> None:
        """Remember what a head was read as, if that is not for the bytes behind it to say."""
        self.missed += 1
        if self.missed & (self.missed - 1) or not request.inputs or len(request.raw_inputs) != len(request.inputs):
            return
        inputs = []
        for given, raw in zip(request.inputs, request.raw_inputs, strict=True):
            if raw is None or _SIZE not in given.parameters:
                return
            inputs.append(_Input(given.name, given.datatype, given.shape, {**given.parameters}, len(raw)))
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        size = sum(each.size for each in inputs)
        self._known[head] = _KnownHead(request.id, {**request.parameters}, inputs, tuple(request.outputs), size)


# ----------------------------------------------------------------------
# The body of a REST inference, JSON with or without tensors behind it, read into an ``InferRequest``
# ----------------------------------------------------------------------

BODY_NO_OBJECT: Final = "Request body should be JSON object"
NOT_JSON: Final = "The file is not valid json"
INPUT_UNREADABLE: Final = "Could not parse input content. Not valid ndarray detected"
NO_INPUTS: Final = "No inputs found"
OUTPUT_UNREADABLE: Final = "Could not parse outputs content"
PARAMETERS_UNREADABLE: Final = "Could not parse request parameters"
UNSUPPORTED_PRECISION: Final = "Could not parse input content. Unsupported data precision detected"
SIZE_INVALID: Final = "Invalid value of the binary data size parameter"
BUFFER_EXCEEDED: Final = "Received buffer size is smaller than binary_data_size parameter indicates"
CONTENTS_NOT_EMPTY: Final = "Request contents field is not empty"
HEADER_INVALID: Final = "Invalid value of the Inference-Header-Content-Length header"
TOO_DEEP: Final = "JSON nesting depth exceeded"
HEADER_EXCEEDED: Final = "Value of the Inference-Header-Content-Length header is larger than the request body"

_MAX_DEPTH: Final = 100
_DATA_DEPTH: Final = 4
"""Depth of a list ``data``: it lies in an object, in a list, in an object."""
_DATA_LEVELS: Final = _MAX_DEPTH - _DATA_DEPTH + 2
"""Lists that may lie in each other: that of the inputs, and those of the data."""
_PARSER_GAVE_UP: Final = ("depth limit", "recursion limit")
"""Parts of the messages of orjson's versions about a document that is too deep."""
_MAX_BYTES: Final = 2**63 - 1
_NO_TAIL: Final = memoryview(b"")
_NOT_FINITE: Final = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
"""What JSON has no numbers for, as answers have it and protobuf's JSON."""
NUMBER_KINDS: Final[dict[str, NumberKind]] = {
    "int_contents": "i",
    "int64_contents": "i",
    "uint_contents": "i",
    "uint64_contents": "u",
    "fp32_contents": "d",
    "fp64_contents": "d",
}


def read_infer_request(
    model: str, version: str, body: Buffer, head_length: str | None = None, known: KnownDocuments | None = None
) -> InferRequest:
    """Read a whole body.

    Args:
        model: the name in the path.
        version: the version in the path, or empty.
        body: JSON, and behind it the tensors of the binary extension.
        head_length: the header ``Inference-Header-Content-Length``, None where the body is all JSON.
        known: knows documents that have come before.

    Raises:
        MalformedJson: the JSON part is not JSON.
        InvalidRequest: anything else that the body should not be, all of it at once.
    """
    if head_length is None and len(body) < LARGE_BYTES:
        if known is None or type(body) is not bytes:
            return _read_small(model, version, body)
        same = known.read(model, version, body)
        if same is None:
            same = _read_small(model, version, body)
            known.note(body, same)
        return same
    head, tail = split_body(memoryview(body), head_length)
    if known is not None and len(head) <= MOST_HEAD_BYTES:
        return _read_known(model, version, bytes(head), tail, known.heads)
    if len(head) > AT_ONCE_BYTES:
        return run_to_end(read_large_infer_request(model, version, head, tail))
    large = read_large_document(head, _DATA_LEVELS) if len(head) >= LARGE_BYTES else None
    return _read_carefully(InferRequest(model, version), parse_document(head) if large is None else large, tail)


def read_large_infer_request(
    model: str, version: str, head: memoryview, tail: memoryview
) -> Generator[None, None, InferRequest]:
    """Read a body in slices, as :func:`read_infer_request`; ``head`` is the JSON and ``tail`` the tensors behind it."""
    arrays: list[NumberArray] = []
    document = yield from document_in_slices(head, arrays)
    request = _read_carefully(InferRequest(model, version), document, tail)
    with json_errors():
        yield from check_arrays(arrays)
    return request


def _read_small(model: str, version: str, body: Buffer) -> InferRequest:
    document = parse_document(body)
    plain = read_plain_request(model, version, document)
    return _read_carefully(InferRequest(model, version), document, _NO_TAIL) if plain is None else plain


def _read_known(model: str, version: str, head: bytes, tail: memoryview, known: KnownHeads) -> InferRequest:
    same = known.read(model, version, head, tail)
    if same is None:
        same = _read_carefully(InferRequest(model, version), parse_document(head), tail)
        known.note(head, same)
    return same


def _read_carefully(request: InferRequest, document: dict[str, Any], tail: memoryview) -> InferRequest:
    wrong: Gathered | None = None
    try:
        request.id = read_id(document)
    except InvalidRequest as error:
        wrong = noted(wrong, error)
    try:
        request.parameters = _parameters(document)
    except InvalidRequest as error:
        wrong = noted(wrong, error)
    try:
        request.outputs = _outputs(document)
    except InvalidRequest as error:
        wrong = noted(wrong, error)
    wrong = _read_inputs(request, document, wrong)
    if wrong:
        raise wrong.error()
    _assign_tail(request, tail)
    return request


def _refuse(text: str, detail: str = "") -> InvalidRequest:
    return InvalidRequest(f"{text} - {detail}" if detail else text)


def split_body(body: memoryview, head_length: str | None) -> tuple[memoryview, memoryview]:
    """Split a body into its JSON and the tensors behind it.

    Raises:
        InvalidRequest: the length of the JSON is no number, or larger than the body.
    """
    if head_length is None:
        return body, body[len(body) :]
    if not (head_length.isascii() and head_length.isdigit()):
        raise _refuse(HEADER_INVALID, f"expected a whole number of bytes, got {head_length[:40]!r}")
    digits = head_length.lstrip("0") or "0"
    # More digits than the body's length has would take long to convert, and are too many.
    if len(digits) > len(str(len(body))) or int(digits) > len(body):
        raise _refuse(HEADER_EXCEEDED, f"{digits[:20]} against {len(body)} bytes")
    length = int(digits)
    return body[:length], body[length:]


def parse_document(head: Buffer) -> dict[str, Any]:
    """Read a JSON object in this thread; :func:`read_document` reads objects of any size.

    Raises:
        MalformedJson: the text is not JSON.
        InvalidRequest: the value is no object, or exceeds a limit.
    """
    if len(head) > AT_ONCE_BYTES:
        return run_to_end(document_in_slices(head, None))
    try:
        document = parse_at_once(head)
    except JsonSyntaxError as error:
        raise _refuse_syntax(error) from None
    return document if type(document) is dict else as_object(document)


async def read_document(text: Buffer, limits: JsonLimits = PROTOCOL_DOCUMENT) -> dict[str, Any]:
    """Read a JSON object, in a worker thread if the text is large.

    Raises:
        MalformedJson: the text is not JSON.
        InvalidRequest: the value is no object, or exceeds a limit.

    Cancellation: as :func:`run_in_slices`; not a checkpoint for small texts.
    """
    if len(text) <= AT_ONCE_BYTES:
        return parse_document(text)
    return await run_in_slices(document_in_slices(text, None, limits))


def document_in_slices(
    text: Buffer, arrays: list[NumberArray] | None, limits: JsonLimits = PROTOCOL_DOCUMENT
) -> Generator[None, None, dict[str, Any]]:
    """Read a JSON object in slices; ``arrays`` is as :func:`read_json` takes it.

    Raises:
        MalformedJson: the text is not JSON.
        InvalidRequest: the value is no object, or exceeds a limit.
    """
    if len(text) <= AT_ONCE_BYTES:
        return parse_document(text)
    with json_errors():
        document = yield from read_json(text, limits, arrays=arrays)
    return as_object(document)


@contextmanager
def json_errors() -> Iterator[None]:
    """Raise errors of the JSON reader in the block as errors of the request.

    Raises:
        MalformedJson: a text is not JSON.
        InvalidRequest: a document exceeds a limit.
    """
    try:
        yield
    except JsonSyntaxError as error:
        raise _refuse_syntax(error) from None
    except JsonLimitExceeded as error:
        raise _refuse(TOO_DEEP if error.is_depth else INPUT_UNREADABLE, str(error)) from None


def _refuse_syntax(error: JsonSyntaxError) -> InvalidRequest:
    if any(text in str(error).lower() for text in _PARSER_GAVE_UP):
        return _refuse(TOO_DEEP, f"at most {_MAX_DEPTH} lists and objects may lie in each other")
    return MalformedJson(f"{NOT_JSON} - {error}")


def as_object(document: Any) -> dict[str, Any]:
    """Give a JSON document that must be an object.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(document, dict):
        raise _refuse(BODY_NO_OBJECT, f"got {kind_of(document)}")
    return document


def kind_of(value: Any) -> str:
    """Name the kind of a JSON value, as messages do."""
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
    """Take the request's id, empty if it has none.

    Raises:
        InvalidRequest: it is no text.
    """
    given = document.get("id", "")
    if not isinstance(given, str):
        raise _refuse(INPUT_UNREADABLE, f"id: expected a text, got {kind_of(given)}")
    return given


def _parameters(holder: dict[str, Any]) -> dict[str, ParameterValue]:
    if "parameters" not in holder:
        return {}
    given = holder["parameters"]
    if not isinstance(given, dict):
        raise _refuse(PARAMETERS_UNREADABLE, f"expected an object, got {kind_of(given)}")
    for name, value in given.items():
        if not isinstance(value, (str, bool, int)):
            found = "a fraction" if isinstance(value, float) else kind_of(value)
            detail = f"{name[:80]}: expected a text, whole number or boolean, got {found}"
            raise _refuse(PARAMETERS_UNREADABLE, detail)
    return given


def _outputs(document: dict[str, Any]) -> list[RequestedOutput]:
    given = document.get("outputs", [])
    if not isinstance(given, list):
        raise _refuse(INPUT_UNREADABLE, f"outputs: expected a list, got {kind_of(given)}")
    check_count("outputs", given)
    requested: list[RequestedOutput] = []
    if not given:
        return requested
    wrong = Gathered()
    for number, output in enumerate(given):
        with wrong:
            if not isinstance(output, dict) or not isinstance(output.get("name"), str):
                raise _refuse(OUTPUT_UNREADABLE, f"outputs[{number}]: expected an object with a name")
            requested.append(RequestedOutput(output["name"], _parameters(output)))
    wrong.tell()
    return requested


def _read_inputs(request: InferRequest, document: dict[str, Any], wrong: Gathered | None) -> Gathered | None:
    """Read the inputs into a request; gives what is wrong, together with what was before."""
    try:
        all_given = _inputs(document)
    except InvalidRequest as error:
        return noted(wrong, error)
    for given in all_given:
        try:
            request.inputs.append(_input(given))
        except InvalidRequest as error:
            wrong = noted(wrong, error)
    return wrong


def _inputs(document: dict[str, Any]) -> list[Any]:
    if "inputs" not in document:
        raise _refuse(NO_INPUTS)
    given = document["inputs"]
    if not isinstance(given, list):
        found = "a list of other values" if isinstance(given, NumberArray) else kind_of(given)
        raise _refuse(INPUT_UNREADABLE, f"inputs: expected a list of objects, got {found}")
    check_count("inputs", given)
    return given


def check_count(name: str, items: Sized) -> None:
    """Refuse a list whose items are read one by one and that has more of them than any honest request.

    Raises:
        InvalidRequest: the list has more than :data:`MAX_MEMBERS` items.
    """
    if len(items) > MAX_MEMBERS:
        raise _refuse(INPUT_UNREADABLE, f"{name}: expected at most {MAX_MEMBERS}, got {len(items)}")


def _input(given: Any) -> InferInput:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise _refuse(INPUT_UNREADABLE, "expected an object with a name for each input")
    name, shape, datatype = given["name"], given.get("shape"), given.get("datatype")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size <= MOST_SIZE for size in shape):
        raise _refuse(INPUT_UNREADABLE, f"input {name}: shape must be a list of whole numbers, 0 or more")
    if not isinstance(datatype, str):
        raise _refuse(INPUT_UNREADABLE, f"input {name}: datatype must be a text such as FP32")
    read = InferInput(name, datatype, tuple(shape), None, _parameters(given))
    if "data" in given:
        read.contents = read_contents(read, given["data"])
    return read


def read_contents(read: InferInput, data: Any) -> Contents | None:
    """Take an input's elements from JSON; None where there are none although the shape has some.

    Raises:
        InvalidRequest: they are not those of the input's datatype, or it cannot be sent as JSON.
    """
    if isinstance(data, LargeData | NumberArray):
        contents = _large_contents(read, data)
        if contents is not None:
            return contents
        with json_errors():
            data = read_array(data) if isinstance(data, NumberArray) else data.as_list()
    if not isinstance(data, list):
        raise _refuse(INPUT_UNREADABLE, f"input {read.name}: data must be a list, got {kind_of(data)}")
    values = _flatten(data)
    if not values and 0 not in read.shape:
        # As if there were no data: the tensor may come behind the JSON.
        return None
    datatype = BY_NAME.get(read.datatype)
    if datatype is None:
        raise _refuse(UNSUPPORTED_PRECISION, f"input {read.name}: {read.datatype!r} is none of {', '.join(BY_NAME)}")
    allowed = ELEMENT_TYPES[datatype.contents_field]
    if allowed is NUMBER and str in (kinds := set(map(type, values))) and kinds <= NUMBER | {str}:
        values = [_NOT_FINITE.get(value, value) for value in values]
    strangers = set(map(type, values)) - allowed
    if strangers:
        detail = (
            f"input {read.name}: {datatype.name} data holds {', '.join(sorted(each.__name__ for each in strangers))}"
        )
        raise _refuse(INPUT_UNREADABLE, detail)
    return Contents(datatype.contents_field, values)


def _large_contents(read: InferInput, data: LargeData | NumberArray) -> Contents | None:
    """Read the numbers of a tensor of numbers; None for other values."""
    datatype = BY_NAME.get(read.datatype)
    kind = None if datatype is None else NUMBER_KINDS.get(datatype.contents_field)
    array = None if kind is None else data.numbers(kind)
    if datatype is None or array is None or not array.size:
        return None
    return Contents(datatype.contents_field, array)


def _flatten(data: list[Any]) -> list[Any]:
    """Give the elements depth first; lists and elements may be mixed on one level."""
    for _ in range(_DATA_DEPTH, _MAX_DEPTH + 1):
        kinds = set(map(type, data))
        if list not in kinds:
            return data
        if len(kinds) == 1:
            data = list(chain.from_iterable(data))
        else:
            data = list(chain.from_iterable(each if type(each) is list else (each,) for each in data))
    raise _refuse(TOO_DEEP, f"at most {_MAX_DEPTH} lists and objects may lie in each other")


def _assign_tail(request: InferRequest, tail: memoryview) -> None:
    """Give each input that has no data in the JSON its part of the bytes behind it, in order."""
    sizes: list[int | None] = []
    wrong: Gathered | None = None
    for given in request.inputs:
        try:
            sizes.append(_binary_size(given, len(tail), sole=len(request.inputs) == 1))
        except InvalidRequest as error:
            wrong = noted(wrong, error)
    if wrong:
        raise wrong.error()
    at = 0
    raw: list[Buffer | None] = []
    is_any_raw = False
    for given, size in zip(request.inputs, sizes, strict=True):
        if size is None:
            raw.append(None)
            continue
        if size > len(tail) - at:
            detail = f"input {given.name}: {size} bytes announced, {len(tail) - at} left"
            raise _refuse(BUFFER_EXCEEDED, detail)
        raw.append(tail[at : at + size])
        at += size
        is_any_raw = True
    if is_any_raw:
        request.raw_inputs = raw


def _binary_size(given: InferInput, tail_length: int, *, sole: bool) -> int | None:
    """Tell how many bytes of the tail are this input's, None where it has its data in the JSON or in shared memory."""
    if "shared_memory_region" in given.parameters and "binary_data_size" not in given.parameters:
        return None
    if "binary_data_size" in given.parameters:
        size = given.parameters["binary_data_size"]
        if given.contents is not None and len(given.contents.values):
            raise _refuse(CONTENTS_NOT_EMPTY, f"input {given.name} has both data and binary_data_size")
        given.contents = None
        if type(size) is not int or size < 0:
            raise _refuse(SIZE_INVALID, f"input {given.name}: expected a whole number, 0 or more, got {size!r}")
        return size
    if given.contents is not None:
        return None
    if given.datatype == BYTES.name:
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


# ----------------------------------------------------------------------
# Documents that differ from an earlier one in the numbers of their tensor alone: nothing else is parsed again
# ----------------------------------------------------------------------

_MOST_BYTES: Final = 1_024
"""Of a document without its numbers."""
_KEY: Final = b'"data":'


class _KnownDocument(NamedTuple):
    """What a document begins with behind the key, what it ends with, and what it means but for the numbers."""

    key: bytes
    end: bytes
    id: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    field: str
    types: frozenset[type]
    outputs: Sequence[RequestedOutput]


class KnownDocuments:
    """Remembers documents of one tensor of flat numbers with nothing said about it.

    Attributes:
        heads: those of documents whose tensors stand behind them.
        missed: how many were read since one was known; where all are others, ever fewer are looked at.
    """

    __slots__ = ("_known", "heads", "missed")

    def __init__(self) -> None:
        self._known: dict[bytes, _KnownDocument] = {}
        self.heads = KnownHeads()
        self.missed = 0

    def read(self, model: str, version: str, body: bytes) -> InferRequest | None:
        """Read a document that is known but for its numbers; None for any other, right or wrong."""
        at = body.find(_KEY, 0, _MOST_BYTES)
        known = self._known.get(body[:at]) if at > 0 else None
        if known is None:
            return None
        key, end, id_, name, datatype, shape, field, types, outputs = known
        if not (body.startswith(key, at) and body.endswith(end)):
            return None
        try:
            values = orjson.loads(body[at + len(key) : -len(end)])
        except orjson.JSONDecodeError:
            return None
        if type(values) is not list or not values or not types.issuperset(map(type, values)):
            return None
        self.missed = 0
        given = InferInput(name, datatype, shape, Contents(field, values, is_checked=True), {})
        return InferRequest(model, version, id_, {}, [given], [*outputs], [])

    def note(self, body: bytes, request: InferRequest) -> None:
        """Remember a document by what it was read as, if nothing but the numbers changes where other ones stand."""
        self.missed += 1
        if self.missed & (self.missed - 1) or len(request.inputs) != 1:
            return
        at = body.find(_KEY, 0, _MOST_BYTES)
        first, last = body.find(b"[", at), body.find(b"]", at)
        end = body[last + 1 :]
        if not 0 < at < first < last or first + len(end) > _MOST_BYTES:
            return
        if not _changes_alone(body[:first], body[first + 1 : last], end, request):
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[body[:at]] = _known(body[at:first], end, request)


def _known(key: bytes, end: bytes, request: InferRequest) -> _KnownDocument:
    (given,) = request.inputs
    field = BY_NAME[given.datatype].contents_field
    about = given.name, given.datatype, given.shape, field, ELEMENT_TYPES[field]
    return _KnownDocument(key, end, request.id, *about, tuple(request.outputs))


def _changes_alone(begin: bytes, numbers: bytes, end: bytes, request: InferRequest) -> bool:
    """Tell whether a document with every number twice means the same but for these, which are the tensor's then."""
    try:
        document = orjson.loads(b"%b[%b,%b]%b" % (begin, numbers, numbers, end))
    except orjson.JSONDecodeError:
        return False
    other = read_plain_request(request.model_name, request.model_version, document)
    if other is None or other.inputs[0].contents is None or request.inputs[0].contents is None:
        return False
    values = request.inputs[0].contents.values
    if other.inputs[0].contents.values != [*values, *values]:
        return False
    other.inputs[0].contents.values = values
    return other == request
