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

__all__ = ["METHOD", "REQUEST", "RESPONSE", "SERVICE", "TENSOR", "decode_request", "name_in"]

PACKAGE: Final = "baidu.paddle_serving.pipeline_serving"
SERVICE: Final = f"{PACKAGE}.PipelineService"
METHOD: Final = f"/{SERVICE}/inference"

REQUEST: Final[Any] = message_class(f"{PACKAGE}.Request")
RESPONSE: Final[Any] = message_class(f"{PACKAGE}.Response")
TENSOR: Final[Any] = message_class(f"{PACKAGE}.Tensor")

_OLD_FIELDS: Final = ("key", "value", "name", "method", "logid", "clientip")
_TEXT: Final = FieldDescriptorProto.TYPE_STRING
_BYTES: Final = FieldDescriptorProto.TYPE_BYTES
_NUMBER: Final = FieldDescriptorProto.TYPE_INT64


def _own_classes() -> tuple[Any, Any]:
    """Make the class of requests in the older layout, and that of what tells the layouts apart."""
    file = FileDescriptorProto(name="old_pipeline.proto", package=f"{PACKAGE}.old", syntax="proto2")
    message = file.message_type.add(name="Request")
    for number, name in enumerate(_OLD_FIELDS, start=1):
        repeated = name in {"key", "value"}
        message.field.add(
            name=name,
            number=number,
            type=_NUMBER if name == "logid" else _TEXT,
            label=FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL,
        )
    message = file.message_type.add(name="Envelope")
    fields = {3: ("old_name", _BYTES), 4: ("name", _BYTES), 5: ("old_logid", _NUMBER), 6: ("old_clientip", _BYTES)}
    for number, (name, kind) in fields.items():
        message.field.add(name=name, number=number, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL)
    pool = DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{PACKAGE}.old.{name}") for name in ("Request", "Envelope"))
    request, envelope = map(GetMessageClass, found)
    return request, envelope


_OLD_REQUEST, _ENVELOPE = _own_classes()


def decode_request(data: bytes) -> Any:
    """Parse a request of either layout into the newer one's message.

    A request of the older layout that has neither ``logid`` nor ``clientip`` is known by its name, where a tensor
    would have to be.

    Raises:
        ValueError: the bytes are a request of neither layout.
    """
    envelope = _envelope_of(data)
    if envelope is None or not _is_old(envelope):
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


def name_in(data: bytes) -> bytes:
    """Give the name that a request says, of which nothing else is read; empty if there is none, or it is unknown.

    That of a request in the older layout whose layout its name alone tells is unknown.
    """
    envelope = _envelope_of(data)
    if envelope is None:
        return b""
    name: bytes = envelope.old_name if _is_old(envelope) else envelope.name
    return name


def _envelope_of(data: bytes) -> Any | None:
    """Read the few fields that tell the layout; None of bytes that are no message."""
    try:
        return _ENVELOPE.FromString(data)
    except DecodeError:
        return None


def _is_old(envelope: Any) -> bool:
    """Tell the layout by the wire types of fields: those of another type are none of the envelope's."""
    return bool(envelope.HasField("old_logid") or envelope.HasField("old_clientip"))
