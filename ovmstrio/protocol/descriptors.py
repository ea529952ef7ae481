"""What the generated messages look like, for reflection and for Google's C parser.

The descriptors live in a pool of their own.  In protobuf's default pool they would collide with those of any client
library that the same process imports, for the messages have the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.descriptor_pb2 import FileDescriptorProto

__all__ = ["FILES", "OWN_SERVICES", "POOL", "Descriptors", "message_class"]


def _read_files() -> dict[str, FileDescriptorProto]:
    serialised = files("ovmstrio.protocol").joinpath("generated", "descriptors.binpb").read_bytes()
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
