"""The JSON form of a pipeline's requests, and of its answers, byte for byte as the gateway of Paddle Serving writes it.

Every field is there, in the order of its number, without blanks; numbers of 64 bits are texts, bytes are base64, and
characters that mean something in HTML are escaped.
"""

from __future__ import annotations

import re
from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson
from google.protobuf.json_format import ParseDict, ParseError

from ovmstrio.api.kserve.rest.infer_answer import json_values
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.gathered import Gathered
from ovmstrio.core.http import HttpAnswer
from ovmstrio.core.tensor import Tensor
from ovmstrio.protocol.pipeline_messages import TENSOR
from ovmstrio.runtimes.ops.messages import tensor_from_message
from ovmstrio.runtimes.ops.values import PipelineRequest
from ovmstrio.util.json_reader import (
    AT_ONCE_BYTES,
    LONG_STRINGS,
    MAX_MEMBERS,
    JsonLimitExceeded,
    JsonSyntaxError,
    parse_at_once,
    read_json,
)
from ovmstrio.util.slices import run_in_slices, run_to_end
from ovmstrio.wire.http.answers import JSON_TYPE

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from ovmstrio.runtimes.ops.values import PipelineTensor

__all__ = ["error_answer", "read_request", "receive_request", "render", "status_of_code", "text_answer"]

_INT64: Final = range(-(2**63), 2**63)
_MOST_DIGITS: Final = 100
_AT_ONCE_BYTES: Final = 8 * 1024
"""Larger bodies may have so many tensors that reading all of them takes long."""


async def receive_request(body: bytes, name: str, method: str) -> PipelineRequest:
    """Read a body as :func:`read_request`, in a worker thread if the body is large.

    Cancellation: as :func:`run_in_slices`; not a checkpoint for small bodies.
    """
    if len(body) <= _AT_ONCE_BYTES:
        return read_request(body, name, method)
    return await run_in_slices(_request_in_slices(body, name, method))


def read_request(body: bytes, name: str, method: str) -> PipelineRequest:
    """Read a body; ``name`` and ``method`` are those of the path, whatever the body says.

    Raises:
        InvalidRequest: the body is not JSON, exceeds a limit, or fields do not have their types; all of them are named.
    """
    return run_to_end(_request_in_slices(body, name, method))


def _request_in_slices(body: bytes, name: str, method: str) -> Generator[None, None, PipelineRequest]:
    try:
        parsed: Any = None
        if body and not body.isspace():
            parsed = parse_at_once(body) if len(body) <= AT_ONCE_BYTES else (yield from read_json(body, LONG_STRINGS))
    except (JsonSyntaxError, JsonLimitExceeded) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    document = {} if parsed is None else parsed
    if not isinstance(document, dict):
        raise InvalidRequest(f"the body: expected a JSON object, got {_kind(document)}")
    request, wrong = PipelineRequest(name=name, method=method), Gathered()
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
    wrong.tell()
    return request


def _list(document: dict[str, Any], field: str) -> list[Any]:
    value = document.get(field)
    if value is None:
        return []
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
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise InvalidRequest("value: expected lists and objects that are not so deep in one another") from None


def _integer(field: str, value: Any) -> int:
    if value is None:
        return 0
    number = None
    if isinstance(value, str):
        digits = value.removeprefix("-")
        number = int(value) if digits.isdecimal() and value.isascii() and len(digits) <= _MOST_DIGITS else None
    elif isinstance(value, float):
        number = int(value) if value.is_integer() else None
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None or number not in _INT64:
        raise InvalidRequest(f"{field}: expected a whole number of 64 bits, or its text, got {_kind(value)}")
    return number


def _read_tensor(index: int, value: Any) -> PipelineTensor:
    if not isinstance(value, dict):
        raise InvalidRequest(f"tensors[{index}]: expected an object, got {_kind(value)}")
    try:
        return tensor_from_message(ParseDict(value, TENSOR(), ignore_unknown_fields=True))
    except ParseError as error:
        raise InvalidRequest(f"tensors[{index}]: {error}") from None


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    kind = kinds.get(type(value), "a number")
    return f"{kind} {value!r:.40}" if isinstance(value, str | int | float) and not isinstance(value, bool) else kind


_ESCAPES: Final[Mapping[bytes, bytes]] = {
    b"<": b"\\u003c",
    b">": b"\\u003e",
    b"&": b"\\u0026",
    "\u2028".encode(): b"\\u2028",
    "\u2029".encode(): b"\\u2029",
}
_ESCAPED: Final = re.compile(b"|".join(map(re.escape, _ESCAPES)))
_SHORT: Final = re.compile(rb'\\(?:\\|"|[bf])')
_LONG: Final[Mapping[bytes, bytes]] = {rb"\b": rb"\u0008", rb"\f": rb"\u000c"}

_OK: Final = 200
_OF_PRODUCT: Final = 422
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
"""gRPC's number of the error that every unreadable body is."""


def render(message: Any) -> bytes:
    """Write an answer's message."""
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


def status_of_code(code: int) -> int:
    """Give the HTTP status of an ``err_no``; a product's codes have one in common."""
    return _STATUS_BY_CODE.get(code, _OF_PRODUCT)


def error_answer(text: str, status: int = 400, code: int = INVALID_ARGUMENT) -> HttpAnswer:
    """Refuse a body that cannot be read."""
    body = _dump({"error": text, "code": code, "message": text, "details": []})
    return HttpAnswer(status, JSON_TYPE, body)


def text_answer(status: int, text: str) -> HttpAnswer:
    """Refuse a path or a verb."""
    headers = (("content-type", "text/plain; charset=utf-8"), ("x-content-type-options", "nosniff"))
    return HttpAnswer(status, headers, f"{text}\n".encode())


def _dump(value: Any) -> bytes:
    """Write JSON with the escapes that the gateway's library makes."""
    plain = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    plain = _ESCAPED.sub(lambda match: _ESCAPES[match[0]], plain)
    return _SHORT.sub(lambda match: _LONG.get(match[0], match[0]), plain)


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
    """Give numbers with as many digits as their type has, and texts for those that JSON does not have."""
    known = BY_NAME[datatype]
    return json_values(Tensor("", known, np.array(values, known.numpy)))
