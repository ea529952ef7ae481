"""HTTP paths of a pipeline.

::

    POST /{name}/{method}     pipeline request with any method name
    GET  /health              200 if ready, otherwise 503 with the reason
    GET  /metrics             metrics in Prometheus's text format
    GET  /trace               figures of Ops and channels for a live view

Below the pipeline's name on a shared server, ``/{method}`` is enough.

The JSON is that of the gateway of Paddle Serving, byte for byte: every field in order of its number, without spaces;
64-bit numbers are strings, bytes are base64, and HTML characters are escaped.
"""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson
from google.protobuf.json_format import ParseDict, ParseError

from ovmstrio.core.callers import Permission
from ovmstrio.core.errors import ErrorList, InvalidRequest, PayloadTooLarge, ServerError
from ovmstrio.core.events import set_failure
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.tensor import BY_NAME, Tensor
from ovmstrio.encoding.json_output import json_values
from ovmstrio.encoding.json_reader import (
    AT_ONCE_BYTES,
    LONG_STRINGS,
    MAX_MEMBERS,
    JsonLimitExceeded,
    JsonSyntaxError,
    check_arrays,
    parse_at_once,
    read_json,
    without_arrays,
)
from ovmstrio.encoding.messages import TENSOR
from ovmstrio.encoding.number_arrays import NumberArray
from ovmstrio.ops.messages import (
    CustomExceptionCode,
    PipelineRequest,
    PipelineTensor,
    response_to_message,
    tensor_from_message,
)
from ovmstrio.serving.interfaces import PADDLE_HTTP
from ovmstrio.serving.ovms_errors import decompressed_body
from ovmstrio.telemetry.metrics import CONTENT_TYPE
from ovmstrio.transport.http import responses as answers
from ovmstrio.transport.http.responses import JSON_TYPE, json_response
from ovmstrio.transport.http.router import Router, Rule, rule
from ovmstrio.transport.statuses import error_status
from ovmstrio.util.slices import run_in_slices, run_to_end
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import Generator

    from ovmstrio.auth.gate import Gate
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.core.service import HttpRoutes
    from ovmstrio.core.tensor import Array
    from ovmstrio.ops.messages import PipelineResponse
    from ovmstrio.ops.op_service import OpService
    from ovmstrio.serving.data_plane import DataPlane

# ----------------------------------------------------------------------
# JSON codec of pipeline requests and responses, byte for byte as the gateway of Paddle Serving writes them
# ----------------------------------------------------------------------

_INT64: Final = range(-(2**63), 2**63)
_MAX_DIGITS: Final = 100
_AT_ONCE_BYTES: Final = 8 * 1024
"""Larger bodies may hold so many tensors that parsing blocks the event loop."""


async def parse_request_async(body: bytes, name: str, method: str) -> PipelineRequest:
    """Parse a body like :func:`parse_request`, in a worker thread if it is large; no checkpoint for small bodies."""
    if len(body) <= _AT_ONCE_BYTES:
        return parse_request(body, name, method)
    return await run_in_slices(_request_in_slices(body, name, method))


def parse_request(body: bytes, name: str, method: str) -> PipelineRequest:
    """Parse a body, whose name and method the arguments override; InvalidRequest lists all malformed fields."""
    return run_to_end(_request_in_slices(body, name, method))


def _request_in_slices(body: bytes, name: str, method: str) -> Generator[None, None, PipelineRequest]:
    arrays: list[NumberArray] = []
    try:
        document = yield from _document_in_slices(body, arrays)
        request = yield from _read_document(document, PipelineRequest(name=name, method=method))
        yield from check_arrays(arrays)
    except (JsonSyntaxError, JsonLimitExceeded) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    return request


