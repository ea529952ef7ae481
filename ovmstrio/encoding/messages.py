"""What the generated messages look like, for reflection and for Google's C parser.

The descriptors live in a pool of their own.  In protobuf's default pool they would collide with those of any client
library that the same process imports, for the messages have the same names.
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

# ----------------------------------------------------------------------
# What the generated messages look like, for reflection and for Google's C parser
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
    """Source files that belong together, and a pool of what they declare."""

    files: Mapping[str, FileDescriptorProto]
    pool: DescriptorPool

    @classmethod
    def of(cls, descriptors: Mapping[str, FileDescriptorProto]) -> Descriptors:
        """Put files, with all that they import, into a pool of their own."""
        return cls(descriptors, _build_pool(descriptors))

    def file_of(self, symbol: str) -> str | None:
        """Find the file that declares a symbol; methods are declared by their service."""
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
        """Tell whether there is a message of that full name."""
        try:
            self.pool.FindMessageTypeByName(name)
        except KeyError:
            return False
        return True

    def with_imports(self, name: str) -> list[FileDescriptorProto]:
        """List a file and all that it imports, each once, itself first."""
        names = [name]
        for each in names:
            names += [dependency for dependency in self.files[each].dependency if dependency not in names]
        return [self.files[each] for each in names]


FILES: Final[Mapping[str, FileDescriptorProto]] = _read_files()
"""Every source file, by the name under which others import it."""

OWN_SERVICES: Final = frozenset(f"{file.package}.{each.name}" for file in FILES.values() for each in file.service)
"""The full names of the services that are the server's own."""

POOL: Final = _build_pool(FILES)


def message_class(full_name: str) -> Any:
    """Find the class by which Google's protobuf reads and writes a message, such as ``inference.ModelInferRequest``.

    Raises:
        KeyError: there is no such message.
    """
    return GetMessageClass(POOL.FindMessageTypeByName(full_name))


# ----------------------------------------------------------------------
# The message classes of Paddle Serving's pipelines, and both layouts in which requests come
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
