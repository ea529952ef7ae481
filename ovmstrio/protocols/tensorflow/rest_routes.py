"""TensorFlow Serving's REST API below ``/v1/models``: responses, and routes of predict, status and metadata.

Predict responses have ``predictions`` by rows or ``outputs`` by columns; a single output has no name.  BYTES are
strings, or ``{"b64": text}`` if the output's name ends in ``_bytes`` or an element is not UTF-8.  Floats are printed as
the shortest text that reads back as the same number; NaN and infinities are the bare words ``NaN``, ``Infinity`` and
``-Infinity``, as in TensorFlow Serving.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import orjson

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import InvalidRequest, MethodNotAllowed, ModelFailure, NotFound, ServerError
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import RawTensor, from_bf16
from ovmstrio.encoding.json_output import array_pieces, read_raw
from ovmstrio.encoding.json_reader import AT_ONCE_BYTES
from ovmstrio.protocols.kserve.rest_responses import check_version
from ovmstrio.protocols.tensorflow.rest_requests import read_large_predict_body, read_predict_body
from ovmstrio.protocols.tensorflow.types import BY_DATATYPE
from ovmstrio.serving.interfaces import MODEL_MISSING, TENSORFLOW_REST
from ovmstrio.serving.ovms_errors import (
    INVALID_URL,
    UNSUPPORTED_METHOD,
    decompressed_call_body,
    make_admission,
    status_document,
)
from ovmstrio.transport.http.responses import JSON_TYPE, json_response
from ovmstrio.transport.http.router import rule
from ovmstrio.util.slices import run_in_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.request import InferResponse
    from ovmstrio.core.tensor import Tensor, TensorSpec
    from ovmstrio.serving.data_plane import DataPlane, ModelMetadata
    from ovmstrio.transport.http.router import Rule

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
        return _texts(array, output.name)
    return from_bf16(array) if tensor.datatype.name == "BF16" else array


def _texts(array: Array, name: str) -> Array:
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
        return answer, len(answer.content)

    request = InferRequest(model, version, inputs=read.inputs, received=len(body))
    return await plane.infer(request, TENSORFLOW_REST, render)


_Operation = Literal["predict", "status", "metadata"]

_NO_RESOURCE: Final = "Requested REST resource not found"

_SERVABLE: Final = r"(?P<model>[^/]+?)(?:/versions/(?P<version>[0-9]+)|/labels/[^/:]+)?"
_CALL: Final = re.compile(rf"{_SERVABLE}:(?P<verb>predict|classify|regress)")
_INFO: Final = re.compile(rf"{_SERVABLE}(?P<metadata>/metadata)?/?")


@dataclass(frozen=True, slots=True)
class _ModelTarget:
    """Operation and servable of a path; ``version`` is empty for the default version."""

    operation: _Operation
    model: str
    version: str


def _read_target(method: str, path: str) -> _ModelTarget:
    """Parse the path after ``/v1/models/``."""
    match, allowed_method = _CALL.fullmatch(path), "POST"
    if match is None:
        match, allowed_method = _INFO.fullmatch(path), "GET"
    if match is None:
        raise InvalidRequest(f"{INVALID_URL} - {method} /v1/models/{path}")
    if (method == "POST") != (allowed_method == "POST"):
        raise MethodNotAllowed(f"{UNSUPPORTED_METHOD} - {method} /v1/models/{path}; use {allowed_method}")
    operation = _operation(match.groupdict())
    return _ModelTarget(operation, match["model"], check_version(match["version"] or ""))


def _operation(found: dict[str, str | None]) -> _Operation:
    verb = found.get("verb")
    if verb is None:
        return "metadata" if found["metadata"] else "status"
    if verb != "predict":
        raise NotFound(f"{_NO_RESOURCE} - {verb} is not supported; use predict")
    return "predict"


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
    plane: DataPlane, max_body_bytes: int, further: Callable[[str], Mapping[str, Any]] = lambda _: {}
) -> list[Rule]:
    """Return the routes; paths other than the common predict paths are parsed here.

    A colon separates the operation, and OVMS reports a wrong method even for unknown servables.  ``further`` returns
    additional status fields of a name, for another API that shares this path.
    """

    async def predict(request: HttpRequest, model: str, version: str = "") -> HttpAnswer:
        body = await decompressed_call_body(plane, request, model, version, limit=max_body_bytes, door=TENSORFLOW_REST)
        return await _answer_predict(plane, model, version, body)

    async def answer(request: HttpRequest, path: str) -> HttpAnswer:
        target = _read_target(request.method, path)
        if target.operation != "predict":
            return _describe(plane, target, further)
        return await predict(request, target.model, target.version)

    admit = make_admission(plane, TENSORFLOW_REST)
    return [
        rule("/v1/models/<model>:predict", "POST", predict, is_hot=True, admit=admit, need=Permission.INFER),
        rule(
            "/v1/models/<model>/versions/<number:version>:predict",
            "POST",
            predict,
            is_hot=True,
            admit=admit,
            need=Permission.INFER,
        ),
        rule("/v1/models/<path:path>", "GET", answer, is_hot=True, need=Permission.ABOUT),
        rule("/v1/models/<path:path>", "POST", answer, need=Permission.INFER),
    ]


def _describe(plane: DataPlane, target: _ModelTarget, further: Callable[[str], Mapping[str, Any]]) -> HttpAnswer:
    if target.operation == "status":
        status = status_document(plane.model_status(target.model, int(target.version or 0), TENSORFLOW_REST))
        return json_response(status if target.version else {**status, **further(target.model)})
    known = plane.model_metadata(target.model, target.version, TENSORFLOW_REST)
    version = target.version.lstrip("0")
    return json_response(_metadata_document(known, version or known.versions[-1]))
