"""The JSON form of a pipeline's request, with what clients have asked to be allowed besides.

It is protobuf's JSON form: both spellings of field names, numbers that may be texts, bytes in base64, unknown fields
ignored.  Beyond it, a value may be any JSON, which becomes its text, and one ``value`` need not stand in a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson
from google.protobuf.json_format import ParseDict, ParseError

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.protocol.pipeline_messages import TENSOR
from ovmstrio.runtimes.ops.messages import tensor_from_message
from ovmstrio.runtimes.ops.values import PipelineRequest

if TYPE_CHECKING:
    from ovmstrio.runtimes.ops.values import PipelineTensor

__all__ = ["read_request"]

_INT64: Final = range(-(2**63), 2**63)


def read_request(body: bytes, name: str, method: str) -> PipelineRequest:
    """Read a body; ``name`` and ``method`` are those of the path, whatever the body says.

    Raises:
        InvalidRequest: it is not JSON, or a field does not have its type.
    """
    try:
        parsed: Any = orjson.loads(body) if body.strip() else None
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    document = {} if parsed is None else parsed
    if not isinstance(document, dict):
        raise InvalidRequest(f"the body: expected a JSON object, got {_kind(document)}")
    return PipelineRequest(
        keys=[_text("key", key) for key in _list(document, "key")],
        values=[_stringified(value) for value in _list(document, "value")],
        tensors=[_tensor(index, tensor) for index, tensor in enumerate(_list(document, "tensors"))],
        name=name,
        method=method,
        logid=_integer("logid", document.get("logid")),
        clientip=_text("clientip", document.get("clientip") or ""),
    )


def _list(document: dict[str, Any], field: str) -> list[Any]:
    value = document.get(field)
    if value is None:
        return []
    if isinstance(value, list):
        return value
    if field == "value" and not isinstance(value, str):
        return [value]
    raise InvalidRequest(f"{field}: expected a list, got {_kind(value)}")


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}: expected a string, got {_kind(value)}")
    return value


def _stringified(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _integer(field: str, value: Any) -> int:
    if value is None:
        return 0
    number = None
    if isinstance(value, str):
        number = int(value) if value.removeprefix("-").isdecimal() and value.isascii() else None
    elif isinstance(value, float):
        number = int(value) if value.is_integer() else None
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None or number not in _INT64:
        raise InvalidRequest(f"{field}: expected a whole number of 64 bits, or its text, got {_kind(value)}")
    return number


def _tensor(index: int, value: Any) -> PipelineTensor:
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
