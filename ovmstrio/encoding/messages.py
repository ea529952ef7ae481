"""Descriptors of the protobuf messages, for reflection and for Google's C parser, and Paddle's message classes.

The descriptors have a separate pool.  In protobuf's default pool they would collide with the descriptors of client
libraries in the same process, because the messages have the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.request import ParameterValue

# ----------------------------------------------------------------------
# Descriptors
# ----------------------------------------------------------------------


def _read_files() -> dict[str, FileDescriptorProto]:
    serialised = files("ovmstrio.encoding").joinpath("generated", "descriptors.binpb").read_bytes()
    return {file.name: file for file in FileDescriptorSet.FromString(serialised).file}


def _build_pool(descriptors: Mapping[str, FileDescriptorProto]) -> DescriptorPool:
    pool = DescriptorPool()
    added: set[str] = set()

    def add(file: FileDescriptorProto) -> None:
        if file.name not in added:
            added.add(file.name)
            for dependency in file.dependency:
                add(descriptors[dependency])
            pool.Add(file)

    for file in descriptors.values():
        add(file)
    return pool


@dataclass(frozen=True, slots=True)
class Descriptors:
    """A set of ``.proto`` files, and a pool of their declarations."""

    files: Mapping[str, FileDescriptorProto]
    pool: DescriptorPool

    @classmethod
    def of(cls, descriptors: Mapping[str, FileDescriptorProto]) -> Descriptors:
        """Create a pool of files, which must include their imports."""
        return cls(descriptors, _build_pool(descriptors))

    def file_of(self, symbol: str) -> str | None:
        """Return the name of the file that declares a symbol, such as a message, service or method; None if unknown."""
        service, _, method = symbol.rpartition(".")
        try:
            name: str = self.pool.FindFileContainingSymbol(symbol).name
        except KeyError:
            try:
                name = self.pool.FindServiceByName(service).methods_by_name[method].containing_service.file.name
            except KeyError:
                return None
        return name

    def has_message(self, name: str) -> bool:
        """Return whether the pool has a message with this full name."""
        try:
            self.pool.FindMessageTypeByName(name)
        except KeyError:
            return False
        return True

    def with_imports(self, name: str) -> list[FileDescriptorProto]:
        """Return a file followed by its direct and indirect imports, each once."""
        names = [name]
        for file in names:
            names += [dependency for dependency in self.files[file].dependency if dependency not in names]
        return [self.files[file] for file in names]


FILES: Final[Mapping[str, FileDescriptorProto]] = _read_files()
"""All ``.proto`` files by their import name."""

OWN_SERVICES: Final = frozenset(f"{file.package}.{each.name}" for file in FILES.values() for each in file.service)
"""Full names of the server's services."""

POOL: Final = _build_pool(FILES)


def message_class(full_name: str) -> Any:
    """Return the class of a message such as ``inference.ModelInferRequest`` in Google's protobuf.

    Raises:
        KeyError: the message does not exist.
    """
    return GetMessageClass(POOL.FindMessageTypeByName(full_name))


# ----------------------------------------------------------------------
# Messages of Paddle Serving's pipelines, whose requests have two layouts
# ----------------------------------------------------------------------

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


def _build_classes() -> tuple[Any, Any]:
    """Create the classes of requests in the older layout, and of the fields that distinguish both layouts."""
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


_OLD_REQUEST, _ENVELOPE = _build_classes()


def decode_request(data: bytes) -> Any:
    """Parse a request of either layout into a message of the newer layout.

    A request of the older layout without ``logid`` and ``clientip`` is recognised by its name, which is in the field of
    the newer layout's tensors and is no tensor.

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
    """Return the name in a request without parsing the rest; empty if the name is missing or unknown.

    The name is unknown in a request of the older layout without ``logid`` and ``clientip``.
    """
    envelope = _envelope_of(data)
    if envelope is None:
        return b""
    name: bytes = envelope.old_name if _is_old(envelope) else envelope.name
    return name


def _envelope_of(data: bytes) -> Any | None:
    """Parse the fields that distinguish the layouts; None for bytes that are no message."""
    try:
        return _ENVELOPE.FromString(data)
    except DecodeError:
        return None


def _is_old(envelope: Any) -> bool:
    # The parser skips fields whose wire type differs from the envelope's.
    return bool(envelope.HasField("old_logid") or envelope.HasField("old_clientip"))


# ----------------------------------------------------------------------
# Parameters of KServe messages
# ----------------------------------------------------------------------

UNSIGNED_FROM: Final = 2**63
"""The lowest integer that exceeds ``int64_param``."""


def set_parameters(message: Any, parameters: Mapping[str, ParameterValue]) -> None:
    """Write parameters into a message's map, each into the field of its type."""
    for name, value in parameters.items():
        setattr(message.parameters[name], _field_of(value), value)


def _field_of(value: ParameterValue) -> str:
    match value:
        case bool():
            return "bool_param"
        case int():
            return "int64_param" if value < UNSIGNED_FROM else "uint64_param"
        case float():
            return "double_param"
        case str():
            return "string_param"
