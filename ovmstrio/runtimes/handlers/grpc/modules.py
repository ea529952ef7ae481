"""Import the generated modules of a ``.proto`` so that two projects may have files and messages of one name.

The modules bear private names (:mod:`ovmstrio.work.user_code.importing`), and so do not meet in ``sys.modules``.  Their
messages would meet all the same in protobuf's default pool, where every name exists once in a process.  They go there
as everybody's do, because only there a handler's ``google.protobuf.timestamp_pb2.Timestamp`` is the class that its own
messages expect; when a name is taken there, they get a pool of their own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import structlog
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.handlers.grpc.compiling import GOOGLE_FILES, CompiledProto, module_name
from ovmstrio.work.user_code.importing import HandlerPackage
from ovmstrio.work.user_code.places import describe

__all__ = ["imported_modules"]

log = structlog.get_logger(__name__)

_POOL_IMPORT: Final = "from google.protobuf import descriptor_pool as _descriptor_pool\n"
_PRIVATE_POOL: Final = "ovmstrio_private_pool"


@contextmanager
def imported_modules(proto: CompiledProto) -> Iterator[dict[str, ModuleType]]:
    """Import what was generated, and give the modules by the names that a handler imports them by; blocking.

    These are the names within the project, and for the file itself also those without its folder.

    Raises:
        ConfigError: the generated code cannot be imported.
    """
    package = HandlerPackage(proto.folder)
    try:
        yield _load(proto, package)
    finally:
        package.unload()


def _load(proto: CompiledProto, package: HandlerPackage) -> dict[str, ModuleType]:
    try:
        try:
            modules = _import_all(proto, package)
        except TypeError as error:
            log.info("messages get a descriptor pool of their own", file=str(proto.source), reason=str(error))
            _use_private_pool(proto, package)
            modules = _import_all(proto, package)
    except Exception as error:
        text = f"the code generated from it cannot be imported: {describe(error)}"
        raise ConfigError([Problem(text, file=str(proto.source), path="protobuf_path")]) from error
    main = module_name(proto.name)
    short = main.rpartition(".")[2]
    return {short: modules[main], f"{short}_grpc": modules[f"{main}_grpc"], **modules}


def _import_all(proto: CompiledProto, package: HandlerPackage) -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    for file in _own_files(proto.files):
        for name in (module_name(file), f"{module_name(file)}_grpc"):
            modules[name] = importlib.import_module(f"{package.name}.{name}")
    return modules


def _own_files(files: Mapping[str, FileDescriptorProto]) -> list[str]:
    return [name for name in files if not name.startswith(GOOGLE_FILES)]


def _use_private_pool(proto: CompiledProto, package: HandlerPackage) -> None:
    pool = DescriptorPool()
    for name, file in proto.files.items():
        if name.startswith(GOOGLE_FILES):
            pool.Add(file)
    holder: Any = ModuleType(_PRIVATE_POOL)
    holder.Default = lambda: pool
    sys.modules[f"{package.name}.{_PRIVATE_POOL}"] = holder
    for name in _own_files(proto.files):
        path = proto.folder / (module_name(name).replace(".", "/") + ".py")
        path.write_text(path.read_text().replace(_POOL_IMPORT, f"import {_PRIVATE_POOL} as _descriptor_pool\n"))
