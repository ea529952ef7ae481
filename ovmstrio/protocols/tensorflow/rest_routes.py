"""TensorFlow Serving's REST API below ``/v1/models``: predict, status and metadata.

Predict bodies are in row or column format.

::

    {"instances": [element, ...]}                by rows, for a model of one input
    {"instances": [{name: value, ...}, ...]}     by rows, one object per row of the batch
    {"inputs": value}                            by columns, for a model of one input
    {"inputs": {name: value, ...}}               by columns, one tensor per name

The rules are OVMS's, per its documentation of the TensorFlow Serving REST API.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import ErrorList, InvalidRequest, ModelFailure, NotFound, ServerError
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.request import SEQUENCE_CONTROL, SEQUENCE_ID, Contents, InferInput, InferRequest
from ovmstrio.core.tensor import BY_NAME, BYTES, INVALID, RawTensor, from_bf16, to_bf16
from ovmstrio.encoding.base64_text import decode_base64
from ovmstrio.encoding.json_output import array_pieces, read_raw
from ovmstrio.encoding.json_reader import AT_ONCE_BYTES, check_arrays, without_arrays
from ovmstrio.encoding.number_arrays import NumberArray, read_numbers
from ovmstrio.protocols.kserve.large_document import LARGE_BYTES, count_lists, read_large_member
from ovmstrio.protocols.kserve.rest_requests import (
    INPUT_UNREADABLE,
    NUMBER_KINDS,
    TOO_DEEP,
    check_count,
    document_in_slices,
    json_errors,
    json_kind,
    parse_document,
)
from ovmstrio.protocols.kserve.rest_routes import check_version
from ovmstrio.protocols.tensorflow.types import BY_DATATYPE
from ovmstrio.serving.interfaces import MODEL_MISSING, TENSORFLOW_REST
from ovmstrio.serving.ovms_errors import decompressed_call_body, make_admission, status_document
from ovmstrio.transport.http.responses import JSON_TYPE, json_response
from ovmstrio.transport.http.router import rule
from ovmstrio.util.slices import run_in_slices, run_to_end
from ovmstrio.util.truncation import cut, utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.request import Buffer, InferResponse
    from ovmstrio.core.tensor import Datatype, Tensor, TensorSpec
    from ovmstrio.encoding.number_arrays import NumberKind
    from ovmstrio.protocols.kserve.large_document import LargeData
    from ovmstrio.serving.data_plane import DataPlane, ModelMetadata
    from ovmstrio.transport.http.router import Rule

# ----------------------------------------------------------------------
# Predict requests
# ----------------------------------------------------------------------

# Large numeric bodies

_MAX_LEVELS: Final = 32
_MIN_BYTES_PER_LIST: Final = 128  # Bytes per list from which on visiting every list is cheap compared to the numbers
_ROWS: Final = "instances"
_COLUMNS: Final = "inputs"


def read_large_predict(body: bytes, inputs: Sequence[TensorSpec]) -> tuple[bool, list[InferInput]] | None:
    """Parse a large numeric body: whether it is in rows, and the inputs; None for any other body."""
    lists = count_lists(body)
    if lists > len(body) // _MIN_BYTES_PER_LIST:
        return None
    member = read_large_member(body, (_ROWS, _COLUMNS), _MAX_LEVELS)
    if member is None:
        return None
    by_rows = member.name == _ROWS
    given: Mapping[str, LargeData] = member.members
    if member.data is not None:
        if len(inputs) != 1:
            return None
        given = {inputs[0].name: member.data}
    elif by_rows:
        return None
    read = _read_all(given, {spec.name: spec.datatype for spec in inputs}, lists)
    return None if not read else (by_rows, read)


def _read_all(given: Mapping[str, LargeData], datatypes: Mapping[str, Datatype], lists: int) -> list[InferInput] | None:
    seen, inputs = 0, []
    for name, data in given.items():
        nesting = data.nesting(lists)
        read = (
            None
            if nesting is None or name not in datatypes
            else _read_large_input(name, datatypes[name], data, nesting[0])
        )
        if nesting is None or read is None:
            return None
        seen += nesting[1]
        inputs.append(read)
    # Otherwise there are lists among the numbers, or elsewhere in the document.
    return inputs if seen == lists else None


def _read_arrays(name: str, datatype: Datatype, value: Any) -> InferInput | None:
    """Return an input of number arrays, or of rows that are number arrays; None otherwise."""
    kind = _kind_of(datatype)
    array = None if kind is None else read_numbers(value, kind)
    return None if array is None else _input(name, datatype, array.ravel(), array.shape)


def _read_large_input(name: str, datatype: Datatype, data: LargeData, shape: tuple[int, ...]) -> InferInput | None:
    kind = _kind_of(datatype)
    array = None if kind is None else data.numbers(kind)
    return None if array is None or array.size != prod(shape) else _input(name, datatype, array, shape)


def _kind_of(datatype: Datatype) -> NumberKind | None:
    return None if datatype.name == "BF16" else NUMBER_KINDS.get(datatype.contents_field)


def _input(name: str, datatype: Datatype, array: Array, shape: tuple[int, ...]) -> InferInput:
    if datatype.numpy.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(datatype.numpy)
    return InferInput(name, datatype.name, shape, Contents(datatype.contents_field, array))


# General reader

MAX_RANK: Final = 98
"""Maximum nesting of a tensor's lists; the document and its inputs take two of a hundred levels."""


