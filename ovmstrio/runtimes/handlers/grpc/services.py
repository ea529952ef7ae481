"""The services of a project's ``.proto``, ready for a handler and for a front end."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final

import structlog
import trio
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.handlers.grpc.compiling import GOOGLE_FILES, CompiledProto, compile_proto, module_name
from ovmstrio.work.user_code.importing import HandlerPackage
from ovmstrio.work.user_code.places import describe

__all__ = ["Rpc", "UserProto", "UserService", "open_proto"]

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


@dataclass(frozen=True, slots=True)
class Rpc:
    """One method of a service.

    Attributes:
        name: of the RPC, and of the handler's method.
        path: ``/package.Service/Method``.
        request_class: the generated class of the requests.
        reply_class: the generated class of the replies.
        client_streaming: whether the client sends any number of requests.
        server_streaming: whether the handler sends any number of replies.
    """

    name: str
    path: str
    request_class: type[Any]
    reply_class: type[Any]
    client_streaming: bool
    server_streaming: bool


@dataclass(frozen=True, slots=True)
class UserService:
    """A service by its full name."""

    name: str
    rpcs: tuple[Rpc, ...]


@dataclass(frozen=True, slots=True)
class UserProto:
    """A compiled and imported ``.proto``.

    Attributes:
        source: the file.
        module: the generated module with the messages, which a handler's constructor gets.
        modules: all generated modules, by the names that the handler can import them by (``iris_pb2``,
            ``iris_pb2_grpc``).
        services: what the file declares, in its order.
        files: the descriptors of the file and all that it imports, by name, imported ones first.
    """

    source: Path
    module: ModuleType
    modules: Mapping[str, ModuleType]
    services: tuple[UserService, ...]
    files: Mapping[str, FileDescriptorProto]

    @property
    def rpcs(self) -> Iterator[Rpc]:
        """Every method of every service."""
        return (rpc for service in self.services for rpc in service.rpcs)


@asynccontextmanager
async def open_proto(source: Path, directory: Path) -> AsyncIterator[UserProto]:
    """Compile and import the ``.proto`` of a project, and keep the result while the block runs.

    Both paths are absolute, and the project's folder is only read.  Imports of the file are looked for in ``directory``
    and beside the file.

    Raises:
        ConfigError: the file cannot be compiled or imported, declares no service, or two of its services have a
            method of the same name.

    Ownership: a temporary folder and the imported modules, which are gone when the block has ended.
    Cancellation: kills the compiler; an import that has begun is waited for.
    """
    roots = [directory, source.parent] if source.is_relative_to(directory) else [source.parent]
    with TemporaryDirectory(prefix="ovmstrio-proto-") as folder:
        compiled = await compile_proto(source, list(dict.fromkeys(roots)), Path(folder))
        modules_of = imported_modules(compiled)
        modules = await trio.to_thread.run_sync(modules_of.__enter__)
        try:
            module = modules[module_name(compiled.name)]
            yield UserProto(source, module, modules, _services_of(module, source), compiled.files)
        finally:
            modules_of.__exit__(None, None, None)


def _services_of(module: Any, source: Path) -> tuple[UserService, ...]:
    services = tuple(_service(each) for each in module.DESCRIPTOR.services_by_name.values())
    problems = _problems_of(services, source)
    if problems:
        raise ConfigError(problems)
    return services


def _service(descriptor: Any) -> UserService:
    return UserService(
        descriptor.full_name,
        tuple(
            Rpc(
                method.name,
                f"/{descriptor.full_name}/{method.name}",
                GetMessageClass(method.input_type),
                GetMessageClass(method.output_type),
                method.client_streaming,
                method.server_streaming,
            )
            for method in descriptor.methods
        ),
    )


def _problems_of(services: tuple[UserService, ...], source: Path) -> list[Problem]:
    if not services:
        return [Problem("declares no service", file=str(source), path="protobuf_path", expected="at least one service")]
    declared: dict[str, str] = {}
    problems: list[Problem] = []
    for service in services:
        for rpc in service.rpcs:
            first = declared.setdefault(rpc.name, service.name)
            if first != service.name:
                text = f"{first} and {service.name} both have a method {rpc.name}, but a Handler can have only one"
                problems.append(Problem(text, file=str(source), suggestion="rename one of the two"))
    return problems