def _document_in_slices(body: bytes, arrays: list[NumberArray]) -> Generator[None, None, dict[str, Any]]:
    if not body or body.isspace():
        return {}
    if len(body) <= AT_ONCE_BYTES:
        parsed = parse_at_once(body)
    else:
        parsed = yield from read_json(body, LONG_STRINGS, arrays=arrays)
    document = {} if parsed is None else parsed
    if not isinstance(document, dict):
        raise InvalidRequest(f"the body: expected a JSON object, got {_kind(document)}")
    return document


def _read_document(document: dict[str, Any], request: PipelineRequest) -> Generator[None, None, PipelineRequest]:
    wrong = ErrorList()
    with wrong:
        request.keys = [_read_text("key", key) for key in _list(document, "key")]
    with wrong:
        request.values = [_stringified(value) for value in _list(document, "value")]
    with wrong:
        for index, tensor in enumerate(_list(document, "tensors")):
            yield
            with wrong:
                request.tensors.append(_read_tensor(index, tensor))
    with wrong:
        request.logid = _integer("logid", document.get("logid"))
    with wrong:
        request.clientip = _read_text("clientip", document.get("clientip") or "")
    wrong.raise_if_any()
    return request


def _list(document: dict[str, Any], field: str) -> list[Any]:
    value = document.get(field)
    if value is None:
        return []
    if type(value) is NumberArray:
        value = without_arrays(value)
    if isinstance(value, list):
        if len(value) > MAX_MEMBERS:
            raise InvalidRequest(f"{field}: expected at most {MAX_MEMBERS}, got {len(value)}")
        return value
    if field == "value" and not isinstance(value, str):
        return [value]
    raise InvalidRequest(f"{field}: expected a list, got {_kind(value)}")


def _read_text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}: expected a string, got {_kind(value)}")
    return value


def _stringified(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(without_arrays(value)).decode()
    except orjson.JSONEncodeError:
        raise InvalidRequest("value: lists and objects are nested too deeply") from None


def _integer(field: str, value: Any) -> int:
    if value is None:
        return 0
    number = None
    if isinstance(value, str):
        digits = value.removeprefix("-")
        number = int(value) if digits.isdecimal() and value.isascii() and len(digits) <= _MAX_DIGITS else None
    elif isinstance(value, float):
        number = int(value) if value.is_integer() else None
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None or number not in _INT64:
        raise InvalidRequest(f"{field}: expected a 64-bit integer or its text, got {_kind(value)}")
    return number


def _read_tensor(index: int, value: Any) -> PipelineTensor:
    if not isinstance(value, dict):
        raise InvalidRequest(f"tensors[{index}]: expected an object, got {_kind(value)}")
    plain: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, given in value.items():
        read = _PLAIN_FIELDS.get(name)
        elements = None if read is None else read(given)
        if read is not None and elements is None and type(given) is NumberArray:
            # The array holds booleans, nulls or lists.
            given = without_arrays(given)  # noqa: PLW2901 - the same value
            elements = read(given)
        if elements is not None:
            plain[name] = elements
        elif name in _FIELDS:
            if isinstance(given, list) and len(given) > MAX_MEMBERS:
                raise InvalidRequest(
                    f"tensors[{index}]: {name}: expected JSON values of the field's type in a list of more than "
                    f"{MAX_MEMBERS}"
                )
            others[name] = given
    if not others:
        return PipelineTensor(**plain)
    try:
        read_others = tensor_from_message(ParseDict(without_arrays(others), TENSOR()))
    except (ParseError, OverflowError) as error:
        raise InvalidRequest(f"tensors[{index}]: {cut(str(error), _MAX_REASON_CHARACTERS)}") from None
    return replace(read_others, **plain)


def _integer_reader(bounds: range) -> Callable[[Any], list[int] | None]:
    """Return a reader of lists of integers or their strings; it returns None for any other list."""

    def read(value: Any) -> list[int] | None:
        if type(value) is NumberArray:
            array = value.numbers("i") if len(value.shape() or ()) == 1 else None
            is_inside = array is not None and int(array.min()) in bounds and int(array.max()) in bounds
            return array.tolist() if array is not None and is_inside else None
        if type(value) is not list:
            return None
        kinds = set(map(type, value))
        if kinds == {str} and _INTEGERS.fullmatch(",".join(value)):
            value, kinds = list(map(int, value)), {int}
        is_plain = not value or (kinds == {int} and min(value) in bounds and max(value) in bounds)
        return value if is_plain else None

    return read


def _float_reader(datatype: str) -> Callable[[Any], list[float] | None]:
    """Return a reader of lists of numbers, rounded to a datatype; it returns None for any other list."""
    dtype = np.dtype(datatype)

    def read(value: Any) -> list[float] | None:
        array: Array | None = None
        if type(value) is NumberArray:
            array = value.numbers("d") if len(value.shape() or ()) == 1 else None
        elif type(value) is list and {int, float, bool} >= set(map(type, value)):
            with suppress(OverflowError):
                array = np.array(value, np.float64)
        if array is None:
            return None
        with np.errstate(over="ignore"):
            rounded = array.astype(dtype)
        return rounded.tolist() if np.isfinite(rounded).all() else None

    return read


def _texts(value: Any) -> list[str] | None:
    if type(value) is not list or not {str} >= set(map(type, value)):
        return None
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        return None
    return value


_INTEGERS: Final = re.compile(r"(?:-?[0-9]{1,18},)*-?[0-9]{1,18}")
_MAX_REASON_CHARACTERS: Final = 300
_FIELDS: Final = frozenset(name for field in TENSOR.DESCRIPTOR.fields for name in (field.name, field.json_name))
_INT32: Final = range(-(2**31), 2**31)
_PLAIN_FIELDS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "int64_data": _integer_reader(_INT64),
    "int_data": _integer_reader(_INT32),
    "uint32_data": _integer_reader(range(2**32)),
    "shape": _integer_reader(_INT32),
    "lod": _integer_reader(_INT32),
    "float_data": _float_reader("f4"),
    "float64_data": _float_reader("f8"),
    "bool_data": lambda value: value if type(value) is list and {bool} >= set(map(type, value)) else None,
    "str_data": _texts,
    "elem_type": lambda value: value if type(value) is int and value in _INT32 else None,
    "name": lambda value: value if type(value) is str and value.isascii() else None,
}
"""Fast readers for fields as most clients write them; protobuf's slower parser takes all other values."""


