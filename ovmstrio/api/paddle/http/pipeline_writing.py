"""The JSON form of a pipeline's answers, byte for byte as the gateway of Paddle Serving writes it.

Every field is there, in the order of its number, without blanks; numbers of 64 bits are texts, bytes are base64, and
characters that mean something in HTML are escaped.
"""

from __future__ import annotations

import re
from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from ovmstrio.api.kserve.rest.infer_answer import json_values
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.http import HttpAnswer
from ovmstrio.core.tensor import Tensor
from ovmstrio.wire.http.answers import JSON_TYPE

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["error_answer", "render", "status_of_code", "text_answer"]

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