@dataclass(frozen=True, slots=True)
class _Nested:
    """Elements of a nested value in order, their Python types, and the shape."""

    shape: tuple[int, ...]
    elements: list[Any]
    kinds: set[type]


def flatten(value: Any) -> _Nested | None:
    """Flatten a value; a scalar has rank 0.  None if ragged or mixed; raise ``InvalidRequest`` if too deep."""
    shape: list[int] = []
    level = [value]
    while list in (kinds := set(map(type, level))):
        sizes = set(map(len, level)) if len(kinds) == 1 else set()
        if len(sizes) != 1:
            return None
        shape.append(sizes.pop())
        if len(shape) > MAX_RANK:
            raise InvalidRequest(f"{TOO_DEEP} - expected at most {MAX_RANK} nested lists")
        level = list(chain.from_iterable(level))
    return _Nested(tuple(shape), level, kinds)


_NUMBERS: Final = frozenset({int, float})
_TEXTS: Final = frozenset({str, dict})
_TEXT_DATATYPES: Final = frozenset({"BYTES", "UINT8"})
_KIND_NAMES: Final = {bool: "boolean", dict: "object", float: "number", int: "number", str: "text", type(None): "null"}


class _Unreadable(ValueError):
    """Error: elements do not fit the datatype."""


def _is_binary(value: Any) -> bool:
    """Return whether a value is ``{"b64": text}``, a single BYTES element."""
    return type(value) is dict and len(value) == 1 and type(value.get("b64")) is str


def _guess_datatype(nested: _Nested) -> Datatype:
    """Return a datatype for an unknown input, which the model refuses later."""
    if nested.kinds <= {int}:
        return BY_NAME["INT32"]
    if nested.kinds <= {bool}:
        return BY_NAME["BOOL"]
    return BYTES if nested.kinds <= _TEXTS else BY_NAME["FP32"]


def read_elements(nested: _Nested, datatype: Datatype) -> tuple[Datatype, Contents]:
    """Return the contents of an input, as BYTES if strings or encoded bytes were sent."""
    kinds = nested.kinds
    if not kinds:
        return datatype, Contents(datatype.contents_field, [])
    if kinds <= _TEXTS:
        return BYTES, Contents(BYTES.contents_field, _texts(nested, datatype))
    if kinds <= _NUMBERS and datatype is not BYTES and datatype.name != "BOOL":
        return datatype, Contents(datatype.contents_field, _numbers(nested, datatype))
    if kinds == {bool} and datatype.name == "BOOL":
        return datatype, Contents(datatype.contents_field, nested.elements)
    found = ", ".join(sorted({_KIND_NAMES[kind] for kind in kinds}))
    raise _Unreadable(f"expected elements of {datatype.name}, got {found}")


def _texts(nested: _Nested, datatype: Datatype) -> list[bytes]:
    if str in nested.kinds and datatype.name not in _TEXT_DATATYPES:
        raise _Unreadable(f'expected elements of {datatype.name} or {{"b64": ...}}, got text')
    return [_bytes(element) for element in nested.elements]


def _bytes(element: str | dict[str, Any]) -> bytes:
    if isinstance(element, str):
        return utf8(element)
    if not _is_binary(element):
        raise _Unreadable('expected {"b64": text}, got another object')
    try:
        return decode_base64(element["b64"])
    except ValueError as error:
        raise _Unreadable(f"b64 cannot be decoded: {error}") from None


