"""The message classes of Paddle Serving's pipelines, and both layouts in which requests come.

::

    field   newer                    older
    3       repeated Tensor          name
    4       name                     method
    5       method                   logid (a number)
    6       logid (a number)         clientip
    7       clientip

The fields that are numbers in one layout and texts in the other tell them apart.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from ovmstrio.protocol.descriptors import message_class

__all__ = ["METHOD", "REQUEST", "RESPONSE", "SERVICE", "TENSOR", "decode_request"]

PACKAGE: Final = "baidu.paddle_serving.pipeline_serving"
SERVICE: Final = f"{PACKAGE}.PipelineService"
METHOD: Final = f"/{SERVICE}/inference"

REQUEST: Final[Any] = message_class(f"{PACKAGE}.Request")
RESPONSE: Final[Any] = message_class(f"{PACKAGE}.Response")
TENSOR: Final[Any] = message_class(f"{PACKAGE}.Tensor")

_OLD_FIELDS: Final = ("key", "value", "name", "method", "logid", "clientip")
_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2
_FIXED32: Final = 5
_VARINT_BITS: Final = 70


def _old_request_class() -> Any:
    file = FileDescriptorProto(name="old_pipeline.proto", package=f"{PACKAGE}.old", syntax="proto2")
    message = file.message_type.add(name="Request")
    for number, name in enumerate(_OLD_FIELDS, start=1):
        repeated = name in {"key", "value"}
        message.field.add(
            name=name,
            number=number,
            type=FieldDescriptorProto.TYPE_INT64 if name == "logid" else FieldDescriptorProto.TYPE_STRING,
            label=FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL,
        )
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.old.Request"))


_OLD_REQUEST: Final[Any] = _old_request_class()


def decode_request(data: bytes) -> Any:
    """Parse a request of either layout into the newer one's message.

    A request of the older layout that has neither ``logid`` nor ``clientip`` is known by its name, where a tensor
    would have to be.

    Raises:
        ValueError: the bytes are a request of neither layout.
    """
    if not _is_old(data):
        try:
            return REQUEST.FromString(data)
        except DecodeError:
            pass
    try:
        old = _OLD_REQUEST.FromString(data)
    except DecodeError:
        raise ValueError(f"its {len(data)} bytes are not a protobuf message of that type") from None
    return REQUEST(
        key=old.key, value=old.value, name=old.name, method=old.method, logid=old.logid, clientip=old.clientip
    )


def _is_old(data: bytes) -> bool:
    """Tell by the wire types of the top-level fields; what cannot be read as fields is left to the parser."""
    position, end = 0, len(data)
    try:
        while position < end:
            tag, position = _read_varint(data, position)
            kind = tag & 7
            if (tag >> 3, kind) in {(5, _VARINT), (6, _LENGTH)}:
                return True
            position = _skip(data, position, kind)
    except (IndexError, ValueError):
        return False
    return False


def _skip(data: bytes, position: int, kind: int) -> int:
    if kind == _LENGTH:
        length, position = _read_varint(data, position)
        return position + length
    if kind == _VARINT:
        return _read_varint(data, position)[1]
    if kind in {_FIXED32, _FIXED64}:
        return position + (4 if kind == _FIXED32 else 8)
    raise ValueError(f"wire type {kind}")


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, _VARINT_BITS, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the bit that says that more follows
            return value, position
    raise ValueError("a number without end")