def _kind(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        NumberArray: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    kind = "null" if value is None else kinds.get(type(value), "a number")
    return f"{kind} {value!r:.40}" if isinstance(value, str | int | float) and not isinstance(value, bool) else kind


_ESCAPES: Final[Mapping[bytes, bytes]] = {
    b"<": b"\\u003c",
    b">": b"\\u003e",
    b"&": b"\\u0026",
    "\u2028".encode(): b"\\u2028",
    "\u2029".encode(): b"\\u2029",
}
_ESCAPED: Final = re.compile(b"|".join(map(re.escape, _ESCAPES)))
_SHORT_ESCAPE: Final = re.compile(rb'\\(?:\\|"|[bf])')
_LONG_ESCAPES: Final[Mapping[bytes, bytes]] = {rb"\b": rb"\u0008", rb"\f": rb"\u000c"}

_OK: Final = 200
_PRODUCT_STATUS: Final = 422
_STATUS_BY_CODE: Final[Mapping[int, int]] = {
    0: _OK,
    3000: 501,
    3001: 503,
    3002: 404,
    3003: 503,
    4000: 500,
    5000: 400,
    6000: 504,
    7000: 500,
    8000: 400,
    9000: 502,
    10000: 500,
}

INVALID_ARGUMENT: Final = 3
"""gRPC status code of an unreadable body."""


def encode_response(message: Any) -> bytes:
    """Encode a response message."""
    tensors = b",".join(_tensor(tensor) for tensor in message.tensors)
    head = _dump(
        {
            "err_no": message.err_no,
            "err_msg": message.err_msg,
            "key": list(message.key),
            "value": list(message.value),
        }
    )
    return head[:-1] + b',"tensors":[' + tensors + b"]}"


def http_status(code: int) -> int:
    """Return the HTTP status of an ``err_no``; all product codes share one status."""
    return _STATUS_BY_CODE.get(code, _PRODUCT_STATUS)


def error_answer(text: str, status: int = 400, code: int = INVALID_ARGUMENT) -> HttpAnswer:
    """Return the gateway's error response."""
    body = _dump({"error": text, "code": code, "message": text, "details": []})
    return HttpAnswer(status, JSON_TYPE, body)


def text_answer(status: int, text: str) -> HttpAnswer:
    """Return a plain-text error response for a path or method."""
    headers = (("content-type", "text/plain; charset=utf-8"), ("x-content-type-options", "nosniff"))
    return HttpAnswer(status, headers, f"{text}\n".encode())


def _dump(value: Any) -> bytes:
    """Encode JSON with the escapes of the gateway's library."""
    plain = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    plain = _ESCAPED.sub(lambda match: _ESCAPES[match[0]], plain)
    return _SHORT_ESCAPE.sub(lambda match: _LONG_ESCAPES.get(match[0], match[0]), plain)


def _tensor(tensor: Any) -> bytes:
    fields: dict[str, Any] = {
        "int64_data": [str(number) for number in tensor.int64_data],
        "float_data": _numbers("FP32", tensor.float_data),
        "int_data": list(tensor.int_data),
        "float64_data": _numbers("FP64", tensor.float64_data),
        "uint32_data": list(tensor.uint32_data),
        "bool_data": list(tensor.bool_data),
        "complex64_data": _numbers("FP32", tensor.complex64_data),
        "complex128_data": _numbers("FP64", tensor.complex128_data),
        "str_data": list(tensor.str_data),
        "byte_data": b64encode(tensor.byte_data).decode(),
        "elem_type": tensor.elem_type,
        "shape": list(tensor.shape),
        "lod": list(tensor.lod),
        "name": tensor.name,
    }
    return _dump(fields)


def _numbers(datatype: str, values: Any) -> Any:
    """Return numbers with the digits of their datatype, and strings for non-finite values."""
    known = BY_NAME[datatype]
    return json_values(Tensor("", known, np.array(values, known.numpy)))


# ----------------------------------------------------------------------
# HTTP paths of a pipeline
# ----------------------------------------------------------------------


def record_failure(response: PipelineResponse) -> None:
    """Record the failure of a response in the current call event."""
    if response.err_no and not response.is_overload:
        set_failure(response.err_msg, code=_code_of(response.err_no))


def _code_of(number: int) -> str:
    try:
        return CustomExceptionCode(number).name
    except ValueError:
        return CustomExceptionCode.PRODUCT_ERROR.name


_RESOURCE_EXHAUSTED: Final = 8


class OpsMountKind:
    """Mount kind of Op pipelines, with a limit for decompressed bodies."""

    api_interface = PADDLE_HTTP

    def __init__(self, plane: DataPlane, max_body_bytes: int) -> None:
        self._plane = plane
        self._max_body_bytes = max_body_bytes

    def routes(self, name: str, service: Any, *, is_root: bool) -> HttpRoutes:
        """Return the paths of a pipeline."""
        del name, is_root
        return _PipelineRoutes(service, self._plane, self._max_body_bytes)

    def refuse(self, error: Exception) -> HttpAnswer:
        """Return the gateway's response for an error."""
        if not isinstance(error, ServerError):
            return answers.error_response(error)
        if isinstance(error, PayloadTooLarge):
            return error_answer(error.message, 413, _RESOURCE_EXHAUSTED)
        status = error_status(error)
        return error_answer(error.message, status.http, status.grpc.value).with_headers(
            answers.retry_after_headers(error)
        )

    def is_call(self, method: str, path: str) -> bool:
        """Return whether the request is a pipeline call."""
        del path
        return method == "POST"

    def need(self, method: str, path: str) -> Permission:
        """Return the required scope: none for health, metrics for metrics."""
        if self.is_call(method, path):
            return Permission.INFER
        return {"health": Permission.NOTHING, "metrics": Permission.METRICS}.get(path.strip("/"), Permission.ABOUT)


class _PipelineRoutes:
    def __init__(self, service: OpService, plane: DataPlane, max_body_bytes: int) -> None:
        self._service = service
        self._plane = plane
        self._max_body_bytes = max_body_bytes

    async def answer_http(self, request: HttpRequest) -> HttpAnswer | None:
        _, *parts = request.path.split("/")
        if request.method in {"GET", "HEAD"} and parts[1:] in ([], [""]) and parts:
            answer = self._operation(parts[0])
            if answer is not None:
                return answer
        target = _parse_path(parts, self._service.request_name if request.mount else None)
        if target is None:
            return None if request.mount else _path_error(request.method, parts)
        if request.method != "POST":
            return text_answer(405, "Method Not Allowed")
        return await self._infer(request, *target)

    async def _infer(self, request: HttpRequest, name: str, method: str) -> HttpAnswer:
        pipeline_request = await parse_request_async(
            await decompressed_body(request, self._max_body_bytes), name, method
        )
        pipeline_request.clientip = pipeline_request.clientip or request.client.host
        response = await self._service.answer(pipeline_request, math.inf)
        record_failure(response)
        message = response_to_message(response)
        by_code = http_status(message.err_no) if self._service.settings.http_status else 200
        return HttpAnswer(429 if response.is_overload else by_code, JSON_TYPE, encode_response(message))

    def _operation(self, name: str) -> HttpAnswer | None:
        if name == "health":
            return _health(self._plane)
        if name == "metrics":
            return _metrics(self._service.render_metrics)
        if name == "trace":
            snapshot = self._service.snapshot
            return text_answer(404, "Not Found") if snapshot is None else json_response(snapshot())
        return None


def _parse_path(parts: list[str], own: str | None) -> tuple[str, str] | None:
    """Return name and method of a path; below a mount the name is known.  A method may be empty after its slash."""
    is_ended = len(parts) > 1 and not parts[-1]
    if own is not None and len(parts) == 1 + is_ended:
        return own, parts[0]
    name, *methods = parts or [""]
    if not name or len(methods) not in {1, 1 + is_ended}:
        return None
    return name, methods[0]


def _path_error(method: str, parts: list[str]) -> HttpAnswer:
    if method == "POST" or len(parts) > 1 or not parts[0]:
        return text_answer(404, "Not Found")
    return text_answer(405, "Method Not Allowed")


def metrics_router(plane: DataPlane, metrics: Iterable[Rule], gate: Gate | None = None) -> Router:
    """Return the router of the metrics port: ``/metrics`` with authentication by the gate, and ``/health`` without."""

    async def health(_: HttpRequest) -> HttpAnswer:
        return _health(plane)

    rules = [rule("/health", "GET", health, need=Permission.NOTHING), *metrics]
    return Router(rules, _PathErrors(), gate=gate)


class _PathErrors:
    def no_path(self, method: str, path: str) -> HttpAnswer:
        del method, path
        return text_answer(404, "Not Found")

    def no_method(self, method: str, path: str, allowed: Iterable[str] = ()) -> HttpAnswer:
        del method, path, allowed
        return text_answer(405, "Method Not Allowed")


def _health(plane: DataPlane) -> HttpAnswer:
    readiness = plane.readiness()
    document = {"status": "ok"} if readiness.ready else {"status": "not ready", "reason": readiness.reason}
    return json_response(document, 200 if readiness.ready else 503)


def _metrics(render: Callable[[], bytes | None] | None) -> HttpAnswer:
    text = None if render is None else render()
    if text is None:
        return text_answer(404, "Not Found")
    return HttpAnswer(200, (("content-type", CONTENT_TYPE),), text)