def _numbers(nested: _Nested, datatype: Datatype) -> Any:
    if datatype.name == "BF16":
        return to_bf16(_floats(nested, np.dtype(np.float32)))
    if datatype.numpy.kind == "f":
        return _floats(nested, datatype.numpy)
    if nested.kinds == {int}:
        return nested.elements
    try:
        return list(map(int, nested.elements))
    except (OverflowError, ValueError) as error:
        raise _Unreadable(f"{datatype.name} has no such value: {error}") from None


def _floats(nested: _Nested, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        try:
            return np.array(nested.elements, dtype)
        except OverflowError as error:
            raise _Unreadable(str(error)) from None


_UNKNOWN_ORDER: Final = "Invalid JSON structure. Could not detect row or column format"
_INSTANCES_NO_ARRAY: Final = "Invalid JSON structure. Nonamed instance is not an array."
_INSTANCE_NO_OBJECT: Final = "Invalid JSON structure. One of named instances is not a JSON object."
_NO_INSTANCES: Final = "Invalid JSON structure. Missing instances in row format"
_NEITHER_NAMED_NOR_NONAMED: Final = "Could not detect neither named or nonamed format"
_INSTANCE_UNREADABLE: Final = "Could not parse instance content. Not valid ndarray detected"
_BATCH_SIZES_DIFFER: Final = "Invalid JSON structure. Request inputs have different batch sizes"
_INPUTS_NO_OBJECT: Final = "Invalid JSON structure. One of inputs is not a JSON object."
_NO_INPUTS: Final = "Invalid JSON structure. Missing inputs in column format"
_NO_SINGLE_INPUT: Final = "Inputs inside buffer do not match the expected format"

_ROW_RANK: Final = 2
_SEQUENCE_INPUTS: Final = {SEQUENCE_ID: BY_NAME["UINT64"], SEQUENCE_CONTROL: BY_NAME["UINT32"]}


@dataclass(frozen=True, slots=True)
class PredictBody:
    """Parsed inputs; ``by_rows`` is the format of request and response."""

    by_rows: bool
    inputs: list[InferInput]


def read_predict_body(body: bytes, inputs: Sequence[TensorSpec]) -> PredictBody:
    """Parse a body; ``inputs`` of the model give the datatypes.  Raise ``MalformedJson`` or ``InvalidRequest``."""
    if len(body) > AT_ONCE_BYTES:
        return run_to_end(read_large_predict_body(body, inputs))
    large = read_large_predict(body, inputs) if len(body) >= LARGE_BYTES else None
    if large is not None:
        return PredictBody(*large)
    return _read_body(parse_document(body), inputs)


def read_large_predict_body(body: Buffer, inputs: Sequence[TensorSpec]) -> Generator[None, None, PredictBody]:
    """Parse a body in slices, as :func:`read_predict_body`."""
    arrays: list[NumberArray] = []
    document = yield from document_in_slices(body, arrays)
    read = _read_body(document, inputs)
    with json_errors():
        yield from check_arrays(arrays)
    return read


def _read_body(document: dict[str, Any], inputs: Sequence[TensorSpec]) -> PredictBody:
    by_rows = "instances" in document
    if by_rows == ("inputs" in document):
        raise _refuse(_UNKNOWN_ORDER, "expected either instances or inputs")
    if by_rows:
        return PredictBody(by_rows, _rows(document["instances"], inputs))
    return PredictBody(by_rows, _columns(document["inputs"], inputs))


def _refuse(text: str, detail: str = "") -> InvalidRequest:
    return InvalidRequest(f"{text} - {detail}" if detail else text)


def _rows(instances: Any, inputs: Sequence[TensorSpec]) -> list[InferInput]:
    reader = _InputReader(inputs, _INSTANCE_UNREADABLE, by_rows=True)
    if isinstance(instances, NumberArray):
        shape = instances.shape()
        if shape is not None:
            check_count("instances", range(shape[0]))
            return [reader.read(_sole_name(inputs), instances)]
        instances = _as_lists(instances)
    if not isinstance(instances, list):
        raise _refuse(_INSTANCES_NO_ARRAY, f"got {json_kind(instances)}")
    if not instances:
        raise _refuse(_NO_INSTANCES)
    check_count("instances", instances)
    first = instances[0]
    if isinstance(first, dict) and not _is_binary(first):
        return reader.read_all(_named_rows(instances))
    if first is None or (isinstance(first, bool) and not _takes_booleans(inputs)):
        raise _refuse(_NEITHER_NAMED_NOR_NONAMED, f"the first instance is {json_kind(first)}")
    return [reader.read(_sole_name(inputs), instances)]


def _named_rows(instances: list[Any]) -> dict[str, list[Any]]:
    """Return the rows' values by input name."""
    if set(map(type, instances)) != {dict}:
        raise _refuse(_INSTANCE_NO_OBJECT)
    if not all(instances):
        raise _refuse(_INSTANCE_UNREADABLE, "an instance has no inputs")
    names = dict.fromkeys(chain.from_iterable(instances))
    if set(map(len, instances)) != {len(names)}:
        missing = next(name for name in names if not all(name in instance for instance in instances))
        raise _refuse(_BATCH_SIZES_DIFFER, f"not every instance has the input {cut(missing, 80)}")
    return {name: list(map(itemgetter(name), instances)) for name in names}


def _columns(given: Any, inputs: Sequence[TensorSpec]) -> list[InferInput]:
    reader = _InputReader(inputs, INPUT_UNREADABLE, by_rows=False)
    if isinstance(given, dict):
        if not given:
            raise _refuse(_NO_INPUTS)
        return reader.read_all(given)
    is_scalar = (type(given) in {int, float} and len(inputs) == 1) or (type(given) is bool and _takes_booleans(inputs))
    if not is_scalar and not isinstance(given, list | NumberArray):
        raise _refuse(_INPUTS_NO_OBJECT, f"got {json_kind(given)}")
    return [reader.read(_sole_name(inputs), given)]


def _as_lists(value: Any) -> Any:
    with json_errors():
        return without_arrays(value)


def _sole_name(inputs: Sequence[TensorSpec]) -> str:
    if len(inputs) != 1:
        names = ", ".join(spec.name for spec in inputs)
        raise _refuse(_NO_SINGLE_INPUT, f"the model has {len(inputs)} inputs; send values by name: {names}")
    return inputs[0].name


def _takes_booleans(inputs: Sequence[TensorSpec]) -> bool:
    return len(inputs) == 1 and inputs[0].datatype.name == "BOOL"


@dataclass(slots=True)
class _InputReader:
    """Parser of the inputs of one call; ``refusal`` is the prefix of error messages."""

    specs: Sequence[TensorSpec]
    refusal: str
    by_rows: bool
    _known: dict[str, Datatype] = field(init=False)

    def __post_init__(self) -> None:
        self._known = {spec.name: spec.datatype for spec in self.specs if spec.datatype is not INVALID}

    def read_all(self, values: Mapping[str, Any]) -> list[InferInput]:
        errors, inputs = ErrorList(), []
        for name, value in values.items():
            with errors:
                inputs.append(self.read(name, value))
        errors.raise_if_any()
        return inputs

    def read(self, name: str, value: Any) -> InferInput:
        datatype = self._known.get(name)
        numbers = None if datatype is None else _read_arrays(name, datatype, value)
        if numbers is not None:
            return numbers
        nested = flatten(_as_lists(value))
        if nested is None:
            raise self._refuse(name, "ragged nested list, or lists mixed with elements")
        if datatype is None and name in _SEQUENCE_INPUTS:
            datatype = self._sequence_datatype(name, nested)
        try:
            sent, contents = read_elements(nested, datatype or _guess_datatype(nested))
        except _Unreadable as error:
            raise self._refuse(name, str(error)) from None
        return InferInput(name, sent.name, nested.shape, contents)

    def _sequence_datatype(self, name: str, nested: _Nested) -> Datatype:
        """Return the datatype of a sequence control input, which has a single unsigned integer."""
        rank = len(nested.shape)
        flat = rank == _ROW_RANK if self.by_rows else rank < _ROW_RANK
        if not flat or nested.kinds - {int} or any(element < 0 for element in nested.elements):
            raise self._refuse(name, "expected a list of one integer, 0 or more")
        return _SEQUENCE_INPUTS[name]

    def _refuse(self, name: str, detail: str) -> InvalidRequest:
        return _refuse(self.refusal, f"input {cut(name, 80)}: {detail}")


# ----------------------------------------------------------------------
# Responses and routes
# ----------------------------------------------------------------------

# Predict responses

NOT_JSON: Final = "Response parsing to JSON error"

_BYTES_SUFFIX: Final = "_bytes"
_WORDS: Final = {"nan": b"NaN", "inf": b"Infinity", "-inf": b"-Infinity"}

Array = np.ndarray[Any, Any]


def encode_predict_response(response: InferResponse, *, by_rows: bool) -> HttpAnswer:
    """Encode a response; raise ``ModelFailure`` for row format if outputs lack a common batch dimension."""
    outputs = {output.name: _array(output) for output in response.outputs}
    pieces = [b'{"predictions":' if by_rows else b'{"outputs":', *(_by_rows if by_rows else _by_columns)(outputs), b"}"]
    return HttpAnswer(200, JSON_TYPE, b"".join(pieces))


def _array(output: Tensor | RawTensor) -> Array:
    """Return an output's elements: numbers, or the JSON form of BYTES."""
    tensor = read_raw(output) if isinstance(output, RawTensor) else output
    array = tensor.array
    if array.size == prod(output.shape):
        array = array.reshape(output.shape)
    if array.dtype.hasobject:
        return _shown_texts(array, output.name)
    return from_bf16(array) if tensor.datatype.name == "BF16" else array


def _shown_texts(array: Array, name: str) -> Array:
    shown = np.empty(array.size, object)
    elements = array.reshape(-1).tolist()
    try:
        texts = None if name.endswith(_BYTES_SUFFIX) else [element.decode() for element in elements]
    except UnicodeDecodeError:
        texts = None
    shown[:] = texts if texts is not None else [{"b64": b64encode(element).decode()} for element in elements]
    return shown.reshape(array.shape)


def _by_columns(outputs: dict[str, Array]) -> Iterator[bytes]:
    if len(outputs) == 1:
        (array,) = outputs.values()
        yield from _printed(array)
        return
    before = b"{"
    for name, array in outputs.items():
        yield before + orjson.dumps(name) + b":"
        yield from _printed(array)
        before = b","
    yield b"}" if outputs else b"{}"


def _printed(array: Array) -> Iterable[bytes]:
    return array_pieces(np.ascontiguousarray(array), _print) if array.ndim else [_print(array)]


def _print(array: Array) -> bytes:
    return orjson.dumps(_printable(array), option=orjson.OPT_SERIALIZE_NUMPY)


def _by_rows(outputs: dict[str, Array]) -> Iterable[bytes]:
    counts = {array.shape[:1] for array in outputs.values()}
    if len(counts) != 1 or () in counts:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
        raise ModelFailure(
            f"{NOT_JSON} - row format requires outputs of equal batch size, use inputs instead of instances: {shapes}"
        )
    if len(outputs) == 1:
        (array,) = outputs.values()
        return _printed(array)
    rows = zip(*([_printable(array[row, ...]) for row in range(len(array))] for array in outputs.values()), strict=True)
    printed = [orjson.dumps(dict(zip(outputs, row, strict=True)), option=orjson.OPT_SERIALIZE_NUMPY) for row in rows]
    return [b"[", b",".join(printed), b"]"]


def _printable(array: Array) -> Any:
    """Return a value that orjson prints as the elements in nested lists."""
    if array.dtype.hasobject:
        return array.tolist()
    if array.dtype.kind == "f":
        finite = np.isfinite(array)
        if not finite.all():
            return _with_words(array, array[~finite])
    # orjson does not print zero-dimensional arrays.
    return np.ascontiguousarray(array) if array.ndim else array[()]


def _with_words(array: Array, words: Array) -> orjson.Fragment:
    """Encode an array with non-finite numbers, which orjson prints as null."""
    printed = orjson.dumps(np.ascontiguousarray(array).reshape(array.shape or 1), option=orjson.OPT_SERIALIZE_NUMPY)
    if not array.ndim:
        printed = printed[1:-1]
    pieces = printed.split(b"null")
    printed_words = [_WORDS[word] for word in map(str, words.tolist())]
    return orjson.Fragment(
        b"".join(piece for pair in zip(pieces, [*printed_words, b""], strict=True) for piece in pair)
    )


# Routes


async def _answer_predict(plane: DataPlane, model: str, version: str, body: bytes) -> HttpAnswer:
    """Infer and encode the response; looks up the servable before it parses the body, as OVMS does."""
    check_version(version)
    described = await plane.describe(model, version, TENSORFLOW_REST)
    if described.has_streams:
        # JSON has no datatypes, and graphs do not declare any.
        raise NotFound(MODEL_MISSING)
    try:
        if len(body) <= AT_ONCE_BYTES:
            read = read_predict_body(body, described.inputs)
        else:
            read = await run_in_slices(read_large_predict_body(body, described.inputs))
    except ServerError as error:
        plane.count_unreadable_call(model, version, error, TENSORFLOW_REST, len(body))
        raise

    def render(response: InferResponse) -> tuple[HttpAnswer, int]:
        answer = encode_predict_response(response, by_rows=read.by_rows)
        if response.parameters:
            answer = answer.with_headers(response.headers)
        return answer, len(answer.content)

    request = InferRequest(model, version, inputs=read.inputs, received=len(body))
    return await plane.infer(request, TENSORFLOW_REST, render)


_NO_RESOURCE: Final = "Requested REST resource not found"
_TYPE: Final = "type.googleapis.com/tensorflow.serving.SignatureDefMap"


def _metadata_document(known: ModelMetadata, version: str) -> dict[str, Any]:
    """Return the document of one version; clients index every key, so defaults are included."""
    signature = {"inputs": _tensors(known.inputs), "outputs": _tensors(known.outputs), "methodName": "", "defaults": {}}
    definitions = {"@type": _TYPE, "signatureDef": {"serving_default": signature}}
    return {
        "modelSpec": {"name": known.name, "signatureName": "", "version": version},
        "metadata": {"signature_def": definitions},
    }


def _tensors(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {spec.name: _tensor(spec) for spec in specs}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    sizes = [{"size": str(size), "name": ""} for size in spec.reported_shape]
    row = BY_DATATYPE.get(spec.datatype.name)
    dtype = "DT_INVALID" if row is None else row.name
    return {"dtype": dtype, "tensorShape": {"dim": sizes, "unknownRank": False}, "name": spec.name}


def tensorflow_rules(
    plane: DataPlane, max_body_bytes: int, extra_status_fields: Callable[[str], Mapping[str, Any]] = lambda _: {}
) -> list[Rule]:
    """Return the routes; labels are ignored.

    ``extra_status_fields`` returns additional status fields of a name, for another API that shares this path.
    """

    async def predict(request: HttpRequest, model: str, version: str = "", label: str = "") -> HttpAnswer:
        del label
        body = await decompressed_call_body(
            plane, request, model, version, limit=max_body_bytes, api_interface=TENSORFLOW_REST
        )
        return await _answer_predict(plane, model, version, body)

    async def unsupported(request: HttpRequest, model: str, version: str = "", label: str = "") -> HttpAnswer:
        del model, version, label
        verb = request.path.rpartition(":")[2]
        raise NotFound(f"{_NO_RESOURCE} - {verb} is not supported; use predict")

    async def status(_: HttpRequest, model: str, version: str = "", label: str = "") -> HttpAnswer:
        del label
        number = int(check_version(version) or 0)
        document = status_document(plane.model_status(model, number, TENSORFLOW_REST))
        return json_response(document if version else {**document, **extra_status_fields(model)})

    async def metadata(_: HttpRequest, model: str, version: str = "", label: str = "") -> HttpAnswer:
        del label
        known = plane.model_metadata(model, check_version(version), TENSORFLOW_REST)
        return json_response(_metadata_document(known, version.lstrip("0") or known.versions[-1]))

    name = "/v1/models/<model>"
    servables = (name, f"{name}/versions/<number:version>", f"{name}/labels/<label>")
    call: dict[str, Any] = {"is_hot": True, "admit": make_admission(plane, TENSORFLOW_REST), "need": Permission.INFER}
    return [
        *(rule(f"{each}:predict", "POST", predict, **call) for each in servables),
        *(
            rule(f"{each}:{verb}", "POST", unsupported, need=Permission.INFER)
            for verb in ("classify", "regress")
            for each in servables
        ),
        *(rule(each, "GET", status, is_hot=True, need=Permission.ABOUT) for each in servables),
        *(rule(f"{each}/metadata", "GET", metadata, is_hot=True, need=Permission.ABOUT) for each in servables),
    ]
